# SPDX-License-Identifier: Apache-2.0
"""The register of patches is complete, says why, and can be applied again."""

from __future__ import annotations

import ast
from pathlib import Path

from pydantic import TypeAdapter
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.model_executor.models.registry import _ModelRegistry
from vllm.renderers import embed_utils
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.structured_output import StructuredOutputManager

import vllm_neuron
from vllm_neuron.patches import PATCHES, apply_patches


def test_each_entry_says_what_why_and_until_when():
    for patch in PATCHES:
        assert patch.what and patch.why and patch.remove_when


def _patched() -> tuple[object, ...]:
    return (
        EngineArgs.create_engine_config,
        _ModelRegistry.inspect_model_cls,
        InputProcessor._validate_model_input,
        InputProcessor._build_logits_processors_params_validator,
        BaseRenderer._process_embeds,
        embed_utils.safe_to_dense,
        TypeAdapter.validate_python,
        InputProcessor.process_inputs,
        InputProcessor.resolve_watermarking,
        SamplingParams.from_optional,
        ChatCompletionRequest.to_beam_search_params,
        CompletionRequest.to_beam_search_params,
        StructuredOutputManager.grammar_init,
        StructuredOutputManager._create_grammar,
        StructuredOutputManager.clear_backend,
    )


def test_applying_twice_wraps_once():
    apply_patches()
    before = _patched()
    apply_patches()
    assert before == _patched()
    assert not hasattr(EngineArgs.create_engine_config.__wrapped__, "__wrapped__")


def test_nothing_outside_the_register_writes_into_vllm_or_torch():
    # An assignment to an attribute of an imported name, anywhere but in the register.
    found = []
    for path in Path(vllm_neuron.__file__).parent.rglob("*.py"):
        if path.parent.name == "patches":
            continue
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            found += [
                f"{path.name}:{target.lineno}"
                for target in targets
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id in imported
            ]
    assert found == []
