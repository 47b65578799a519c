# SPDX-License-Identifier: Apache-2.0
"""vLLM knows our architectures by stubs it can inspect in place, also those another package adds."""

from __future__ import annotations

import subprocess
import time

import pytest
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces_base import is_text_generation_model

from neuron_models import registry
from vllm_neuron.models import StubModel, check_architectures, register_models, stub_class


@pytest.fixture
def private_registries(monkeypatch):
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_stub_passes_for_a_text_model(architecture):
    stub = stub_class(architecture)
    assert stub.__name__ == architecture and issubclass(stub, StubModel)
    assert is_text_generation_model(stub)


def test_stub_refuses_to_be_used():
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM stands for a model"):
        stub_class("LlamaForCausalLM")(vllm_config=None)


def test_inspection_starts_no_process(make_config, monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: pytest.fail("vLLM inspects a model in a subprocess")
    )
    make_config()
    begun = time.perf_counter()
    make_config()
    assert time.perf_counter() - begun < 2


def test_every_architecture_is_registered_and_registering_again_changes_nothing(make_config):
    make_config()
    before = {name: ModelRegistry.models[name] for name in registry.supported_architectures()}
    register_models()
    assert all(ModelRegistry.models[name] is model for name, model in before.items())


@pytest.mark.usefixtures("private_registries")
def test_architecture_of_another_package_is_served(tiny_llama, tmp_path):
    from transformers import LlamaConfig
    from vllm import EngineArgs

    registry.register("OutOfTreeForCausalLM", "neuron_models.llama:LlamaForCausalLM")
    config = LlamaConfig.from_pretrained(tiny_llama)
    config.architectures = ["OutOfTreeForCausalLM"]
    config.save_pretrained(tmp_path)
    made = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
    assert made.model_config.architecture == "OutOfTreeForCausalLM"


def test_first_supported_of_several_names_is_enough():
    check_architectures(["SomethingElse", "LlamaForCausalLM"])
