# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: the oracle of the kernels, and what a device without a kernel lowers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [T, K] @ weight[N, K].T -> [T, N]`` in the dtype of ``x``."""
    return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dim (Zhang & Sennrich 2019), in float32 with one rounding at the end."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its :func:`rms_norm`; returns ``(normed, summed)``, both ``[T, H]``."""
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) in rotate-half form, in float32 with one rounding at the end.

    ``x [T, H, D]`` with ``cos``, ``sin`` ``[T, D/2]`` float32 -> ``[T, H, D]``.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (SwiGLU, Shazeer 2020) of ``gate_up [T, 2I]`` laid out ``[gate | up]`` -> ``[T, I]``.

    In float32 with one rounding at the end.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def is_scaled(kv: Tensor, *scales: Tensor | None) -> bool:
    """Whether a cache holds ``torch.float8_e4m3fn``; any other takes no scales, and ``ValueError`` says so."""
    scaled = kv.dtype == torch.float8_e4m3fn
    if not scaled and any(scale is not None for scale in scales):
        raise ValueError(f"neuron op: a cache of {kv.dtype} takes no scales; only float8_e4m3fn does")
    return scaled


def quantized(x: Tensor, scale: Tensor | None, fp8_max: float) -> Tensor:
    """``x [T, KH, D]`` as float8_e4m3fn: times the reciprocal of ``scale`` ``[1]`` or ``[KH]`` (None = 1) in
    float32, clamped to ``fp8_max`` (at most 448), and rounded to nearest even. NaN stays NaN.
    """
    if not 0.0 < fp8_max <= 448.0:
        raise ValueError(f"neuron op: fp8_max={fp8_max} must be above 0 and at most 448")
    wide = x.float() if scale is None else x.float() * scale.reciprocal().unsqueeze(1)
    return wide.clamp(-fp8_max, fp8_max).to(torch.float8_e4m3fn)


def cache_rows(
    kv: Tensor, key: Tensor, value: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, fp8_max: float
) -> Tensor:
    """``key`` and ``value`` ``[T, KH, D]`` as the cache ``kv`` holds them, ``[T, KH, 2D]`` in its dtype."""
    if is_scaled(kv, k_scale, v_scale):
        return torch.cat((quantized(key, k_scale, fp8_max), quantized(value, v_scale, fp8_max)), dim=-1)
    return torch.cat((key, value), dim=-1).to(kv.dtype)


def kv_write(
    kv: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    fp8_max: float = 448.0,
) -> Tensor:
    """A copy of ``kv [blocks, KH, block_size, 2D]`` with ``key``, ``value`` ``[T, KH, D]`` at ``slots [T]``.

    Slot -1 writes nothing. A float8_e4m3fn cache holds :func:`quantized` keys and values.
    """
    blocks, heads, block_size, _ = kv.shape
    rows = kv.transpose(1, 2).reshape(blocks * block_size, heads, -1).clone()
    new = cache_rows(kv, key, value, k_scale, v_scale, fp8_max)
    kept = slots >= 0
    if is_scaled(kv):  # torch cannot put float8 by index
        rows.view(torch.uint8)[slots[kept].long()] = new[kept].view(torch.uint8)
    else:
        rows[slots[kept].long()] = new[kept]
    return rows.view(blocks, block_size, heads, -1).transpose(1, 2).contiguous()


def paged_attention(
    query: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    request_rows: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Causal attention of each token over its request's paged cache, the token itself included.

    ``query [T, H, D]``, ``kv [blocks, KH, block_size, 2D]`` (keys first), ``block_tables [R, W]`` (-1 = no block),
    ``request_rows [T]`` (-1 = padding: the result is zero), ``positions [T]``. ``window`` > 0 limits a token to the
    last ``window`` positions. Softmax in float32; the result has the shape and dtype of ``query``.
    A float8_e4m3fn cache stands for its keys times ``k_scale`` and its values times ``v_scale`` (float32 ``[1]`` or
    ``[KH]``, None = 1), which are applied to the scores and to the result.
    """
    is_scaled(kv, k_scale, v_scale)
    tokens, heads, head_dim = query.shape
    block_size, kv_heads = kv.shape[2], kv.shape[1]
    tables = block_tables.long().clamp(min=0)
    paged = kv[tables].permute(0, 2, 1, 3, 4).reshape(tables.shape[0], kv_heads, -1, 2 * head_dim).float()
    rows = request_rows.long()
    context = paged[rows.clamp(min=0)]
    keys, values = context[..., :head_dim], context[..., head_dim:]
    grouped = query.float().view(tokens, kv_heads, heads // kv_heads, head_dim)
    if k_scale is not None:
        grouped = grouped * k_scale.view(-1, 1, 1)
    scores = torch.einsum("tkgd,tksd->tkgs", grouped, keys) * scale
    place = torch.arange(tables.shape[1] * block_size, device=query.device)
    seen = place <= positions.long().unsqueeze(1)
    if window > 0:
        seen &= place > positions.long().unsqueeze(1) - window
    weights = scores.masked_fill(~seen[:, None, None, :], float("-inf")).softmax(-1)
    mixed = torch.einsum("tkgs,tksd->tkgd", weights, values)
    if v_scale is not None:
        mixed = mixed * v_scale.view(-1, 1, 1)
    mixed = mixed.reshape(tokens, heads, head_dim)
    return torch.where((rows >= 0)[:, None, None], mixed, 0.0).to(query.dtype)


def encoder_attention(
    query: Tensor, key: Tensor, value: Tensor, request_rows: Tensor, scale: float
) -> Tensor:
    """Attention of each token over all tokens of its text, ``query``, ``key`` and ``value`` ``[T, H, D]``.

    Texts are runs of equal ``request_rows [T]`` int32; -1 is padding and gives zeros. In float32, rounded at the end.
    """
    is_text = request_rows >= 0
    apart = (request_rows.unsqueeze(1) != request_rows.unsqueeze(0)) & is_text.unsqueeze(1)
    heads = (x.float().transpose(0, 1) for x in (query, key, value))
    wide_query, wide_key, wide_value = heads
    scores = torch.matmul(wide_query, wide_key.transpose(1, 2)) * scale
    weights = scores.masked_fill(apart, float("-inf")).softmax(-1)
    mixed = torch.matmul(weights, wide_value).transpose(0, 1)
    return (mixed * is_text.view(-1, 1, 1)).to(query.dtype)


def greedy(logits: Tensor) -> Tensor:
    """Index of the largest of ``logits [R, V]`` per row, the first one of equals; int32 ``[R]``."""
    return logits.argmax(-1).to(torch.int32)


def kept_probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Distribution ``[R, V]`` float64 that a row is drawn from: temperature, then min-p, top-k and top-p.

    Follows the order of vLLM's sampler: min-p against the tempered distribution, then the ``top_k`` largest
    (0 = off; ties with the k-th are kept), then the smallest set of most likely tokens whose mass reaches ``top_p``
    of what top-k left (ties with the last are kept). Logits of plus infinity share the whole mass.
    """
    tempered = logits.double() / temperature.double().clamp(min=1e-5).unsqueeze(1)
    certain = tempered == float("inf")
    limit_of_them = torch.where(certain, 0.0, float("-inf"))
    probs = torch.where(certain.any(-1, keepdim=True), limit_of_them, tempered).softmax(-1)
    keep = probs >= min_p.double().unsqueeze(1) * probs.amax(-1, keepdim=True)
    probs = torch.where(keep, probs, 0.0)
    ordered = probs.sort(-1, descending=True).values
    limit = torch.where(top_k > 0, top_k, logits.shape[1]).clamp(max=logits.shape[1]).long()
    probs = torch.where(probs >= ordered.gather(1, limit.unsqueeze(1) - 1), probs, 0.0)
    ordered = probs.sort(-1, descending=True).values
    target = top_p.double().unsqueeze(1) * ordered.sum(-1, keepdim=True)
    reached = (ordered.cumsum(-1) < target).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    floor = torch.where(top_p.unsqueeze(1) < 1.0, ordered.gather(1, reached), 0.0)
    probs = torch.where(probs >= floor, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def token_bits(words: Tensor, vocab_size: int) -> Tensor:
    """``words`` int32 ``[R, ceil(V / 32)]`` as bool ``[R, V]``; the lowest bit of a word comes first."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(2) >> places) & 1).flatten(1)[:, :vocab_size] != 0


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """``logits [R, V]`` with minus infinity where a bit of ``allowed`` is 0.

    ``allowed`` is int32 ``[R, ceil(V / 32)]``: bit ``i % 32`` of word ``i // 32`` says whether token ``i`` may be
    drawn, the lowest bit first, as grammar libraries lay it out.
    """
    return logits.masked_fill(~token_bits(allowed, logits.shape[1]), float("-inf"))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    allowed: Tensor | None = None,
) -> Tensor:
    """Draw one token per row of ``logits [R, V]`` by inverting the distribution function at ``uniform [R]``.

    The mass is that of :func:`kept_probabilities`, summed in token order; a row with ``temperature`` 0 takes
    :func:`greedy`. With ``allowed``, both are of :func:`mask_logits`. Returns int32 ``[R]``; token 0 where nothing is
    left to draw.
    """
    if allowed is not None:
        logits = mask_logits(logits, allowed)
    mass = kept_probabilities(logits, temperature, top_k, top_p, min_p).cumsum(-1)
    drawn = (mass <= uniform.double().unsqueeze(1) * mass[:, -1:]).sum(-1).clamp(max=logits.shape[1] - 1)
    return torch.where(temperature < 1e-5, greedy(logits), drawn.to(torch.int32))


def edited_logits(
    logits: Tensor,
    allowed: Tensor,
    last_tokens: Tensor,
    state_rows: Tensor,
    bans_stop: Tensor,
    ban_if: Tensor,
    ban_then: Tensor,
    penalties: Tensor,
    bias: Tensor,
    prompt_tokens: Tensor,
    stop_tokens: Tensor,
    output_counts: Tensor,
) -> Tensor:
    """``logits [R, V]`` as a token is drawn from them: :func:`mask_logits`, then what each row's state row asks for.

    In vLLM's order: ``bias`` (and the bans among it), words whose end is banned after ``last_tokens`` int32 ``[R]``,
    stop tokens where ``bans_stop`` is 1 and anything else is left, repetition, frequency and presence penalty. All
    other tensors are as in `neuron_core.logit_edits`; rows whose state row is -1 are masked and no more.
    """
    vocab = logits.shape[1]
    row, minus = state_rows.long().clamp(min=0), float("-inf")
    masked = mask_logits(logits, allowed)
    edited = masked + bias[row]
    hit = (ban_then >= 0) & ((ban_if == -2) | (ban_if == last_tokens.unsqueeze(1)))
    ends = torch.zeros(len(logits), vocab + 1, dtype=torch.int32, device=logits.device)
    ends = ends.scatter(1, torch.where(hit, ban_then, vocab).long(), 1)
    edited = edited.masked_fill(ends[:, :vocab] != 0, minus)
    without = edited.masked_fill(token_bits(stop_tokens[row], vocab) & (bans_stop.unsqueeze(1) != 0), minus)
    edited = torch.where((without == minus).all(1, keepdim=True), edited, without)
    counts = output_counts[row]
    repetition, presence, frequency = penalties[row].unsqueeze(2).unbind(1)
    seen = token_bits(prompt_tokens[row], vocab) | (counts > 0)
    repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
    edited = torch.where(seen, repeated, edited) - frequency * counts
    edited = edited - presence * (counts > 0)
    return torch.where(state_rows.unsqueeze(1) >= 0, edited, masked)


def sample_edited(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *edits: Tensor,
) -> Tensor:
    """:func:`sample` of :func:`edited_logits`, whose arguments after ``logits`` are ``edits``; int32 ``[R]``."""
    return sample(edited_logits(logits, *edits), temperature, top_k, top_p, min_p, uniform)


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """A copy of ``counts`` int32 ``[S, V]`` with one more at each ``(rows[i], tokens[i])``, both int32 ``[R]``.

    Row -1 counts nothing.
    """
    places = (rows.long().clamp(min=0), tokens.long())
    return counts.index_put(places, (rows >= 0).to(counts.dtype), accumulate=True)
