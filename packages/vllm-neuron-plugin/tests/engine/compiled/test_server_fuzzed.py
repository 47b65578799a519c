# SPDX-License-Identifier: Apache-2.0
"""Requests that schemathesis draws from the server's own OpenAPI document: no server error, and an engine that lives.

Its cases are of both kinds, as the document allows and as it forbids. As most of what the document allows is refused
for one field of dozens, it is narrowed where that is the rule, so that more requests come to the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT = {
    "/v1/systemone": "a structured decision needs a model made for it; others answer 501, which says so",
    "/scale_elastic_ep": "starts and ends engines of data parallelism, of which this server has none: 500",
}
TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
MESSAGES = {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3}
TOKENS = {"type": "integer", "minimum": 1, "maximum": 12}
NARROWED: dict[str, dict[str, Any]] = {
    "messages": MESSAGES,
    "prompt": TEXT,
    "max_tokens": TOKENS,
    "max_completion_tokens": TOKENS,
    "max_output_tokens": TOKENS,
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 3},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "minimum": 0.1, "maximum": 2},
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "priority": {"const": 0},
    "logprobs": {"type": ["boolean", "integer"], "minimum": 0, "maximum": 5},
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 3},
}
REQUIRED = ("model", "prompt", "messages")


def narrowed(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document with few values for the fields of a request that decide whether it is accepted."""
    for name, schema in document["components"]["schemas"].items():
        fields = schema.get("properties", {})
        if not name.endswith("Request") or "model" not in fields:
            continue
        simple = (
            {"type": "array", "items": MESSAGES, "minItems": 1, "maxItems": 3}
            if "Batch" in name
            else MESSAGES
        )
        values = NARROWED | {"model": {"enum": [model]}, "messages": simple}
        fields |= {field: values[field] for field in fields.keys() & values.keys()}
        schema["required"] = sorted({*schema.get("required", ()), *(fields.keys() & set(REQUIRED))})
        schema["additionalProperties"] = False
    return document


def takes_something(operations: dict[str, Any]) -> bool:
    return any(one.get("parameters") or one.get("requestBody") for one in operations.values())


def status_of(url: str, method: str) -> int:
    request = urllib.request.Request(url, method=method.upper())
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def answers(found: Any) -> Iterator[tuple[str, int]]:
    """Path and status of every answer in a report."""
    if isinstance(found, list):
        for item in found:
            yield from answers(item)
    elif isinstance(found, dict) and {"cases", "interactions"} <= found.keys():
        for name, interaction in found["interactions"].items():
            if interaction.get("response"):
                yield found["cases"][name]["value"]["path"], interaction["response"]["status_code"]
    elif isinstance(found, dict):
        yield from answers(list(found.values()))


# The default run draws the same by number and seed, so that what it finds is of the change; the nightly one draws anew.
@pytest.mark.parametrize(
    "amount",
    [
        pytest.param(["--max-examples", "20", "--seed", "1"], id="20-each"),
        pytest.param(
            ["--max-examples", "50", "--max-time", "300"],
            id="5min",
            marks=[pytest.mark.nightly, pytest.mark.timeout(1200)],
        ),
    ],
)
def test_no_request_is_a_server_error_or_ends_the_engine(server, tmp_path: Path, amount: list[str]) -> None:
    document = json.load(urllib.request.urlopen(f"{server.url}/openapi.json", timeout=60))
    assert LEFT_OUT.keys() <= document["paths"].keys()
    bare = [path for path, operations in document["paths"].items() if not takes_something(operations)]
    for path in set(bare) - LEFT_OUT.keys():  # nothing to draw: asked once
        assert all(status_of(server.url + path, method) < 500 for method in document["paths"][path]), path

    (tmp_path / "document.json").write_text(json.dumps(narrowed(document, server.name)))
    # fmt: off
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--no-color", "run", "document.json", "--url", server.url,
        "--phases", "fuzzing", "--workers", "4", *amount, "--checks", "not_a_server_error", "--continue-on-failure",
        "--request-timeout", "120", "--warnings", "off", "--suppress-health-check", "all",
        "--report", "ndjson", "--report-ndjson-path", "report.ndjson",
    ]
    # fmt: on
    for path in {*LEFT_OUT, *bare}:
        command += ["--exclude-path", path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    lines = (tmp_path / "report.ndjson").read_text().splitlines()
    seen = Counter(answers([json.loads(line) for line in lines]))
    print(seen)
    assert {path for path, _ in seen} == document["paths"].keys() - LEFT_OUT.keys() - set(bare)
    assert sum(count for (_, status), count in seen.items() if status == 200) >= 5

    reply = server.client.completions.create(
        model=server.name, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in reply.choices[0].text
    assert not server.tracebacks()
