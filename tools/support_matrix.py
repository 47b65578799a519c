# SPDX-License-Identifier: Apache-2.0
"""Which feature works with which model family, from the tests that prove it: `python tools/support_matrix.py`.

A test says what it proves with `@pytest.mark.supports("prefix caching", model="llama")`. What is refused comes from
the tables that refuse it. Writes `support.json` into the plugin, which `vllm-neuron support` prints, and the table of
`docs/support.md`; a test fails when either is not up to date.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devtools.places import ROOT

DATA = ROOT / "packages/vllm-neuron-plugin/src/vllm_neuron/cli/support.json"
PAGE = ROOT / "docs/support.md"
MODELS = {"llama": "Llama", "qwen3": "Qwen3", "bert": "BERT", "any": "without a model"}
NOT_ON_HARDWARE = "not run on hardware"

FEATURES = {
    "models and weights": (
        "greedy tokens equal to transformers",
        "bfloat16",
        "RoPE scaling",
        "strict checkpoint loading",
        "GGUF conversion",
        "quantised weights",
        "LoRA",
        "multimodal models",
        "pooling models",
        "classification and scoring",
    ),
    "scheduling and memory": (
        "continuous batching",
        "chunked prefill",
        "prefix caching",
        "preemption",
        "priority scheduling",
        "asynchronous scheduling",
        "decode context buckets",
        "abort",
        "memory estimate before weights",
        "FP8 KV cache",
        "FP8 scale calibration",
        "speculative decoding",
        "sleep mode",
        "weight offloading",
        "KV cache offloading",
    ),
    "several devices": (
        "tensor parallelism",
        "pipeline parallelism",
        "data parallelism",
        "expert parallelism",
        "prefill/decode disaggregation",
    ),
    "requests": (
        "temperature, top-k, top-p, min-p",
        "seeds",
        "penalties and logit edits",
        "logprobs",
        "prompt logprobs",
        "several samples of one request",
        "stop strings",
        "structured outputs",
        "thinking budget",
        "prompt embeddings",
        "custom logits processors",
    ),
    "serving": (
        "chat completions",
        "streaming",
        "tool calls",
        "reasoning parsers",
        "metrics",
        "profiling",
        "ahead-of-time compilation",
        "nothing compiled after ready",
    ),
    "accuracy": (
        "tensor capture",
        "input snapshots",
        "bisection",
        "planted faults found",
    ),
}
"""Every feature the matrix knows, by group; a marker of another one is an error."""

REFUSED_BY = {
    "quantised weights": "--quantization",
    "LoRA": "--enable-lora",
    "multimodal models": "--model",
    "speculative decoding": "--speculative-config",
    "sleep mode": "--enable-sleep-mode",
    "weight offloading": "--cpu-offload-gb",
    "KV cache offloading": "--kv-offloading-size",
    "pipeline parallelism": "--pipeline-parallel-size",
    "data parallelism": "--data-parallel-size",
    "expert parallelism": "--enable-expert-parallel",
    "prefill/decode disaggregation": "--kv-transfer-config",
    "thinking budget": "thinking_token_budget",
}
"""The setting or request parameter that is refused while a feature is missing; without it the feature needs tests."""


class MatrixError(Exception):
    """Markers and refusals that contradict each other, or a marker nobody can read."""


@dataclass(frozen=True)
class Proof:
    """A test that carries a marker; a `nightly` one does not run by default."""

    feature: str
    model: str
    test: str
    nightly: bool


def proofs(root: Path = ROOT) -> list[Proof]:
    """The marked tests of every package, by file and line; raises `MatrixError` for a marker that says nothing."""
    found: list[Proof] = []
    for path in sorted(root.glob("packages/*/tests/**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found += _proofs_of(node, f"{path.relative_to(root)}::{node.name}")
    return found


def _proofs_of(node: ast.FunctionDef, test: str) -> Iterator[Proof]:
    marks = [ast.unparse(decorator) for decorator in node.decorator_list]
    nightly = "pytest.mark.nightly" in marks
    known = {feature for features in FEATURES.values() for feature in features}
    for decorator, text in zip(node.decorator_list, marks, strict=True):
        if not text.startswith("pytest.mark.supports"):
            continue
        try:
            assert isinstance(decorator, ast.Call)
            (feature,) = (ast.literal_eval(argument) for argument in decorator.args)
            ((name, model),) = ((key.arg, ast.literal_eval(key.value)) for key in decorator.keywords)
        except (AssertionError, ValueError) as error:
            raise MatrixError(f'{test}: {text}: must be supports("feature", model="llama")') from error
        if name != "model" or feature not in known or model not in MODELS:
            raise MatrixError(f"{test}: {text}: no such feature or model in tools/support_matrix.py")
        yield Proof(feature, model, test, nightly)


def refusals() -> dict[str, str]:
    """What the plugin refuses: setting or request parameter -> its hint."""
    from vllm_neuron.admission import REFUSED
    from vllm_neuron.checks import MODEL_REFUSALS, REFUSALS

    found = {refusal.setting: refusal.hint for refusal in (*REFUSALS, *MODEL_REFUSALS)}
    return found | {name: refused.reason for name, refused in REFUSED.items()}


def matrix(proven: list[Proof], refused: dict[str, str]) -> dict[str, Any]:
    """The whole matrix, ready for JSON; raises `MatrixError` for a feature that is neither proven nor refused."""
    rows = []
    for group, features in FEATURES.items():
        for feature in features:
            mine = [proof for proof in proven if proof.feature == feature]
            setting = REFUSED_BY.get(feature)
            hint = refused.get(setting) if setting else None
            if (hint is None) == (not mine):
                state = (
                    "both refused and proven by a test" if mine else "neither refused nor proven by a test"
                )
                raise MatrixError(
                    f"{feature!r} is {state}: mark the tests that prove it, or correct tools/support_matrix.py"
                )
            rows.append(_row(group, feature, mine, setting if hint else None, hint))
    return {"models": MODELS, "neuron_device": NOT_ON_HARDWARE, "features": rows}


def _row(
    group: str, feature: str, mine: list[Proof], setting: str | None, hint: str | None
) -> dict[str, Any]:
    tests = {
        model: [{"test": proof.test, "nightly": proof.nightly} for proof in mine if proof.model == model]
        for model in MODELS
    }
    refusal = None if hint is None else {"setting": setting, "hint": hint}
    return {"group": group, "feature": feature, "refused": refusal, "tests": tests}


def markdown(data: dict[str, Any]) -> str:
    """The table of the documentation page."""
    from vllm_neuron.cli.support import cell_text

    models = data["models"]
    rows = [
        f"| feature | {' | '.join(models.values())} | Neuron device |",
        "|---|" + "---|" * (len(models) + 1),
    ]
    for row in data["features"]:
        refusal = row["refused"]
        if refusal:
            said = f"refused: `{refusal['setting']}`: {refusal['hint']}"
            rows.append(
                f"| {row['feature']} | {' | '.join([said] + ['refused'] * (len(models) - 1))} | refused |"
            )
        else:
            cells = [cell_text(row["tests"][model]) for model in models]
            rows.append(f"| {row['feature']} | {' | '.join(cells)} | *{data['neuron_device']}* |")
    return "\n".join(rows) + "\n"


def page(data: dict[str, Any], text: str) -> str:
    """The documentation page with this matrix in it."""
    table = markdown(data)
    pattern = r"(<!-- matrix -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}\n{table}\n{found[2]}", text, flags=re.DOTALL)


def serialised(data: dict[str, Any]) -> str:
    """The data file's text."""
    return json.dumps(data, indent=1) + "\n"


def main() -> None:
    """Write the data file and the page."""
    data = matrix(proofs(), refusals())
    DATA.write_text(serialised(data))
    PAGE.write_text(page(data, PAGE.read_text()))


if __name__ == "__main__":
    main()
