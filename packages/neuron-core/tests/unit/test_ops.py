# SPDX-License-Identifier: Apache-2.0
"""Each CPU kernel against the op's PyTorch reference, and the reference against PyTorch's own operators."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuron_core import ops
from neuron_core.errors import CompileError
from neuron_core.ops import reference

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


pytestmark = pytest.mark.usefixtures("kernels")


def paged(
    contexts: list[int], block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A cache with each context's keys and values scattered over random blocks; also the plain contexts."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(contexts) // block_size)
    num_blocks = len(contexts) * width + 1
    kv = torch.full((num_blocks, kv_heads, block_size, 2 * head_dim), 1e4, dtype=dtype)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    tables = order[: len(contexts) * width].view(len(contexts), width).to(torch.int32)
    plain = []
    for row, context in enumerate(contexts):
        both = torch.randn(context, kv_heads, 2 * head_dim, generator=generator).to(dtype)
        for position in range(context):
            kv[tables[row, position // block_size], :, position % block_size] = both[position]
        plain.append(both)
    return kv, tables, plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "group", "head_dim"), [(16, 3, 3, 64), (32, 2, 1, 40), (48, 1, 5, 16)]
)
def test_paged_attention_equals_dense_attention(
    dtype: torch.dtype, block_size: int, kv_heads: int, group: int, head_dim: int
) -> None:
    contexts = [1, 37, 100, 16]
    kv, tables, plain = paged(contexts, block_size, kv_heads, head_dim, dtype, seed=1)
    queries = torch.randn(
        sum(contexts), kv_heads * group, head_dim, generator=torch.Generator().manual_seed(2)
    ).to(dtype)
    rows = torch.tensor(
        [row for row, context in enumerate(contexts) for _ in range(context)], dtype=torch.int32
    )
    positions = torch.cat([torch.arange(context) for context in contexts]).to(torch.int32)
    got = ops.paged_attention(queries, kv, tables, rows, positions, scale=head_dim**-0.5)
    begin = 0
    for context, both in zip(contexts, plain, strict=True):
        q = queries[begin : begin + context].transpose(0, 1).float()
        k, v = (t.transpose(0, 1).repeat_interleave(group, 0).float() for t in both.split(head_dim, -1))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(
            got[begin : begin + context].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )
        begin += context


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 5, 40])
def test_paged_attention_kernel_equals_reference(dtype: torch.dtype, window: int) -> None:
    kv, tables, _ = paged([90, 64, 33], 16, 2, 64, dtype, seed=3)
    rows = torch.tensor([0, 0, 0, -1, 2, 1], dtype=torch.int32)
    positions = torch.tensor([87, 88, 89, 0, 32, 5], dtype=torch.int32)
    query = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    got = ops.paged_attention(query, kv, tables, rows, positions, scale=0.125, window=window)
    expected = reference.paged_attention(query, kv, tables, rows, positions, 0.125, window)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not got[3].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_attention_depends_on_neither_batch_nor_block_size_nor_phase(dtype: torch.dtype) -> None:
    context, results = 75, []
    query = torch.randn(context, 6, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    for block_size in (16, 32):
        kv, tables, _ = paged([context], block_size, 2, 64, dtype, seed=6)
        positions = torch.arange(context, dtype=torch.int32)
        rows = torch.zeros(context, dtype=torch.int32)
        whole = ops.paged_attention(query, kv, tables, rows, positions, scale=0.125)
        alone = [
            ops.paged_attention(query[i : i + 1], kv, tables, rows[:1], positions[i : i + 1], scale=0.125)
            for i in range(context)
        ]
        results += [whole, torch.cat(alone)]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    kv = torch.randn(5, 2, 16, 32, generator=generator).to(dtype)
    key, value = (torch.randn(4, 2, 16, generator=generator).to(dtype) for _ in range(2))
    slots = torch.tensor([33, -1, 16, 79], dtype=torch.int32)
    expected = kv.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 16, :, slot % 16] = torch.cat((key[token], value[token]), -1)
    functional = torch.ops.neuron.kv_write(kv, key, value, slots)
    place = kv.data_ptr()
    ops.kv_write_(kv, key, value, slots)
    assert kv.data_ptr() == place
    assert torch.equal(kv, expected)
    assert torch.equal(functional, expected)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11, 12, 13, 24, 31, 64])
def test_packed_linear_equals_linear(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 130, generator=generator).to(torch.bfloat16)
    x = torch.randn(rows, 130, generator=generator).to(torch.bfloat16)
    assert ops.can_pack(weight)
    expected = x.float() @ weight.float().T
    packed = ops.pack_linear(weight)
    torch.testing.assert_close(ops.linear(x, packed, wide=True), expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(ops.linear(x, packed), expected.to(torch.bfloat16), atol=1e-2, rtol=1e-2)


@pytest.mark.usefixtures("packing")
def test_a_rows_product_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(8)
    packed = ops.pack_linear(torch.randn(64, 576, generator=generator).to(torch.bfloat16))
    x = torch.randn(29, 576, generator=generator).to(torch.bfloat16)
    whole = ops.linear(x, packed, wide=True)
    for begin, end in [(0, 1), (3, 8), (17, 29)]:
        assert torch.equal(ops.linear(x[begin:end], packed, wide=True), whole[begin:end])


def test_packing_is_undone_exactly_and_serves_lookups() -> None:
    weight = torch.randn(64, 10, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    packed = ops.pack_linear(weight)
    ids = torch.tensor([0, 63, 31, 32], dtype=torch.int32)
    assert torch.equal(ops.library.unpack(packed), weight)
    assert torch.equal(ops.embedding(ids, packed), torch.nn.functional.embedding(ids, weight))


@pytest.mark.usefixtures("packing")
def test_a_weight_shared_by_two_modules_is_packed_once_and_stays_shared() -> None:
    class Owner(torch.nn.Module):
        packable = True

        def __init__(self, weight: torch.nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    shared = torch.nn.Parameter(torch.randn(64, 32).to(torch.bfloat16))
    model = torch.nn.ModuleList([Owner(shared), Owner(shared), torch.nn.Linear(32, 64, dtype=torch.bfloat16)])
    assert ops.pack_module(model) == shared.nbytes
    assert model[0].weight is model[1].weight
    assert model[0].weight.dim() == 4
    assert model[2].weight.dim() == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_norm_rotary_and_gate_equal_torchs_own_in_float32(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(10)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    x, residual = (torch.randn(tokens, 72, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(72, generator=generator).to(dtype)

    def norm(values: Tensor, by: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(values.float(), by.shape, by.float(), 1e-5)

    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5).float(), norm(x, weight), **close)
    normed, summed = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed.float(), norm(summed, weight), **close)
    both = torch.randn(tokens, 6, 16, generator=generator).to(dtype)
    query, key = both.split((4, 2), 1)  # views with a stride between tokens, as the qkv product leaves them
    angles = torch.rand(tokens, 8, generator=generator)
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    for got, head in zip(ops.rotary(query, key, angles.cos(), angles.sin()), (query, key), strict=True):
        turned = torch.complex(*head.float().chunk(2, -1)) * turn
        torch.testing.assert_close(got.float(), torch.cat((turned.real, turned.imag), -1), **close)
    torch.testing.assert_close(
        ops.rms_norm(query, weight[:16], 1e-5).float(), norm(query, weight[:16]), **close
    )
    gate, up = x.float().chunk(2, 1)
    torch.testing.assert_close(ops.silu_mul(x).float(), torch.nn.functional.silu(gate) * up, **close)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 88.0, -88.0, 1e4, -1e4, float("inf"), float("nan")])
def test_the_gate_follows_silu_at_its_ends(value: float) -> None:
    both = torch.tensor([[value, 2.0]])
    torch.testing.assert_close(ops.silu_mul(both), reference.silu_mul(both), equal_nan=True)


@given(
    vocab=st.integers(2, 300),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_sampler_draws_what_the_reference_draws(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab, generator=generator) * 3
    settings_ = (
        torch.tensor([temperature]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    probabilities = reference.kept_probabilities(logits, *settings_)[0]
    edges = torch.cat((torch.zeros(1, dtype=torch.float64), probabilities.cumsum(0)))
    uniform = torch.rand(1, generator=generator)
    token = int(ops.sample(logits, *settings_, uniform)[0])
    # The drawn token's interval holds the uniform number, within float32 rounding of the limits.
    slack = 1e-4
    assert edges[token] - slack <= float(uniform) <= edges[token + 1] + slack
    assert probabilities[token] > 0 or _is_at_a_limit(logits, settings_, token)


def _is_at_a_limit(logits: Tensor, settings_: tuple[Tensor, ...], token: int) -> bool:
    temperature, top_k, top_p, min_p = settings_
    loose = reference.kept_probabilities(
        logits, temperature, top_k, (top_p + 1e-4).clamp(max=1.0), min_p - 1e-5
    )
    return bool(loose[0, token] > 0)


def test_greedy_rows_of_a_mixed_batch_take_the_first_largest() -> None:
    logits = torch.zeros(3, 50)
    logits[0, [7, 9]] = 5.0
    logits[1, 49] = 1.0
    temperature = torch.tensor([0.0, 0.0, 1.0])
    off = torch.zeros(3)
    tokens = ops.sample(logits, temperature, off.int(), off + 1, off, torch.full((3,), 0.999))
    assert tokens.tolist() == [7, 49, 49]
    assert ops.greedy(logits).tolist() == [7, 49, 0]


def test_top_k_beyond_the_vocabulary_keeps_every_token() -> None:
    logits = torch.zeros(1, 10)
    one = torch.ones(1)
    drawn = {
        int(
            ops.sample(logits, one, torch.tensor([11], dtype=torch.int32), one, one * 0, torch.tensor([u]))[0]
        )
        for u in [i / 10 + 0.05 for i in range(10)]
    }
    assert drawn == set(range(10))


@given(
    vocab=st.integers(2, 150),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([0.4, 1.0]),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
@settings(max_examples=120, deadline=None)
def test_a_mask_is_the_same_as_logits_of_minus_infinity(
    vocab: int, temperature: float, top_k: int, top_p: float, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * 3
    kept = torch.rand(3, vocab, generator=generator) < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    kept[:, int(torch.randint(vocab, (1,), generator=generator))] = True
    kept[1] = True  # a row without a grammar
    allowed = torch.zeros(3, -(-vocab // 32), dtype=torch.int64)
    for row, token in kept.nonzero().tolist():
        allowed[row, token // 32] |= 1 << token % 32
    if data.draw(st.booleans()):
        allowed[1] = 0xFFFFFFFF  # as it is written where nothing is banned: bits past the vocabulary too
    words = torch.where(allowed >= 1 << 31, allowed - (1 << 32), allowed).to(torch.int32)
    rest = (
        torch.full((3,), temperature),
        torch.full((3,), top_k, dtype=torch.int32),
        torch.full((3,), top_p),
        torch.zeros(3),
        torch.rand(3, generator=generator),
    )
    edited = logits.masked_fill(~kept, float("-inf"))
    expected = ops.sample(edited, *rest)
    before = logits.clone()
    tokens = ops.sample(logits, *rest, words)
    assert torch.equal(tokens, expected) and kept[torch.arange(3), tokens.long()].all()
    assert torch.equal(logits, before)
    assert torch.equal(reference.mask_logits(logits, words), edited)
    assert torch.equal(reference.sample(logits, *rest, words), reference.sample(edited, *rest))


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(RuntimeError, match="allowed"):
        ops.sample(
            torch.zeros(1, 64),
            one,
            one.int(),
            one,
            one * 0,
            one * 0.5,
            torch.full((1, 3), -1, dtype=torch.int32),
        )


def test_kernels_work_in_a_forked_child(kernels: Path) -> None:
    import os
    import subprocess
    import sys

    code = f"""
import os, torch
from pathlib import Path
from neuron_core import ops
ops.load_kernels(Path({str(kernels.parents[2])!r}))
cpus = sorted(os.sched_getaffinity(0))
ops.pin_threads(cpus)
logits = torch.arange(40.0).view(8, 5)
before = ops.greedy(logits)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.greedy(logits), before) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        timeout=60,
        check=True,
    )


def test_a_damaged_kernel_library_is_built_again(kernels: Path, tmp_path: Path) -> None:
    import shutil

    from neuron_core.ops.kernels import _is_whole

    entry = tmp_path / "entry"
    shutil.copytree(kernels.parent, entry)
    library = entry / kernels.name
    assert _is_whole(library)
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    assert not _is_whole(library)


def test_ops_refuse_what_the_kernels_cannot_read() -> None:
    kv = torch.zeros(2, 2, 24, 32)
    query = torch.zeros(1, 2, 16)
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="multiple of 16"):
        ops.paged_attention(query, kv, index.view(1, 1), index, index, scale=1.0)
    with pytest.raises(RuntimeError, match="float32"):
        ops.greedy(torch.zeros(1, 4, dtype=torch.bfloat16))


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "from pathlib import Path; from neuron_core import ops\n"
        "try: ops.load_kernels(Path('kernels'))\n"
        "except ops.kernels.CompileError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "g++, which is not on PATH" in done.stdout, done.stderr
    assert issubclass(CompileError, Exception)
