# SPDX-License-Identifier: Apache-2.0
"""What ``neuron calibrate`` writes is what an engine with an FP8 cache then multiplies by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from neuron_core.cli.main import neuron

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "fp8",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 20,
}
BUCKETS = {"compiler": "fx", "prefill_buckets": [64], "decode_buckets": [2]}
PROMPT = [5, 17, 99, 3, 42, 8, 61, 200, 11, 12]


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with keys and values too small for E4M3, and queries and outputs that make up for it."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("calibrated") / "model"))
    factors = {"q_proj": 2.0**14, "k_proj": 2.0**-14, "v_proj": 2.0**-14, "o_proj": 2.0**14}
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor * factors.get(name.split(".")[-2], 1.0) for name, tensor in tensors.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def calibrate(model: Path, *options: str) -> dict[str, Any]:
    texts = model.parent / "texts.txt"
    texts.write_text((Path(__file__).parent / "golden_text.txt").read_text()[:400])
    # As a process of its own does, it reads the settings of the environment: those of the tests.
    done = CliRunner().invoke(neuron, ["calibrate", str(model), "--texts", str(texts), "--json", *options])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def scales_of(engine: Any) -> dict[str, torch.Tensor]:
    """The scales that the engine's graphs get, by name; float32 ``[kv_heads]``."""
    worker = engine.core.model_executor.driver_worker.worker
    return {
        f"{name.removesuffix('.attn')}.{kind}_scale": getattr(module, f"{kind}_scale")
        for name, module in worker.get_model().named_modules()
        if name.endswith("self_attn.attn")
        for kind in "kv"
    }


def start(engines: Any, model: Path, **more: Any) -> Any:
    extra = {"neuron_config": BUCKETS | more}
    return engines(model, **SETTINGS, additional_config=extra)


def exact_log_probs(model: Path) -> torch.Tensor:
    """transformers' log-probability of each token of the prompt but the first, in fp32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        each = reference(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return each.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def prompt_log_probs(engine: Any) -> torch.Tensor:
    (output,) = engine.run([PROMPT], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    pairs = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs])


@pytest.mark.nightly
def test_an_engine_loads_the_file_by_itself_or_by_name_and_answers_nearer(engines, model):
    unscaled = start(engines, model)
    assert all(bool((scale == 1.0).all()) for scale in scales_of(unscaled).values())
    exact = exact_log_probs(model)
    without = (prompt_log_probs(unscaled) - exact).abs().mean()

    elsewhere = model.parent / "heads.safetensors"
    named = calibrate(model, "--per-head", "--output", str(elsewhere))
    own = calibrate(model)
    assert own["file"] == str(model / "kv_scales.safetensors") and "kv_scales" not in own["serve"]
    by_itself = start(engines, model, prefill_buckets=[48, 64])
    by_name = start(engines, model, kv_scales=str(elsewhere))
    for engine, report in ((by_itself, own), (by_name, named)):
        file, loaded = load_file(report["file"]), scales_of(engine)
        assert file.keys() == loaded.keys() and len(file) == 4
        for name, scale in loaded.items():
            torch.testing.assert_close(scale, file[name].expand(2), rtol=1e-6, atol=0.0)
        assert (prompt_log_probs(engine) - exact).abs().mean() < 0.2 * without
    given = json.loads(named["serve"].partition("--additional-config ")[2].strip("'"))
    assert given == {"neuron_config": {"kv_scales": str(elsewhere)}}
