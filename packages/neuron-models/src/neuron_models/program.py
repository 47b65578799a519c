# SPDX-License-Identifier: Apache-2.0
"""A decoder-only language model as a straight line of parts: embedding, equal layers, one of three heads."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from neuron_core import ops
from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket, Phase
from neuron_core.graphs.program import Part, Program
from neuron_core.logit_edits import EDIT_INPUTS, OUTPUT_COUNTS, STATE_ROWS, STATE_TENSORS
from neuron_core.prompt_embeds import IS_TOKEN, PROMPT_EMBEDS
from neuron_core.token_mask import ALLOWED_TOKENS
from neuron_models.layers import RMSNorm
from neuron_models.rope import RotaryTable
from neuron_parallel import ParallelLMHead, VocabParallelEmbedding, all_gather

CONTEXT = ("cos", "sin", "positions", "slots", "request_rows", "block_tables")
DRAWING = ("temperature", "top_k", "top_p", "min_p", "uniform")
EDITS = (*EDIT_INPUTS, *STATE_TENSORS)


class EmbeddingPart(nn.Module):
    """Token ids and positions to the first hidden states, a zero residual and the rotary table of the step.

    The residual starts at zero so that the first layer is equal to every other and shares their graph.
    """

    inputs: ClassVar[tuple[str, ...]] = ("token_ids", "positions", "rank")
    """The program values that ``forward`` takes, in order."""

    def __init__(self, embed_tokens: VocabParallelEmbedding, rotary: RotaryTable) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.rotary = rotary

    def forward(
        self, token_ids: Tensor, positions: Tensor, rank: Tensor, *, sequence_parallel: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(hidden, residual, cos, sin)``."""
        hidden = self.embed_tokens(token_ids, rank, sequence_parallel)
        return hidden, hidden.new_zeros(hidden.shape), *self.rotary(positions)


class MixedEmbeddingPart(EmbeddingPart):
    """As `EmbeddingPart`, with embeddings in place of those of the tokens where the step says so."""

    inputs: ClassVar[tuple[str, ...]] = (*EmbeddingPart.inputs, PROMPT_EMBEDS, IS_TOKEN)

    def forward(  # type: ignore[override]
        self,
        token_ids: Tensor,
        positions: Tensor,
        rank: Tensor,
        prompt_embeds: Tensor,
        is_token: Tensor,
        *,
        sequence_parallel: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(hidden, residual, cos, sin)``; ``prompt_embeds [T, hidden]``, ``is_token`` int32 ``[T]``."""
        hidden, residual, cos, sin = super().forward(
            token_ids, positions, rank, sequence_parallel=sequence_parallel
        )
        if sequence_parallel:  # the rank has its own T / size rows of the tokens' embeddings
            rows = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device) + rank * len(hidden)
            prompt_embeds, is_token = prompt_embeds.index_select(0, rows), is_token.index_select(0, rows)
        merged = torch.where(is_token.ne(0).unsqueeze(-1), hidden, prompt_embeds)
        return merged, residual, cos, sin


class GreedyHead(nn.Module):
    """Last hidden states to the most likely token of each request; logits never leave the graph."""

    def __init__(self, norm: RMSNorm, lm_head: ParallelLMHead) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head

    def forward(
        self, hidden: Tensor, residual: Tensor, sample_rows: Tensor, rank: Tensor, *, sequence_parallel: bool
    ) -> Tensor:
        """``tokens`` int32 ``[R]``."""
        hidden_states = self.normed(hidden, residual, sequence_parallel)
        return self.lm_head.greedy(hidden_states.index_select(0, sample_rows), rank)

    def normed(self, hidden: Tensor, residual: Tensor, sequence_parallel: bool) -> Tensor:
        """The final-normed hidden states of all tokens ``[T, hidden]``."""
        normed, _ = self.norm(hidden, residual)
        return all_gather(normed, self.lm_head.group) if sequence_parallel else normed


class SamplingHead(GreedyHead):
    """Last hidden states to a drawn token of each request, its logits, and all normed hidden states."""

    inputs: ClassVar[tuple[str, ...]] = (
        *("hidden", "residual", "sample_rows", "token_ids", *DRAWING, ALLOWED_TOKENS),
        *EDITS,
    )
    """The program values that ``forward`` takes, in order."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        residual: Tensor,
        sample_rows: Tensor,
        token_ids: Tensor,
        *sampling: Tensor,
        sequence_parallel: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``tokens`` int32 ``[R]``, ``logits`` float32 ``[R, V]`` before any edit, ``hidden_states [T, hidden]``.

        The tokens are counted in the state rows that ``sampling`` names.
        """
        hidden_states = self.normed(hidden, residual, sequence_parallel)
        logits = self.lm_head(hidden_states.index_select(0, sample_rows))
        drawing, (allowed, *edits) = sampling[: len(DRAWING)], sampling[len(DRAWING) :]
        tokens = ops.sample_edited(logits, *drawing, allowed, token_ids.index_select(0, sample_rows), *edits)
        given = dict(zip(EDITS, edits, strict=True))
        ops.count_tokens_(given[OUTPUT_COUNTS], given[STATE_ROWS], tokens)
        return tokens, logits, hidden_states


def decoder_program(
    bucket: Bucket,
    variant: str,
    *,
    embedding: EmbeddingPart,
    layers: Iterable[nn.Module],
    norm: RMSNorm,
    lm_head: ParallelLMHead,
) -> Program:
    """The parts of ``bucket`` in order; ``variant`` is ``greedy`` or ``sample``, ``logits`` for a LOGITS
    bucket.

    With more than one tensor-parallel rank, prefill splits the tokens between blocks over the ranks.
    """
    if (bucket.phase is Phase.LOGITS) != (variant == "logits") or variant not in (
        "greedy",
        "sample",
        "logits",
    ):
        raise ConfigError("variant", variant, f"is no variant of {bucket.name}; use {_variants(bucket)}")
    if variant == "logits":
        return Program((Part("logits", lm_head, ("hidden_states",), ("logits",)),), ("logits",))
    is_split = bucket.phase is Phase.PREFILL and lm_head.group.size > 1
    static = (("sequence_parallel", is_split),)
    head = (
        _greedy_part(norm, lm_head, static) if variant == "greedy" else _sampling_part(norm, lm_head, static)
    )
    return Program((*decoder_parts(embedding, layers, static), head), head.outputs)


def decoder_parts(
    embedding: EmbeddingPart, layers: Iterable[nn.Module], static: tuple[tuple[str, bool], ...]
) -> tuple[Part, ...]:
    """All parts before the head, from token ids to ``hidden`` and ``residual`` of the last layer."""
    embed = Part("embed", embedding, embedding.inputs, ("hidden", "residual", "cos", "sin"), static)
    blocks = [
        Part(f"layer.{i}", layer, ("hidden", "residual", *CONTEXT, f"kv.{i}"), ("hidden", "residual"), static)
        for i, layer in enumerate(layers)
    ]
    return (embed, *blocks)


def _greedy_part(norm: RMSNorm, lm_head: ParallelLMHead, static: tuple[tuple[str, bool], ...]) -> Part:
    inputs = ("hidden", "residual", "sample_rows", "rank")
    return Part("greedy", GreedyHead(norm, lm_head), inputs, ("tokens",), static)


def _sampling_part(norm: RMSNorm, lm_head: ParallelLMHead, static: tuple[tuple[str, bool], ...]) -> Part:
    outputs = ("tokens", "logits", "hidden_states")
    return Part("sample", SamplingHead(norm, lm_head), SamplingHead.inputs, outputs, static)


def _variants(bucket: Bucket) -> str:
    return "'logits'" if bucket.phase is Phase.LOGITS else "'greedy' or 'sample'"
