# SPDX-License-Identifier: Apache-2.0
"""The inputs of one step of a static-shape model: one frozen record, every shape given by its bucket."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from neuron_core.graphs.buckets import Bucket

__all__ = ["StepInput", "StepSpecs"]

StepSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each input by name, in the order of ``StepInput.names()``."""


@dataclass(frozen=True, eq=False)
class StepInput:
    """Everything a model graph reads besides weights and KV tensors.

    T is the bucket's ``num_tokens``, R its ``num_seqs`` and W the width of the block table,
    ``context_len // block_size``. The producer owns the tensors and may refill them for the next step.
    """

    token_ids: torch.Tensor
    """int32 [T]; padding 0."""
    positions: torch.Tensor
    """int32 [T], position in the request; padding 0."""
    slots: torch.Tensor
    """int32 [T], KV slot the token is written to; -1 writes nothing."""
    request_rows: torch.Tensor
    """int32 [T], row of ``block_tables`` the token belongs to; -1 for padding."""
    block_tables: torch.Tensor
    """int32 [R, W], block ids of each request; -1 where there is no block."""
    sample_rows: torch.Tensor
    """int32 [R], index into T of the token each request samples from; padding 0."""
    temperature: torch.Tensor
    """float32 [R]; 0 takes the most likely token."""
    top_k: torch.Tensor
    """int32 [R]; 0 keeps every token."""
    top_p: torch.Tensor
    """float32 [R]; 1 keeps every token."""
    min_p: torch.Tensor
    """float32 [R]; 0 keeps every token."""
    uniform: torch.Tensor
    """float32 [R], one draw in [0, 1) per row."""
    rank: torch.Tensor
    """int32 [1], the tensor-parallel rank, an input so that all ranks share one artifact."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The input names in order."""
        return tuple(field.name for field in fields(cls))

    @property
    def num_seqs(self) -> int:
        """R."""
        return len(self.block_tables)

    def as_values(self) -> dict[str, torch.Tensor]:
        """The inputs by name, in order; the tensors are not copied."""
        return {name: getattr(self, name) for name in self.names()}

    @classmethod
    def specs(cls, bucket: Bucket, block_size: int) -> StepSpecs:
        """Shape and dtype of every input for a bucket.

        Raises ``ValueError`` if ``block_size`` does not divide the bucket's context.
        """
        tokens, seqs = (bucket.num_tokens,), (bucket.num_seqs,)
        table = (bucket.num_seqs, _table_width(bucket, block_size))
        return {
            "token_ids": (tokens, torch.int32),
            "positions": (tokens, torch.int32),
            "slots": (tokens, torch.int32),
            "request_rows": (tokens, torch.int32),
            "block_tables": (table, torch.int32),
            "sample_rows": (seqs, torch.int32),
            "temperature": (seqs, torch.float32),
            "top_k": (seqs, torch.int32),
            "top_p": (seqs, torch.float32),
            "min_p": (seqs, torch.float32),
            "uniform": (seqs, torch.float32),
            "rank": ((1,), torch.int32),
        }

    @classmethod
    def padding(
        cls, bucket: Bucket, block_size: int, rank: int = 0, device: torch.device | str = "cpu"
    ) -> StepInput:
        """A step that holds only padding: it reads and writes no KV block. Warm-up runs it."""
        fill = _PADDING | {"rank": rank}
        return cls(
            **{
                name: torch.full(shape, fill[name], dtype=dtype, device=device)
                for name, (shape, dtype) in cls.specs(bucket, block_size).items()
            }
        )

    def check(self, bucket: Bucket, block_size: int) -> None:
        """Raise ``ValueError`` naming the first input whose shape or dtype is not the bucket's."""
        for name, (shape, dtype) in self.specs(bucket, block_size).items():
            tensor: torch.Tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                found = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{name} is {found}; {bucket.name} takes {dtype} {list(shape)}")


_PADDING: dict[str, int | float] = {
    "token_ids": 0,
    "positions": 0,
    "slots": -1,
    "request_rows": -1,
    "block_tables": -1,
    "sample_rows": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "uniform": 0.0,
}


def _table_width(bucket: Bucket, block_size: int) -> int:
    if bucket.context_len % block_size:
        raise ValueError(
            f"{bucket.name}: context of {bucket.context_len} tokens is not whole blocks of {block_size}"
        )
    return bucket.context_len // block_size
