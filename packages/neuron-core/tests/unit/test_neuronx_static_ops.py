# SPDX-License-Identifier: Apache-2.0
"""Static-shape forms of our ops equal the ops, and can be traced where the ops' own references cannot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import make_fx

from neuron_core.graphs.compilers.static_ops import STATIC_FORMS, kv_write
from neuron_core.ops import reference


@st.composite
def writes(draw):
    """Blocks, block size, and slots as vLLM gives them: -1 or a slot that no other token has."""
    blocks, block_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    slots = st.lists(st.integers(0, blocks * block_size - 1), unique=True, min_size=0, max_size=8)
    chosen = draw(slots)
    padding = draw(st.integers(0 if chosen else 1, 3))
    return blocks, block_size, draw(st.permutations([*chosen, *[-1] * padding]))


@settings(deadline=None, max_examples=100)
@given(
    writes(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    st.sampled_from([None, 0.3, 2.0]),
    st.integers(0, 2**32 - 1),
)
def test_kv_write_equals_the_reference_bit_for_bit(write, dtype, scale, seed):
    blocks, block_size, slots = write
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(blocks, 2, block_size, 6, generator=generator).to(dtype)
    key, value = (torch.randn(len(slots), 2, 3, generator=generator) for _ in range(2))
    slots = torch.tensor(slots, dtype=torch.int32)
    before = kv.clone()
    is_fp8 = dtype == torch.float8_e4m3fn
    scales = [torch.tensor([scale, 0.5])] * 2 + [240.0] if is_fp8 and scale is not None else []
    results = [write(kv, key, value, slots, *scales) for write in (kv_write, reference.kv_write)]
    assert torch.equal(*(result.view(torch.uint8) for result in results))
    assert torch.equal(kv.view(torch.uint8), before.view(torch.uint8))


def test_every_op_of_ours_but_packed_weights_has_a_static_form():
    import neuron_core.ops.library as library

    names = {name for name in torch.library._defs if name.startswith("neuron::")}
    assert library.PANEL and names
    functional = {name for name in names if not name.endswith("_")}
    covered = {str(op).removesuffix(".default").replace(".", "::") for op in STATIC_FORMS}
    assert covered == functional - {"neuron::packed_linear"}


def test_the_static_form_can_be_traced_and_the_reference_cannot():
    def trace(function):
        with FakeTensorMode():
            inputs = [torch.empty(4, 2, 4, 6), *(torch.empty(3, 2, 3) for _ in range(2))]
            slots = torch.empty(3, dtype=torch.int32)
            return make_fx(lambda *given: function(*given))(*inputs, slots)

    graph = trace(kv_write)
    assert all(node.target is not torch.ops.aten.nonzero.default for node in graph.graph.nodes)
    with pytest.raises(DynamicOutputShapeException):
        trace(reference.kv_write)
