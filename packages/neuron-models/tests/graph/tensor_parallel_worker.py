# SPDX-License-Identifier: Apache-2.0
"""The ranks of test_tensor_parallel_models.py: each runs every checkpoint in both phases, saves outputs."""

import argparse
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from driver import PagedRunner

from neuron_parallel import ParallelGroups, ParallelPlan

PROMPTS = [[5, 17, 99, 3, 42], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [100, 0, 1]]
STEPS = [[1, 50, 9, 33], [2, 60, 9, 44], [3, 70, 9, 55]]


def run(folder: Path, groups: ParallelGroups) -> dict[str, torch.Tensor]:
    runner = PagedRunner.load(folder, groups)
    outputs = {f"prefill.{name}": value for name, value in runner.prefill(PROMPTS).items()}
    outputs["prefill.all_logits"] = runner.all_logits(outputs["prefill.hidden_states"])
    for i, tokens in enumerate(STEPS):
        out = runner.decode(tokens, "sample" if i < 2 else "greedy")
        outputs |= {f"decode{i}.{name}": value for name, value in out.items()}
    greedy = PagedRunner.load(folder, groups).prefill(PROMPTS, "greedy")
    outputs["greedy.tokens"] = greedy["tokens"]
    return outputs


def run_rank(rank: int, world: int, workdir: Path, folders: list[Path]) -> None:
    rendezvous = f"file://{workdir}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    groups = ParallelGroups.create(ParallelPlan(tensor_parallel_size=world))
    outputs = {folder.name: run(folder, groups) for folder in folders}
    torch.save(outputs, workdir / f"outputs{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("world", type=int)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Forked after the imports, which cost more than the test itself, and before any thread exists.
    fork = multiprocessing.get_context("fork")
    shared = (options.world, options.workdir, options.folders)
    ranks = [fork.Process(target=run_rank, args=(rank, *shared)) for rank in range(options.world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
