# SPDX-License-Identifier: Apache-2.0
"""How long the device waits for the host between two steps, with asynchronous scheduling and without.

`bench.py --gaps` runs this file as a script, once per device and mode and in turn; the script prints `FIGURES {json}`.
Besides the CPU device there is one whose executions take a fixed time in a thread of their own (`latency_device`), as
an accelerator's do. The mean wait is that of the metric `vllm_neuron:host_gap_seconds`, taken over the measured rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEVICES = ("cpu", "latency")
MODES = ("sync", "async")


def gap_sums(worker: Any) -> tuple[float, float]:
    """Seconds waited and waits so far in a worker's process."""
    from prometheus_client import REGISTRY

    sums = {s.name: s.value for metric in REGISTRY.collect() for s in metric.samples}
    name = "vllm_neuron:host_gap_seconds"
    return sums.get(f"{name}_sum", 0.0), sums.get(f"{name}_count", 0.0)


def figures_of(options: argparse.Namespace) -> dict[str, Any]:
    """Start an engine and decode in batches: mean wait in ms and tokens per second of each, and a digest of all."""
    # vLLM sends the function that reads the metric to the engine's process pickled.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM, SamplingParams

    batches = [int(word) for word in options.batches.split(",")]
    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        async_scheduling=options.mode == "async",
    )
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True)
    found: dict[str, Any] = {}
    texts = hashlib.sha256()
    for batch in batches:
        prompts = [
            {"prompt_token_ids": [100 + (7 * row + 3 * at) % 5000 for at in range(32)]}
            for row in range(batch)
        ]
        llm.generate(prompts, params, use_tqdm=False)  # the first round does not count
        before, spent = llm.collective_rpc(gap_sums)[0], []
        for _ in range(options.rounds):
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            spent.append(time.perf_counter() - begun)
            texts.update(repr([list(output.outputs[0].token_ids) for output in outputs]).encode())
        after = llm.collective_rpc(gap_sums)[0]
        found[f"host_gap_ms_b{batch}"] = 1e3 * (after[0] - before[0]) / (after[1] - before[1])
        found[f"output_tok_s_b{batch}"] = batch * options.output_tokens / statistics.median(spent)
    return found | {"texts": texts.hexdigest()}


def compare(bench: Any, mine: Any) -> dict[str, Any]:
    """Run both modes on both devices in turn; returns ratios of async to sync. Raises `Failure` for unequal texts."""
    from devtools.console import Failure

    options = bench.options
    runs: dict[str, list[dict[str, Any]]] = {f"{d} {m}": [] for d in DEVICES for m in MODES}
    for index in range(options.rounds):
        for device in DEVICES:
            path = os.pathsep.join(
                (str(HERE / "latency_device"), *filter(None, [os.environ.get("PYTHONPATH")]))
            )
            side = dataclasses.replace(
                mine, variables={**mine.variables, "VLLM_NEURON_DEVICE": device, "PYTHONPATH": path}
            )
            for mode in MODES if index % 2 == 0 else MODES[::-1]:
                command = [str(HERE / "bench_gaps.py"), "--model", str(bench.model), "--mode", mode]
                for name in ("dtype", "batches", "output-tokens", "max-model-len"):
                    command += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
                command += ["--rounds", str(options.repeats)]
                caches = bench.caches(mine, 0)
                runs[f"{device} {mode}"].append(side.figures(f"{device}, {mode}", command, caches))
        if len({run["texts"] for found in runs.values() for run in found}) != 1:
            raise Failure("no ratios: the texts differ between devices or modes")
    for found in runs.values():
        for run in found:
            run.pop("texts")
    ratios = {
        f"{device} {name}": [
            ahead[name] / plain[name]
            for plain, ahead in zip(runs[f"{device} sync"], runs[f"{device} async"], strict=True)
        ]
        for device in DEVICES
        for name in runs[f"{device} sync"][0]
    }
    return {"runs": runs, "async_over_sync": ratios}


def main() -> None:
    """Measure one engine."""
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument("--model", required=True)
    top.add_argument("--mode", choices=MODES, required=True)
    top.add_argument("--dtype", default="bfloat16")
    top.add_argument("--batches", default="1,16")
    top.add_argument("--output-tokens", type=int, default=128)
    top.add_argument("--max-model-len", type=int, default=1024)
    top.add_argument("--rounds", type=int, default=3)
    print("FIGURES " + json.dumps(figures_of(top.parse_args())), flush=True)


if __name__ == "__main__":
    main()
