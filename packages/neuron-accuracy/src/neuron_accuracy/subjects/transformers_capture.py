# SPDX-License-Identifier: Apache-2.0
"""Captures of a model of transformers: one step per sequence, and its KV cache as one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from neuron_accuracy.capture.hooks import capture_modules
from neuron_accuracy.capture.records import CacheRecord, RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.subjects.info import SubjectInfo

__all__ = ["cache_pages", "capture_sequences"]


@torch.inference_mode()
def capture_sequences(
    model: Any,
    info: SubjectInfo,
    sequences: Sequence[tuple[int, ...]],
    spec: CaptureSpec,
    folder: Path,
    running: Callable[[], AbstractContextManager[Any]],
    make_cache: Callable[[], Any],
) -> None:
    """Run each sequence in one forward pass within ``running()`` and write what ``spec`` selects to ``folder``.

    Step i is sequence i, of request ``request-<i>``. Raises ``CaptureError``.
    """
    writer = CaptureWriter(folder, spec, RunRecord(info, ranks=1))
    taps = capture_modules(model, spec, writer) if spec.modules else nullcontext()
    with taps as hooks:
        for number, tokens in enumerate(sequences):
            if hooks is not None:
                hooks.announce(_step(number, tokens), torch.ones(1, len(tokens), dtype=torch.bool))
            cache = make_cache()
            ids = torch.tensor([tokens], dtype=torch.int64, device=model.device)
            with running():
                model(ids, past_key_values=cache, use_cache=True)
            if spec.kv:
                writer.write_cache(*cache_pages(cache, tokens, f"request-{number}"))
    writer.close()


def cache_pages(cache: Any, tokens: Sequence[int], request: str) -> tuple[CacheRecord, list[torch.Tensor]]:
    """A DynamicCache of one sequence as pages ``[1, heads, tokens, 2 * head_dim]`` per layer, and their record.

    Raises ``CaptureError`` if a layer has no keys and values of all positions, or another shape than the first.
    """
    pages: list[torch.Tensor] = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape != values.shape or keys.shape[2] != len(tokens):
            shapes = [None if item is None else list(item.shape) for item in (keys, values)]
            raise CaptureError(
                f"layer {index} caches {shapes}, not keys and values of one size for all {len(tokens)} positions"
            )
        pages.append(torch.cat([keys, values], dim=-1))
    if not pages or any(page.shape != pages[0].shape for page in pages):
        raise CaptureError(f"layers cache other shapes: {[list(page.shape) for page in pages]}")
    heads, head_dim = pages[0].shape[1], pages[0].shape[3] // 2
    record = CacheRecord(
        request=request,
        token_ids=tuple(tokens),
        num_cached=0,
        block_size=len(tokens),
        block_ids=(0,),
        freed=(False,),
        num_layers=len(pages),
        num_heads=heads,
        head_dim=head_dim,
    )
    return record, pages


def _step(number: int, tokens: tuple[int, ...]) -> StepRecord:
    size = len(tokens)
    row = StepRow(f"request-{number}", begin=0, row=0, positions=tuple(range(size)), token_ids=tokens)
    return StepRecord(number, f"prefill_s{size}", "prefill", size, 1, (row,))
