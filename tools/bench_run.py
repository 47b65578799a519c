# SPDX-License-Identifier: Apache-2.0
"""Measure whichever vLLM the running Python has; the last line printed is `FIGURES {json}`.

Run by `bench.py` in both interpreters it compares, so this file uses the standard library and vLLM alone.

`init_s`: seconds until the engine is ready, imports excluded. `output_tok_s_b{n}`: generated tokens per
second with n requests, prefill included. `ttft_s`: seconds for one long prompt and one token. With
`--sampled-batch n`, `sampler_cost_b{n}` is the time when every row is sampled by top-k and top-p over the
time when every row is greedy. Each but `init_s` is a median of `--rounds` rounds, after one not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

FILLER_IDS = 20_000
"""Prompts are made of token ids below this, which every vocabulary of interest has."""


def parser() -> argparse.ArgumentParser:
    """The command line; `bench.py --script` expects another script to take all but `--sampled-batch`."""
    top = argparse.ArgumentParser(description="Measure the vLLM of the running Python.")
    top.add_argument("--model", required=True, help="folder of the model")
    top.add_argument("--dtype", default="bfloat16")
    top.add_argument("--batches", default="1,4,16", help="numbers of requests, with commas between them")
    top.add_argument("--prompt-tokens", type=int, default=32)
    top.add_argument("--output-tokens", type=int, default=128)
    top.add_argument("--long-prompt-tokens", type=int, default=512)
    top.add_argument("--max-model-len", type=int, default=1024)
    top.add_argument("--rounds", type=int, default=3)
    top.add_argument("--engine-args", default="{}", help="JSON of further arguments of LLM(...)")
    top.add_argument("--sampled-batch", type=int, default=0, help="also measure the sampler at this batch")
    return top


def prompt(num_tokens: int, seed: int) -> dict[str, list[int]]:
    """A prompt of `num_tokens` ids: a linear congruential sequence, so that no two prompts share a prefix."""
    ids, state = [], seed + 1
    for _ in range(num_tokens):
        state = (state * 1_103_515_245 + 12_345) % (1 << 31)
        ids.append(100 + (state >> 8) % (FILLER_IDS - 100))
    return {"prompt_token_ids": ids}


class Stopwatch:
    """Times `generate` on prompts that are new every time."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._next_seed = 0

    def seconds(self, batch: int, prompt_tokens: int, output_tokens: int, **sampling: Any) -> float:
        """Seconds for `batch` requests; raises `RuntimeError` if a token is missing."""
        from vllm import SamplingParams

        prompts = [prompt(prompt_tokens, self._next_seed + row) for row in range(batch)]
        self._next_seed += batch
        settings = {"temperature": 0.0, "max_tokens": output_tokens, "ignore_eos": True} | sampling
        params = SamplingParams(**settings)
        start = time.perf_counter()
        results = self.llm.generate(prompts, params, use_tqdm=False)
        spent = time.perf_counter() - start
        made = sum(len(result.outputs[0].token_ids) for result in results)
        if made != batch * output_tokens:
            raise RuntimeError(f"{made} tokens came back of the {batch * output_tokens} asked for")
        return spent

    def median(self, rounds: int, batch: int, prompt_tokens: int, output_tokens: int) -> float:
        """Median seconds over `rounds`, after one round that is not counted."""
        spent = [self.seconds(batch, prompt_tokens, output_tokens) for _ in range(rounds + 1)]
        return statistics.median(spent[1:])


def sampler_cost(watch: Stopwatch, options: argparse.Namespace) -> float:
    """Time with top-k and top-p on every row over greedy time; the two take turns."""
    shape = (options.sampled_batch, options.prompt_tokens, options.output_tokens)
    plain: list[float] = []
    sampled: list[float] = []
    for round_index in range(options.rounds + 1):
        greedy_s = watch.seconds(*shape)
        drawn_s = watch.seconds(*shape, temperature=1.0, top_k=50, top_p=0.9, seed=round_index)
        if round_index:
            plain.append(greedy_s)
            sampled.append(drawn_s)
    return statistics.median(sampled) / statistics.median(plain)


def main() -> None:
    """Start the engine, measure, print the figures."""
    options = parser().parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    batches = [int(word) for word in options.batches.split(",")]
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        **json.loads(options.engine_args),
    )
    figures = {"init_s": round(time.perf_counter() - start, 2)}
    watch = Stopwatch(llm)
    for batch in batches:
        spent = watch.median(options.rounds, batch, options.prompt_tokens, options.output_tokens)
        figures[f"output_tok_s_b{batch}"] = round(batch * options.output_tokens / spent, 1)
    figures["ttft_s"] = round(watch.median(options.rounds, 1, options.long_prompt_tokens, 1), 4)
    if options.sampled_batch:
        figures[f"sampler_cost_b{options.sampled_batch}"] = round(sampler_cost(watch, options), 3)
    print("FIGURES " + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
