# SPDX-License-Identifier: Apache-2.0
"""Loads one rank of a checkpoint and prints how far resident memory rose; see the test."""

import json
import re
import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from neuron_models import build_model, load_weights
from neuron_parallel import ParallelGroups, ParallelPlan


def resident_bytes(field: str) -> int:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def main(folder: str, world: int, rank: int, dtype: str) -> None:
    groups = ParallelGroups.describe(ParallelPlan(tensor_parallel_size=world))
    config = AutoConfig.from_pretrained(folder)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before = resident_bytes("VmRSS")
    model = build_model(config, dtype=getattr(torch, dtype), groups=groups, block_size=16)
    stats = load_weights(model, folder, groups.tp, rank)
    print(
        json.dumps(
            {"peak": resident_bytes("VmHWM") - before, "weights": stats.size_bytes, "s": stats.seconds}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
