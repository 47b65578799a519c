# SPDX-License-Identifier: Apache-2.0
"""Scales of an FP8 cache are found under every published name, sliced for a rank, and refused if anything is off."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuron_core.devices.chips import chip_for_target
from neuron_core.errors import CheckpointError, ConfigError
from neuron_models import build_model, load_weights
from neuron_models.attention import PagedAttention, fit_to_chip, limit_fp8
from neuron_models.kv_scales import SCALES_FILE, load_kv_scales
from neuron_parallel import ParallelGroups, ParallelPlan

FP8 = torch.float8_e4m3fn
LAYERS = [f"model.layers.{i}.self_attn" for i in range(3)]


@pytest.fixture
def checkpoint(driver, tmp_path):
    config = driver.llama_config()
    driver.write_checkpoint(config, tmp_path / "model")
    return config, tmp_path / "model"


def made(config, world=1, kv_dtype=FP8):
    groups = ParallelGroups.describe(ParallelPlan(world)) if world > 1 else ParallelGroups.single()
    model = build_model(config, dtype=torch.float32, groups=groups, block_size=16, kv_dtype=kv_dtype)
    return model, groups.tp


def loaded(config, folder, *, file=None, world=1, rank=0, fp8_max=448.0):
    """The scales of every layer, ``[layers, k and v, local heads]``."""
    model, group = made(config, world)
    limit_fp8(model, fp8_max)
    load_weights(model, folder, group, rank)
    load_kv_scales(model, folder, group, rank, file)
    attentions = [layer.self_attn.attn for layer in model.model.layers]
    return torch.stack([torch.stack((a.k_scale, a.v_scale)) for a in attentions])


def add_to_checkpoint(folder, scales):
    file = folder / "model.safetensors"
    save_file(load_file(file) | scales, file)


def whole_file(shape=(1,)):
    """A scale per layer and kind, all different, under our own names."""
    numbers = iter(range(1, 100))
    return {
        f"{layer}.{kind}_scale": torch.stack([torch.tensor(float(next(numbers))) for _ in range(shape[0])])
        for layer in LAYERS
        for kind in "kv"
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_the_checkpoints_own_scales_are_loaded_under_every_name(checkpoint, key, value, shape):
    config, folder = checkpoint
    generator = torch.Generator().manual_seed(1)
    scales = {
        f"{layer}.{name}": torch.rand(shape, generator=generator) for layer in LAYERS for name in (key, value)
    }
    add_to_checkpoint(folder, scales)
    found = loaded(config, folder)
    for i, layer in enumerate(LAYERS):
        assert torch.equal(found[i, 0], scales[f"{layer}.{key}"].expand(2))
        assert torch.equal(found[i, 1], scales[f"{layer}.{value}"].expand(2))


def test_one_scale_may_stand_for_keys_and_values(checkpoint):
    config, folder = checkpoint
    add_to_checkpoint(
        folder, {f"{layer}.kv_scale": torch.tensor([0.5 + i]) for i, layer in enumerate(LAYERS)}
    )
    assert loaded(config, folder)[:, :, 0].tolist() == [[0.5, 0.5], [1.5, 1.5], [2.5, 2.5]]


def test_scales_that_are_nowhere_are_one_and_a_warning_counts_them(checkpoint, caplog):
    config, folder = checkpoint
    add_to_checkpoint(folder, {f"{LAYERS[1]}.k_scale": torch.tensor(0.25)})
    with caplog.at_level(logging.WARNING):
        found = loaded(config, folder)
    assert found[1, 0].tolist() == [0.25, 0.25]
    assert found.sum().item() == 10 + 0.5
    assert "5 scales of the FP8 KV cache are 1.0" in caplog.text


def test_a_file_given_goes_before_the_folders_and_that_before_the_checkpoint(checkpoint, tmp_path):
    config, folder = checkpoint
    add_to_checkpoint(folder, {name: scale * 0 + 7 for name, scale in whole_file().items()})
    assert set(loaded(config, folder).flatten().tolist()) == {7.0}
    save_file(whole_file(), folder / SCALES_FILE)
    assert loaded(config, folder)[:, :, 1].flatten().tolist() == [1, 2, 3, 4, 5, 6]
    save_file({name: scale * 10 for name, scale in whole_file().items()}, tmp_path / "other.safetensors")
    other = loaded(config, folder, file=tmp_path / "other.safetensors")
    assert other[:, :, 1].flatten().tolist() == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_has_the_scales_of_the_heads_it_holds(checkpoint, world):
    config, folder = checkpoint
    save_file(whole_file((2,)), folder / SCALES_FILE)
    for rank in range(world):
        head = rank * 2 // world
        expected = torch.arange(1.0, 13.0).view(3, 2, 2)[..., head : head + 1]
        assert torch.equal(loaded(config, folder, world=world, rank=rank), expected)


def test_a_file_is_rescaled_to_the_chips_range_and_a_checkpoint_is_not(checkpoint):
    config, folder = checkpoint
    add_to_checkpoint(folder, whole_file())
    plain = loaded(config, folder, fp8_max=240.0)
    assert plain[:, :, 0].flatten().tolist() == [1, 2, 3, 4, 5, 6]
    save_file(whole_file(), folder / SCALES_FILE, {"format": "pt", "fp8_max": "448.0"})
    rescaled = loaded(config, folder, fp8_max=240.0)
    torch.testing.assert_close(rescaled * 240, plain * 448)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{LAYERS[2]}.v_scale": None}, f"1 missing: {LAYERS[2]}.v_scale"),
        (
            {"model.layers.3.self_attn.k_scale": torch.ones(1)},
            "1 unexpected: model.layers.3.self_attn.k_scale",
        ),
        ({"model.norm.weight": torch.ones(1)}, "1 unexpected: model.norm.weight"),
        ({f"{LAYERS[0]}.attn.k_scale": torch.ones(1)}, f"given twice: {LAYERS[0]}.k_scale, {LAYERS[0]}.attn"),
        ({f"{LAYERS[0]}.k_scale": torch.ones(3)}, r"k_scale has shape \[3\] instead of \[1\] or \[2\]"),
        ({f"{LAYERS[0]}.k_scale": torch.ones(1, dtype=torch.int32)}, "k_scale has dtype torch.int32"),
        ({f"{LAYERS[0]}.k_scale": torch.zeros(1)}, "k_scale is not finite and positive"),
        ({f"{LAYERS[0]}.v_scale": torch.tensor([float("nan")])}, "v_scale is not finite and positive"),
        ({f"{LAYERS[0]}.v_scale": torch.tensor([float("inf")])}, "v_scale is not finite and positive"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_nothing_is_filled(checkpoint, change, message):
    config, folder = checkpoint
    tensors = {name: scale for name, scale in (whole_file() | change).items() if scale is not None}
    save_file(tensors, folder / SCALES_FILE)
    model, group = made(config)
    with pytest.raises(CheckpointError, match=message):
        load_kv_scales(model, folder, group, 0)
    assert all(layer.self_attn.attn.k_scale.tolist() == [1.0, 1.0] for layer in model.model.layers)


def test_a_scale_of_no_layer_in_the_checkpoint_is_unexpected(checkpoint):
    config, folder = checkpoint
    add_to_checkpoint(folder, {"model.layers.9.self_attn.k_scale": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.layers\.9"):
        loaded(config, folder)


@pytest.mark.parametrize("content", [None, b"\x08\0\0\0\0\0\0\0{}"])
def test_a_file_that_cannot_be_read_is_named(checkpoint, tmp_path, content):
    config, folder = checkpoint
    file = tmp_path / "other.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"other\.safetensors"):
        loaded(config, folder, file=file)


def test_a_cache_of_the_models_dtype_has_no_scales_and_needs_none(checkpoint, tmp_path):
    config, folder = checkpoint
    add_to_checkpoint(folder, whole_file())
    model, group = made(config, kv_dtype=None)
    load_weights(model, folder, group, 0)
    assert load_kv_scales(model, folder, group, 0).num_loaded == 0
    assert not [name for name, _ in model.named_buffers() if "scale" in name]
    with pytest.raises(ConfigError, match=r"kv_scales='.*only an FP8 cache has scales"):
        load_kv_scales(model, folder, group, 0, tmp_path / "other.safetensors")


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e5m2, torch.bfloat16])
def test_other_cache_dtypes_are_refused_with_those_that_work(checkpoint, kv_dtype):
    with pytest.raises(ConfigError, match=r"kv_dtype=.*use torch\.float32 or torch\.float8_e4m3fn"):
        made(checkpoint[0], kv_dtype=kv_dtype)


@pytest.mark.parametrize("fp8_max", [0.0, 449.0, float("nan")])
def test_a_range_beyond_e4m3_is_refused(checkpoint, fp8_max):
    with pytest.raises(ConfigError, match=r"fp8_max=.*at most 448"):
        limit_fp8(made(checkpoint[0])[0], fp8_max)


def test_an_fp8_cache_takes_half_the_bytes_of_a_bfloat16_one(checkpoint):
    config = checkpoint[0]
    groups = ParallelGroups.single()
    sizes = [
        build_model(config, dtype=torch.bfloat16, groups=groups, block_size=16, kv_dtype=dtype).kv_layouts[0]
        for dtype in (None, FP8)
    ]
    assert sizes[0].block_bytes == 2 * sizes[1].block_bytes == 16 * 2 * 16 * 2


def test_an_fp8_cache_is_clamped_for_its_chip_and_refused_on_a_chip_without_one(driver):
    model, _ = made(driver.llama_config())
    layers = [module for module in model.modules() if isinstance(module, PagedAttention)]
    fit_to_chip(model, None)
    assert {layer.fp8_max for layer in layers} == {448.0}
    fit_to_chip(model, chip_for_target("trn2"))
    assert {layer.fp8_max for layer in layers} == {chip_for_target("trn2").fp8_max} == {240.0}
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype='fp8': .* has no FP8 cache; use auto"):
        fit_to_chip(model, chip_for_target("trn1"))
    fit_to_chip(made(driver.llama_config(), kv_dtype=None)[0], chip_for_target("trn1"))
