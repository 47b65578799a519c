# SPDX-License-Identifier: Apache-2.0
"""Whether two engines compute the same model: each continues the same prompts and judges both continuations.

Run as a script (`bench.py` does, in both interpreters) it starts the engine that is measured, generates
greedily, scores texts, and writes a JSON file. `compare` is the rule. Standard library and vLLM alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_AGREEMENT = 0.97
"""Least share of a side's generated tokens that the other side finds likeliest in the same context."""

MAX_LOGPROB_GAP = 0.1
"""Most the two sides' log-probabilities of the same tokens may differ on average, in nats."""

OUTPUT_TOKENS = 64
ALONE = 4
"""Prompts that are also continued one at a time, through the kernels of batch 1."""

PROMPTS = (
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "Write a short poem about the sea in winter.",
    "List five things to check before a long bicycle tour.",
    "How does a refrigerator keep food cold?",
    "Give me a recipe for a simple vegetable soup.",
    "What happened in the year 1969 that people still talk about?",
    "Write a Python function that returns the largest of three numbers.",
    "Why do leaves change colour in autumn?",
    "Describe the job of a librarian in three sentences.",
    "What is the difference between weather and climate?",
    "Tell a story about a fox that learns to swim.",
    "How many legs does a spider have, and how many has an ant?",
    "Translate into plain English: the hypothesis could not be rejected.",
    "What should I pack for two days in the mountains?",
    "Summarise how a bill becomes a law.",
)


@dataclass(frozen=True)
class Agreement:
    """How far side B agrees with texts of side A."""

    top1: float
    """Share of A's generated tokens that B finds likeliest."""
    logprob_gap: float
    """Mean absolute difference of the two sides' log-probabilities of these tokens, in nats."""

    @property
    def is_same_model(self) -> bool:
        """Whether both limits hold."""
        return self.top1 >= MIN_AGREEMENT and self.logprob_gap <= MAX_LOGPROB_GAP


def compare(own: list[list[list[float]]], other: list[list[list[float]]]) -> Agreement:
    """Agreement of two sides' scores of the same texts, `[text][token][given, best]` log-probabilities.

    `own` are the scores of the side that generated the texts. Raises `ValueError` if the shapes differ or
    there is nothing to compare.
    """
    if [len(text) for text in own] != [len(text) for text in other] or not any(own):
        raise ValueError("the two sides did not score the same texts")
    mine = [score for text in own for score in text]
    theirs = [score for text in other for score in text]
    agreed = sum(given >= best for given, best in theirs)
    gaps = [abs(a[0] - b[0]) for a, b in zip(mine, theirs, strict=True)]
    return Agreement(agreed / len(theirs), statistics.fmean(gaps))


def generate(llm: Any) -> list[dict[str, list[int]]]:
    """Greedy continuations of the prompts: all at once, then the first few one at a time."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
    requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
    results = llm.generate(requests, params, use_tqdm=False)
    results += [llm.generate([request], params, use_tqdm=False)[0] for request in requests[:ALONE]]
    return [
        {"prompt": list(result.prompt_token_ids), "output": list(result.outputs[0].token_ids)}
        for result in results
    ]


def score(llm: Any, texts: list[dict[str, list[int]]]) -> list[list[list[float]]]:
    """`[text][token][given, best]` log-probabilities of the generated tokens of each text."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    requests = [{"prompt_token_ids": text["prompt"] + text["output"]} for text in texts]
    scores = []
    for text, result in zip(texts, llm.generate(requests, params, use_tqdm=False), strict=True):
        rows = result.prompt_logprobs[len(text["prompt"]) :]
        pairs = zip(text["output"], rows, strict=True)
        scores.append(
            [[row[token].logprob, max(entry.logprob for entry in row.values())] for token, row in pairs]
        )
    return scores


def main() -> None:
    """Write `{"texts": own continuations, "own": their scores, "other": scores of the texts of --judge}`."""
    top = argparse.ArgumentParser(description="Continue and judge texts with the vLLM of the running Python.")
    top.add_argument("--model", required=True)
    top.add_argument("--dtype", required=True)
    top.add_argument("--max-model-len", type=int, required=True)
    top.add_argument("--max-num-seqs", type=int, required=True)
    top.add_argument("--engine-args", default="{}", help="JSON of further arguments of LLM(...)")
    top.add_argument("--judge", type=Path, help="a file this script wrote on the other side")
    top.add_argument("--out", type=Path, required=True)
    options = top.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
        **json.loads(options.engine_args),
    )
    texts = generate(llm)
    found: dict[str, Any] = {"texts": texts, "own": score(llm, texts)}
    if options.judge:
        found["other"] = score(llm, json.loads(options.judge.read_text())["texts"])
    options.out.write_text(json.dumps(found))
    llm.llm_engine.engine_core.shutdown()
    # vLLM's output thread still holds the last log-probability tensors; freed while the interpreter ends, they
    # abort it.
    os._exit(0)


if __name__ == "__main__":
    main()
