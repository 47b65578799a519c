# SPDX-License-Identifier: Apache-2.0
"""Calibration finds the largest key and value that transformers' own model caches for the same texts."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from neuron_core.errors import ConfigError
from neuron_models import build_model, load_weights
from neuron_models.calibration import record
from neuron_models.kv_scales import SCALES_FILE, load_kv_scales
from neuron_parallel import ParallelGroups, ParallelPlan

SEQUENCES = [[5, 17, 99, 3, 42, 8, 61], list(range(1, 38)), [7]]


def filled(config, folder, **changes):
    groups = ParallelGroups.single()
    model = build_model(config, **{"dtype": torch.float32, "groups": groups, "block_size": 16} | changes)
    load_weights(model, folder, groups.tp, 0)
    return model


def expected_peaks(reference, sequences):
    """``[k and v, layers, heads]`` of what transformers caches."""
    found = []
    for sequence in sequences:
        with torch.no_grad():
            cache = reference(torch.tensor([sequence]), use_cache=True).past_key_values
        layers = [torch.stack((layer.keys, layer.values)) for layer in cache.layers]
        found.append(torch.stack([layer.abs().amax(dim=(1, 3, 4)) for layer in layers], dim=1))
    return torch.stack(found).amax(dim=0)


@pytest.mark.supports("FP8 scale calibration", model="llama")
@pytest.mark.supports("FP8 scale calibration", model="qwen3")
@pytest.mark.parametrize("segment_tokens", [64, 10])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_peaks_are_those_of_what_transformers_caches(driver, tmp_path, family, segment_tokens):
    config = getattr(driver, f"{family}_config")()
    reference = driver.write_checkpoint(config, tmp_path / "model")
    samples = record(filled(config, tmp_path / "model"), SEQUENCES, segment_tokens=segment_tokens)
    expected = expected_peaks(reference, SEQUENCES)
    torch.testing.assert_close(samples.peaks(), expected, atol=1e-5, rtol=1e-5)
    assert samples.num_tokens == 45
    assert samples.layers == tuple(f"model.layers.{i}.self_attn" for i in range(3))


def test_progress_counts_the_tokens_of_every_segment(driver, tmp_path):
    config = driver.llama_config()
    driver.write_checkpoint(config, tmp_path / "model")
    seen = []
    model = filled(config, tmp_path / "model")
    record(model, [[5, 17, 99, 3, 42], [], [7]], segment_tokens=4, progress=lambda *each: seen.append(each))
    assert seen == [(4, 6), (5, 6), (6, 6)]


@pytest.mark.parametrize("per_head", [False, True])
def test_the_file_loads_and_its_scales_clamp_nothing_and_round_least(driver, tmp_path, per_head):
    config, folder = driver.llama_config(), tmp_path / "model"
    driver.write_checkpoint(config, folder)
    samples = record(filled(config, folder), SEQUENCES)
    file = samples.save(folder / SCALES_FILE, per_head=per_head, fp8_max=240.0)
    assert {tuple(scale.shape) for scale in load_file(file).values()} == {(2 if per_head else 1,)}
    with safe_open(file, framework="pt") as handle:
        assert handle.metadata()["fp8_max"] == "240.0" and handle.metadata()["calibration_tokens"] == "45"
    model = filled(config, folder, kv_dtype=torch.float8_e4m3fn)
    assert load_kv_scales(model, folder, ParallelGroups.single().tp, 0).num_loaded == 6

    for i, (layer, cache) in enumerate(zip(model.model.layers, samples.caches, strict=True)):
        attention = layer.self_attn.attn
        pairs = zip(
            (attention.k_scale, attention.v_scale), cache.chunk(2, -1), samples.peaks()[:, i], strict=True
        )
        for loaded, numbers, peak in pairs:
            lowest = peak if per_head else peak.max().expand(2)
            scale = (loaded * 448 / 240).view(2, 1, 1)  # as the file has it
            assert (scale.flatten() * 240 >= lowest * 0.999).all() and (
                scale.flatten() * 240 < 2 * lowest
            ).all()

            def error(scale, numbers=numbers):
                stored = (numbers / scale).clamp(-240, 240).to(torch.float8_e4m3fn).float()
                return (stored * scale - numbers).square().sum().item()

            for factor in (0.25, 2**-0.0625, 2**0.0625, 2**0.5, 64.0):
                if factor > 1 or (scale.flatten() * factor * 240 >= lowest).all():
                    assert error(scale) <= error(scale * factor) * 1.2
            assert error(scale) < error(scale * 64) and error(scale) < error(scale / 4)


def test_a_head_that_is_always_zero_gets_one(driver, tmp_path):
    config, folder = driver.llama_config(), tmp_path / "model"
    driver.write_checkpoint(config, folder)
    model = filled(config, folder)
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.weight[-8:] = 0.0  # the last value head
    scales = record(model, SEQUENCES).scales(per_head=True)
    assert scales["model.layers.0.self_attn.v_scale"][1] == 1.0
    assert scales["model.layers.0.self_attn.v_scale"][0] < 1.0


def test_models_that_cannot_be_calibrated_are_refused(driver, tmp_path):
    config, folder = driver.llama_config(), tmp_path / "model"
    driver.write_checkpoint(config, folder)
    with pytest.raises(ConfigError, match="at least one token"):
        record(filled(config, folder), [[]])
    with pytest.raises(ConfigError, match=r"kv_dtype=.*of the model's own dtype"):
        record(filled(config, folder, kv_dtype=torch.float8_e4m3fn), SEQUENCES)
    groups = ParallelGroups.describe(ParallelPlan(2))
    sharded = build_model(config, dtype=torch.float32, groups=groups, block_size=16)
    with pytest.raises(ConfigError, match="one rank"):
        record(sharded, SEQUENCES)
    with pytest.raises(ConfigError, match="needs a static model"):
        record(torch.nn.Linear(1, 1), SEQUENCES)
    model = filled(config, folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 0] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        record(model, SEQUENCES)
