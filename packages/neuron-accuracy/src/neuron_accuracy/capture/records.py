# SPDX-License-Identifier: Apache-2.0
"""What a capture says beside its tensors: the run, its steps, and the caches of its requests.

On disk, below the folder of a capture::

    capture.json                                     the run: `RunRecord`
    dp<k>/<bucket>_<step>/step.json                  `StepRecord`
    dp<k>/<bucket>_<step>/<module>/rank<r>.safetensors   tensors ``output.0``, ``input.0``, … as the rank holds them
    dp<k>/<bucket>_<step>/<module>/rank<r>.json      shape, dtype and digest of each
    dp<k>/kv/<request>/kv.json                       `CacheRecord`
    dp<k>/kv/<request>/layer.<i>/rank<r>.safetensors ``pages``, and ``k_scale``, ``v_scale`` of an 8-bit cache
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import TensorLayout
from neuron_accuracy.subjects.info import SubjectInfo

__all__ = ["FORMAT", "CacheRecord", "RunRecord", "StepRecord", "StepRow", "check_rows"]

FORMAT = "neuron-accuracy-capture/1"


@dataclass(frozen=True)
class RunRecord:
    """The run that was captured."""

    info: SubjectInfo
    ranks: int
    """Ranks of one data-parallel replica."""
    layouts: Mapping[str, TensorLayout] = field(default_factory=dict)
    """By ``module:tensor``, such as ``model.layers.0.mlp:output.0``, or ``module:tensor@phase`` where phases differ
    (sequence parallelism splits the tokens in prefill alone): :meth:`layout` looks them up.
    """
    names: Mapping[str, str] = field(default_factory=dict)
    """What others call a module, or a slice of one, by ``module:tensor`` or ``module:tensor:slice``: the name under
    which it is compared with another run's, itself ``module:tensor``. What is missing keeps its name.
    """

    def layout(self, module: str, tensor: str, phase: str) -> TensorLayout:
        """The layout of a tensor in steps of ``phase``; what nobody declared is replicated rows of tokens."""
        name = f"{module}:{tensor}"
        return self.layouts.get(f"{name}@{phase}", self.layouts.get(name, TensorLayout()))


@dataclass(frozen=True)
class StepRow:
    """The tokens of one request in a step."""

    request: str
    begin: int
    """Row of its first token among the step's tokens; the others follow."""
    row: int
    """Its row among the step's requests."""
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    cached_ids: tuple[int, ...] = ()
    """In a request's first step: the tokens before these, of which the cache held all that was needed."""


@dataclass(frozen=True)
class StepRecord:
    """One step: what its tensors' rows are. Rows beyond those of ``rows`` are padding."""

    number: int
    bucket: str
    phase: str
    num_tokens: int
    """Rows of tokens, padding included."""
    num_seqs: int
    """Rows of requests, padding included."""
    rows: tuple[StepRow, ...]

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return f"{self.bucket}_{self.number}"


@dataclass(frozen=True)
class CacheRecord:
    """The KV cache of one request.

    A layer's ``pages`` are ``[blocks, local heads, block_size, 2 * head_dim]``, keys then values, in the order of
    ``block_ids``.
    """

    request: str
    token_ids: tuple[int, ...]
    """One per position that was written, in order."""
    num_cached: int
    """Leading tokens that an earlier request had left in the cache."""
    block_size: int
    block_ids: tuple[int, ...]
    freed: tuple[bool, ...]
    """Per block, whether it was given back (a sliding window has passed it), so that what it holds means nothing."""
    num_layers: int
    num_heads: int
    """KV heads of the whole model."""
    head_dim: int
    replicas: int = 1
    """How many consecutive ranks hold the same heads."""
    dcp: int = 1
    """Decode-context-parallel ranks, to which positions are dealt out in turn; 1 if each rank holds all positions."""


def check_rows(step: StepRecord) -> None:
    """Raise ``CaptureError`` if its rows do not fit it."""
    for row in step.rows:
        count = len(row.positions)
        if count != len(row.token_ids) or row.begin < 0 or row.begin + count > step.num_tokens:
            raise CaptureError(
                f"step {step.number}: request {row.request!r} has {count} positions and {len(row.token_ids)} tokens "
                f"from row {row.begin} on, of {step.num_tokens} rows"
            )
        if not 0 <= row.row < step.num_seqs:
            raise CaptureError(
                f"step {step.number}: request {row.request!r} is in row {row.row} of {step.num_seqs} requests"
            )
