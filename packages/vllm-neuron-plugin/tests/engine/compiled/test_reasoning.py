# SPDX-License-Identifier: Apache-2.0
"""A server with ``--reasoning-parser``: a grammar holds for the answer and not for the reasoning before it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

BUCKETS = '{"neuron_config": {"compiler": "fx", "prefill_buckets": [64], "decode_buckets": [8]}}'
# fmt: off
LIMITS = [
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "64",
    "--num-gpu-blocks-override", "140", "--additional-config", BUCKETS, "--reasoning-parser", "deepseek_r1",
]
# fmt: on
END = "</think>"
PATTERN = "(ab|cd){2,3}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 23]}},
    "required": ["a"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"extra_body": {"structured_outputs": {"regex": PATTERN}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
        }
    },
]
SEEDS = range(4)
BIAS = 3.0


@pytest.fixture(scope="module")
def thinker(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokenizer has the marks around a reasoning, as tokens that are text too."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("thinker")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.add_tokens(["<think>", END])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig.from_pretrained(tiny_llama, vocab_size=len(tokenizer))
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module", params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["async", "sync"]
)
def server(
    request: pytest.FixtureRequest,
    start_server: Any,
    thinker: Path,
    graph_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    how = "--async-scheduling" if request.param else "--no-async-scheduling"
    log = tmp_path_factory.mktemp("reasoning") / "serve.log"
    server = start_server(graph_cache, log, thinker, [*LIMITS, how])
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def sampling(thinker: Path) -> dict[str, Any]:
    """Printable text at temperature 1, whose reasoning ends within some tokens and in nothing but its mark."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(thinker)
    tokens = {
        token: tokenizer.convert_tokens_to_ids(token) for token in [END, "</s>", *map(chr, range(33, 127))]
    }
    return {
        "messages": [{"role": "user", "content": "Think."}],
        "temperature": 1,
        "max_tokens": 200,
        "logit_bias": {str(tokens[END]): BIAS, str(tokens["</s>"]): -100},
        "extra_body": {"allowed_token_ids": list(tokens.values())},
    }


def asked(server: Any, sampling: dict[str, Any], seed: int, constraint: dict[str, Any]) -> Any:
    body = sampling["extra_body"] | constraint.get("extra_body", {})
    return server.client.chat.completions.create(
        model=server.name, seed=seed, **sampling | constraint | {"extra_body": body}
    ).choices[0]


@pytest.mark.supports("reasoning parsers", model="llama")
def test_a_grammar_begins_where_the_reasoning_ends(server, sampling):
    wanted = [(seed, constraint) for seed in SEEDS for constraint in (*CONSTRAINTS, {})]
    with ThreadPoolExecutor(
        len(wanted)
    ) as pool:  # together: with and without a grammar, thinking and answering
        found = list(pool.map(lambda one: asked(server, sampling, *one), wanted))
    lengths = set()
    for at in range(0, len(found), 3):
        by_regex, by_schema, free = found[at : at + 3]
        assert by_regex.finish_reason == by_schema.finish_reason == "stop"
        assert re.fullmatch(PATTERN, by_regex.message.content)
        assert json.loads(by_schema.message.content)["a"] in (1, 23)
        # What it thinks is, letter for letter, what it thinks without a grammar.
        thoughts = [one.message.reasoning for one in (by_regex, by_schema, free)]
        assert thoughts == [free.message.reasoning] * 3 and free.message.reasoning
        assert free.finish_reason == "length" and not re.match(PATTERN, free.message.content)
        lengths.add(len(free.message.reasoning))
    assert len(lengths) > 1


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=["regex", "json_schema"])
def test_a_stream_has_the_reasoning_in_pieces_and_then_the_answer(server, sampling, constraint):
    pieces = 0
    for seed in SEEDS:
        whole = asked(server, sampling, seed, constraint).message
        body = sampling["extra_body"] | constraint.get("extra_body", {})
        stream = server.client.chat.completions.create(
            model=server.name, seed=seed, stream=True, **sampling | constraint | {"extra_body": body}
        )
        deltas = [chunk.choices[0].delta for chunk in stream]
        kinds = [kind for delta in deltas for kind in ("reasoning", "content") if getattr(delta, kind, None)]
        assert kinds == sorted(kinds, reverse=True)
        pieces += kinds.count("reasoning")
        for kind in ("reasoning", "content"):
            assert "".join(getattr(delta, kind, None) or "" for delta in deltas) == getattr(whole, kind)
    assert pieces > 2 * len(SEEDS)
