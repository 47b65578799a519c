# SPDX-License-Identifier: Apache-2.0
"""Prints SmolLM2's perplexities with a bfloat16 cache and with calibrated FP8 caches, as JSON.

A process of its own: loading the kernels holds for a whole process, and other tests use block sizes they do not take.
"""

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from driver import KEPT, PagedRunner, smollm2

from neuron_core import ops
from neuron_core.graphs.buckets import Bucket, Phase
from neuron_models import build_model, load_weights
from neuron_models.calibration import record
from neuron_models.kv_scales import load_kv_scales
from neuron_parallel import ParallelGroups

TEXTS = Path(__file__).parents[1] / "texts"
SEGMENT = 256
WINDOW = 1024
"""Tokens of context: a text is scored a window at a time."""


def filled(folder, kv_dtype, file=None):
    groups = ParallelGroups.single()
    config = AutoConfig.from_pretrained(folder)
    model = build_model(config, dtype=torch.bfloat16, groups=groups, block_size=32, kv_dtype=kv_dtype)
    load_weights(model, folder, groups.tp, 0)
    if file is not None:
        load_kv_scales(model, folder, groups.tp, 0, file)
    ops.pack_module(model)
    return model


@torch.no_grad()
def perplexity(model, token_ids):
    """Of every token but each window's first; the context is read from the cache, a segment at a time."""
    windows = [token_ids[begin : begin + WINDOW] for begin in range(0, len(token_ids), WINDOW)]
    losses = [loss for window in windows for loss in window_losses(model, window)]
    return math.exp(torch.cat(losses).mean().item())


def window_losses(model, token_ids):
    group = ParallelGroups.single().tp
    runner = PagedRunner(model, group, num_seqs=1, max_len=WINDOW, tokens=SEGMENT, block_size=32)
    logits_program = model.program(Bucket(Phase.LOGITS, SEGMENT, SEGMENT, WINDOW), "logits")
    for begin in range(0, len(token_ids), SEGMENT):
        hidden = runner.prefill([token_ids[begin : begin + SEGMENT]])["hidden_states"]
        logits = logits_program.run_eager({"hidden_states": hidden})["logits"]
        wanted = torch.tensor(token_ids[begin + 1 : begin + SEGMENT + 1])
        yield torch.nn.functional.cross_entropy(logits[: len(wanted)].float(), wanted, reduction="none")


def main(workdir, num_tokens):
    ops.load_kernels(KEPT / "graphs")
    folder = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    calibration, text = (
        tokenizer.encode((TEXTS / name).read_text()) for name in ("haggai.txt", "ruth_jonah.txt")
    )
    plain = filled(folder, torch.bfloat16)
    samples = record(plain, [calibration], segment_tokens=SEGMENT)
    found = {"num_tokens": len(text[:num_tokens]), "bf16": perplexity(plain, text[:num_tokens])}
    for name, per_head in (("layer", False), ("head", True)):
        file = samples.save(workdir / f"{name}.safetensors", per_head=per_head)
        found[name] = perplexity(filled(folder, torch.float8_e4m3fn, file), text[:num_tokens])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
