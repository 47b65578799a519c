# SPDX-License-Identifier: Apache-2.0
"""What the rows of a forward pass over ``input_ids`` are, read from its arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_accuracy.capture.records import StepRecord, StepRow
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import Rows

__all__ = ["Batch", "BatchReader"]


@dataclass(frozen=True, eq=False)
class Batch:
    """A step, and where its rows lie in ``[batch, tokens, …]`` tensors: bool ``keep``, or None for ``[rows, …]``."""

    step: StepRecord
    keep: Tensor | None

    def rows(self, tensor: Tensor, kind: Rows) -> Tensor | None:
        """``[rows, …]`` of a tensor, or None if it has no such rows."""
        if kind is Rows.NONE:
            return tensor
        if self.keep is None:
            count = self.step.num_tokens if kind is Rows.TOKENS else self.step.num_seqs
            return tensor if tensor.dim() and tensor.shape[0] == count else None
        batch, tokens = self.keep.shape
        if kind is Rows.REQUESTS:
            return _last(tensor, batch)
        if tensor.dim() >= 2 and tensor.shape[1] == tokens and tensor.shape[0] in (1, batch):
            flat = tensor.expand(batch, *tensor.shape[1:]).flatten(0, 1)
        elif tensor.dim() >= 1 and tensor.shape[0] == batch * tokens:
            flat = tensor
        else:
            return None
        return flat[self.keep.flatten().to(flat.device)]


def _last(tensor: Tensor, batch: int) -> Tensor | None:
    if tensor.dim() >= 2 and tensor.shape[:2] == (batch, 1):
        return tensor[:, 0]
    return tensor if tensor.dim() == 2 and tensor.shape[0] == batch else None


class BatchReader:
    """Numbers the passes of a model, and follows its requests from one to the next.

    Positions are counted by the attention mask where it is ``[batch, past + tokens]``, else they are ``position_ids``,
    else they follow what the KV cache holds. A row whose positions go on where its last ended is the same request.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self._signature = signature
        self._steps = 0
        self._requests = 0
        self._live: dict[int, tuple[str, int]] = {}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """The batch of a pass with these arguments; raises ``CaptureError`` if they hold no ``[batch, tokens]``
        ``input_ids``.
        """
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise CaptureError(
                "the model was given no input_ids [batch, tokens], so what its rows are is not known; "
                "announce the step: with capture_modules(…) as taps: taps.announce(step)"
            )
        keep, positions = _places(ids, given)
        step = self._step(ids, keep, positions)
        self._steps += 1
        return Batch(step, keep)

    def _step(self, ids: Tensor, keep: Tensor, positions: Tensor) -> StepRecord:
        rows: list[StepRow] = []
        begin = 0
        for row in range(ids.shape[0]):
            here = tuple(positions[row][keep[row]].tolist())
            if not here:
                continue
            tokens = tuple(ids[row].cpu()[keep[row]].tolist())
            rows.append(StepRow(self._request(row, here), begin, len(rows), here, tokens))
            begin += len(here)
        decode = ids.shape[1] == 1 and all(row.positions[0] > 0 for row in rows)
        bucket = f"decode_b{len(rows)}" if decode else f"prefill_s{begin}"
        phase = "decode" if decode else "prefill"
        return StepRecord(self._steps, bucket, phase, begin, len(rows), tuple(rows))

    def _request(self, row: int, positions: tuple[int, ...]) -> str:
        name, following = self._live.get(row, ("", -1))
        if positions[0] != following:
            name = f"request-{self._requests}"
            self._requests += 1
        self._live[row] = (name, positions[-1] + 1)
        return name


def _places(ids: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    batch, tokens = ids.shape
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= tokens:
        counted = mask.cpu().long().cumsum(1) - 1
        return mask.cpu()[:, -tokens:].bool(), counted[:, -tokens:]
    keep = torch.ones(batch, tokens, dtype=torch.bool)
    if isinstance(positions, Tensor) and positions.dim() == 2:
        return keep, positions.cpu().expand(batch, tokens)
    past = given.get("past_key_values")
    held = 0 if past is None else int(past.get_seq_length())
    return keep, torch.arange(held, held + tokens).expand(batch, tokens)
