# SPDX-License-Identifier: Apache-2.0
"""What changes logits before a token is drawn: inputs of every graph that samples.

A request that asks for an edit (a penalty, a bias, a ban) owns one row of a few tensors that outlive the step, its
*state row*; see `neuron_core.sampling_state`. A step says which state row belongs to which of its rows, and the two
things that change from step to step: whether stop tokens are banned, and the ends of banned words. The inputs are
always there, so that the first request with an edit compiles nothing. R is the number of rows of a step, S that of
state rows and V the size of the vocabulary.
"""

from __future__ import annotations

import torch

from neuron_core.token_mask import mask_shape

__all__ = [
    "AFTER_ANY",
    "BAN_SLOTS",
    "EDIT_INPUTS",
    "OUTPUT_COUNTS",
    "STATE_ROWS",
    "STATE_TENSORS",
    "edit_specs",
    "no_edits",
    "state_specs",
]

Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]

BAN_SLOTS = 64
"""How many tokens of a row may be banned for what was drawn before; more need another place than the graph."""

AFTER_ANY = -2
"""In ``ban_if``: the ban holds whatever the last token is."""

STATE_ROWS = "state_rows"
"""int32 ``[R]``: the state row of each row, -1 where no logit is edited and no token counted."""

EDIT_INPUTS = (STATE_ROWS, "bans_stop", "ban_if", "ban_then")
"""What a step says: besides the state rows, ``bans_stop`` int32 ``[R]``, 1 where no stop token may be drawn yet, and
``ban_if``, ``ban_then`` int32 ``[R, BAN_SLOTS]``: ``ban_then`` is banned if the row's last token is ``ban_if`` (or if
that is ``AFTER_ANY``); -1 in ``ban_then`` bans nothing."""

OUTPUT_COUNTS = "sampling.output_counts"
"""int32 ``[S, V]``: how often each token was drawn. The graph itself counts."""

STATE_TENSORS = (
    "sampling.penalties",
    "sampling.bias",
    "sampling.prompt_tokens",
    "sampling.stop_tokens",
    OUTPUT_COUNTS,
)
"""What outlives a step: ``penalties`` float32 ``[S, 3]`` (repetition, presence, frequency), ``bias`` float32 ``[S, V]``
(minus infinity bans), ``prompt_tokens`` and ``stop_tokens`` int32 ``[S, ceil(V / 32)]``, one bit per token as in
`neuron_core.token_mask`, and the counts."""

_NONE = {STATE_ROWS: -1, "bans_stop": 0, "ban_if": -1, "ban_then": -1}


def edit_specs(num_seqs: int) -> Specs:
    """Shape and dtype of what a step of ``num_seqs`` rows says, by name."""
    rows, bans = (num_seqs,), (num_seqs, BAN_SLOTS)
    return {name: (bans if name.startswith("ban_") else rows, torch.int32) for name in EDIT_INPUTS}


def no_edits(num_seqs: int) -> dict[str, torch.Tensor]:
    """What a step says in which no logit is edited."""
    return {
        name: torch.full(shape, _NONE[name], dtype=dtype)
        for name, (shape, dtype) in edit_specs(num_seqs).items()
    }


def state_specs(num_rows: int, vocab_size: int) -> Specs:
    """Shape and dtype of the tensors of ``num_rows`` state rows, by name."""
    dense, bits = (num_rows, vocab_size), mask_shape(num_rows, vocab_size)
    specs = (
        ((num_rows, 3), torch.float32),
        (dense, torch.float32),
        (bits, torch.int32),
        (bits, torch.int32),
        (dense, torch.int32),
    )
    return dict(zip(STATE_TENSORS, specs, strict=True))
