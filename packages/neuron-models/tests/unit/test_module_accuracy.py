# SPDX-License-Identifier: Apache-2.0
"""Blocks of the models against transformers', by the published gates: no less accurate than it is in bfloat16."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from neuron_models.layers import GatedMLP, RMSNorm
from neuron_models.rope import RotaryTable
from neuron_parallel import ParallelGroups

HIDDEN, INTERMEDIATE, HEAD_DIM = 64, 160, 16


@pytest.fixture
def config():
    torch.manual_seed(0)
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HIDDEN // HEAD_DIM,
        max_position_embeddings=4096,
    )


def rows(generator):
    return torch.randn(96, HIDDEN, generator=generator)


def norm_pair():
    reference = LlamaRMSNorm(HIDDEN, eps=1e-5).to(torch.bfloat16)
    torch.nn.init.uniform_(reference.weight, 0.5, 1.5)
    norm = RMSNorm(HIDDEN, 1e-5, torch.bfloat16)
    norm.load_state_dict(reference.state_dict())
    return norm, reference


def test_rms_norm(assert_module_close):
    assert_module_close(*norm_pair(), rows, dtype=torch.bfloat16)


def test_rms_norm_with_a_wrong_epsilon_fails(assert_module_close):
    norm, reference = norm_pair()
    norm.eps = 1e-2
    with pytest.raises(AssertionError, match="FAILS output"):
        assert_module_close(norm, reference, rows, dtype=torch.bfloat16)


@pytest.mark.module_accuracy(seeds=5)
def test_gated_mlp(assert_module_close, config):
    reference = LlamaMLP(config).to(torch.bfloat16)
    mlp = GatedMLP(HIDDEN, INTERMEDIATE, ParallelGroups.single().tp, bias=False, dtype=torch.bfloat16)
    weights = reference.state_dict()
    fused = torch.cat([weights["gate_proj.weight"], weights["up_proj.weight"]])
    mlp.load_state_dict({"gate_up_proj.weight": fused, "down_proj.weight": weights["down_proj.weight"]})
    assert_module_close(lambda x: mlp(x, False), reference, rows, dtype=torch.bfloat16)


def test_rotary_table(assert_module_close, config):
    table, reference = RotaryTable(config, HEAD_DIM), LlamaRotaryEmbedding(config)

    def half(x, position_ids):
        # transformers writes each angle twice.
        return tuple(item[0, :, : HEAD_DIM // 2] for item in reference(x, position_ids))

    def positions(generator):
        return torch.randn(1, generator=generator), torch.randint(4096, (1, 64), generator=generator)

    assert_module_close(lambda x, position_ids: table(position_ids[0]), half, positions, dtype=torch.bfloat16)
