# SPDX-License-Identifier: Apache-2.0
"""Loading is strict, reads what the rank needs, and says by name what is wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from neuron_core.errors import CheckpointError
from neuron_models import build_model, load_weights
from neuron_models.checkpoint import INDEX
from neuron_parallel import ParallelGroups, ParallelPlan

SINGLE = "model.safetensors"
Q = "model.layers.1.self_attn.q_proj.weight"


def load(config, folder, dtype=torch.float32, world=1, rank=0):
    groups = ParallelGroups.describe(ParallelPlan(tensor_parallel_size=world))
    model = build_model(config, dtype=dtype, groups=groups, block_size=4)
    return model, load_weights(model, folder, groups.tp, rank)


@pytest.fixture
def checkpoint(driver, tmp_path):
    """A config, its folder, and the tensors in it; `save` puts changed tensors back."""
    config = driver.llama_config()
    driver.write_checkpoint(config, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    return config, tmp_path, tensors


def fails(config, folder):
    with pytest.raises(CheckpointError) as caught:
        load(config, folder)
    return str(caught.value)


def test_a_missing_tensor_is_named(checkpoint):
    config, folder, tensors = checkpoint
    del tensors[Q]
    save_file(tensors, folder / SINGLE)
    assert f"1 missing: {Q}" in fails(config, folder)


def test_an_unexpected_tensor_is_named(checkpoint):
    config, folder, tensors = checkpoint
    save_file(tensors | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(32)}, folder / SINGLE)
    assert "1 unexpected: model.layers.1.self_attn.q_proj.bias" in fails(config, folder)


def test_layers_beyond_the_config_are_unexpected(checkpoint):
    config, folder, _ = checkpoint
    config.num_hidden_layers = 2
    assert "9 unexpected: model.layers.2.input_layernorm.weight" in fails(config, folder)


def test_a_wrong_shape_is_named_with_both_shapes_and_the_file(checkpoint):
    config, folder, tensors = checkpoint
    tensors[Q] = tensors[Q][:-1].clone()
    save_file(tensors, folder / SINGLE)
    assert f"{Q} has shape [31, 32] instead of [32, 32] ({SINGLE})" in fails(config, folder)


def test_a_quantised_tensor_is_refused_by_dtype(checkpoint):
    config, folder, tensors = checkpoint
    tensors[Q] = tensors[Q].to(torch.float8_e4m3fn)
    save_file(tensors, folder / SINGLE)
    assert f"{Q} has dtype F8_E4M3" in fails(config, folder)


@pytest.mark.supports("strict checkpoint loading", model="llama")
def test_all_problems_are_reported_at_once_and_nothing_is_filled(checkpoint):
    config, folder, tensors = checkpoint
    tensors["extra.weight"] = tensors.pop(Q)
    save_file(tensors, folder / SINGLE)
    groups = ParallelGroups.single()
    model = build_model(config, dtype=torch.float32, groups=groups, block_size=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    with pytest.raises(CheckpointError, match=re.escape(f"1 missing: {Q}; 1 unexpected: extra.weight")):
        load_weights(model, folder, groups.tp, 0)
    assert all((parameter == 7).all() for parameter in model.parameters())


@pytest.mark.parametrize("keep", [4, 200, -1])
def test_a_truncated_file_is_named(checkpoint, keep):
    config, folder, _ = checkpoint
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:keep])
    assert f"{folder / SINGLE}: not a complete safetensors file" in fails(config, folder)


def test_a_folder_without_safetensors_is_refused(checkpoint):
    config, folder, _ = checkpoint
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    assert "holds no *.safetensors file" in fails(config, folder)


def split(folder, tensors):
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / SINGLE).unlink()
    return {name: file for file, part in files.items() for name in part}


def test_index_files_are_followed(checkpoint):
    config, folder, tensors = checkpoint
    expected, _ = load(config, folder)
    weight_map = split(folder, tensors)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    save_file({"consolidated": torch.zeros(1)}, folder / "consolidated.safetensors")
    model, _ = load(config, folder)
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_a_file_the_index_lists_and_that_is_not_there_is_named(checkpoint):
    config, folder, tensors = checkpoint
    (folder / INDEX).write_text(json.dumps({"weight_map": split(folder, tensors)}))
    (folder / "b.safetensors").unlink()
    assert "lists files that are not there: b.safetensors" in fails(config, folder)


def test_an_index_that_contradicts_its_files_is_refused(checkpoint):
    config, folder, tensors = checkpoint
    weight_map = split(folder, tensors)
    weight_map[Q] = "a.safetensors" if weight_map[Q] == "b.safetensors" else "b.safetensors"
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert f"disagrees with its files on: {Q}" in fails(config, folder)


def test_derived_inverse_frequencies_of_older_checkpoints_are_accepted(checkpoint):
    config, folder, tensors = checkpoint
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for i in range(3)}
    save_file(tensors | old, folder / SINGLE)
    load(config, folder)


@pytest.mark.parametrize("stored", ["both", "head"])
def test_a_tied_weight_may_be_stored_under_either_name(driver, tmp_path, stored):
    config = driver.llama_config(tie_word_embeddings=True)
    driver.write_checkpoint(config, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    embedding = tensors["model.embed_tokens.weight"]
    if stored == "head":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / SINGLE)
    model, _ = load(config, tmp_path)
    assert torch.equal(model.lm_head.weight, embedding)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_tied_weights_that_differ_are_refused(driver, tmp_path):
    config = driver.llama_config(tie_word_embeddings=True)
    driver.write_checkpoint(config, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / SINGLE)
    assert "lm_head.weight differs from model.embed_tokens.weight" in fails(config, tmp_path)


@pytest.mark.parametrize("window_bytes", [64, 1 << 20])
def test_ranks_together_hold_the_checkpoint(checkpoint, monkeypatch, window_bytes):
    # Four ranks, two KV heads: rank r holds query head r and KV head r // 2. A tiny window reads row by row.
    monkeypatch.setattr("neuron_models.checkpoint.WINDOW_BYTES", window_bytes)
    monkeypatch.setattr("neuron_models.filling.PIECE_BYTES", window_bytes)
    config, folder, tensors = checkpoint
    models = [load(config, folder, world=4, rank=rank)[0] for rank in range(4)]
    layers = [model.model.layers[1] for model in models]
    query, key, value = (tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    for rank, layer in enumerate(layers):
        head, kv_head = slice(8 * rank, 8 * rank + 8), slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        expected = torch.cat((query[head], key[kv_head], value[kv_head]))
        assert torch.equal(layer.self_attn.qkv_proj.weight, expected)
    gate_up = [layer.mlp.gate_up_proj.weight.chunk(2) for layer in layers]
    for i, name in enumerate(("gate_proj", "up_proj")):
        assert torch.equal(torch.cat([g[i] for g in gate_up]), tensors[f"model.layers.1.mlp.{name}.weight"])
    down = torch.cat([layer.mlp.down_proj.weight for layer in layers], dim=1)
    assert torch.equal(down, tensors["model.layers.1.mlp.down_proj.weight"])
    head = torch.cat([model.lm_head.weight for model in models])
    assert torch.equal(head[:101], tensors["lm_head.weight"])
    assert head.shape == (104, 32) and not head[101:].any()


def test_values_are_cast_on_the_way(checkpoint):
    config, folder, tensors = checkpoint
    model, stats = load(config, folder, dtype=torch.bfloat16)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"].bfloat16())
    assert stats.size_bytes == sum(tensor.numel() * 2 for tensor in tensors.values())
    assert stats.num_tensors == len(tensors) - 3 * 3  # q, k, v and gate, up are merged


@pytest.fixture(scope="module")
def large(driver, tmp_path_factory):
    """A checkpoint of 417 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    config = driver.llama_config(**sizes, num_hidden_layers=9, vocab_size=32768)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    yield folder
    (folder / SINGLE).unlink()


@pytest.mark.parametrize(
    ("world", "rank", "dtype"), [(1, 0, "bfloat16"), (2, 1, "bfloat16"), (2, 1, "float32")]
)
def test_peak_memory_of_loading_stays_within_1_3_of_the_ranks_weights(large, world, rank, dtype):
    worker = Path(__file__).parent / "load_memory_worker.py"
    command = [sys.executable, worker, large, str(world), str(rank), dtype]
    result = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    )
    assert result["weights"] > 400e6 / world
    assert result["peak"] < 1.3 * result["weights"]
