# SPDX-License-Identifier: Apache-2.0
"""Upstream drift: the signature of every vLLM symbol the plugin overrides, imports or calls is as recorded.

A failure names the symbols. Read what changed, adapt, then re-record with ``tests/record.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORD = Path(__file__).parent / "vllm_signatures.json"
SOURCE = Path(importlib.import_module("vllm_neuron").__file__).parent

OVERRIDES = {
    "vllm_neuron.platform.NeuronPlatform": "vllm.platforms.interface.Platform",
    "vllm_neuron.scheduler.NeuronScheduler": "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
    "vllm_neuron.attention.NeuronAttentionBackend": "vllm.v1.attention.backend.AttentionBackend",
    "vllm_neuron.worker.NeuronWorker": "vllm.v1.worker.worker_base.WorkerBase",
}

CALLED = (
    "vllm.engine.arg_utils.EngineArgs.create_engine_config",
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest.to_beam_search_params",
    "vllm.entrypoints.openai.completion.protocol.CompletionRequest.to_beam_search_params",
    "vllm.model_executor.models.registry._ModelRegistry.inspect_model_cls",
    "vllm.model_executor.models.registry._ModelRegistry.register_model",
    "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots",
    "vllm.v1.core.sched.output.CachedRequestData",
    "vllm.v1.core.sched.output.NewRequestData",
    "vllm.v1.core.sched.scheduler.Scheduler._handle_blocked_waiting_request",
    "vllm.v1.core.sched.scheduler.Scheduler._preempt_request",
    "vllm.v1.core.sched.scheduler.Scheduler.__init__",
    "vllm.renderers.base.BaseRenderer._process_embeds",
    "vllm.renderers.embed_utils.safe_to_dense",
    "vllm.sampling_params.SamplingParams.from_optional",
    "vllm.v1.engine.input_processor.InputProcessor._validate_model_input",
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
    "vllm.v1.engine.input_processor.InputProcessor.resolve_watermarking",
    "vllm.v1.executor.abstract.Executor.collective_rpc",
)

SCHEDULER_ATTRIBUTES = {
    "running": "list",
    "waiting": "FCFSRequestQueue",
    "kv_holding_waiting": "FCFSRequestQueue",
    "num_waiting_for_streaming_input": "int",
    "max_num_active_reqs": "int",
    "max_num_scheduled_tokens": "int",
    "prefill_capacity_bound": "bool",
    "_pause_state": "PauseState",
    "kv_cache_manager": "KVCacheManager",
}


def signatures() -> dict[str, str]:
    """Symbol -> signature, of the installed vLLM."""
    names = sorted({*CALLED, *_overridden(), *_imported()})
    return {name: _describe(_resolve(name)) for name in names}


def _overridden() -> Iterator[str]:
    for ours, theirs in OVERRIDES.items():
        base = _resolve(theirs)
        for name in vars(_resolve(ours)):
            ours_only = (name.startswith("__") and name != "__init__") or name == "_abc_impl"
            if not ours_only and hasattr(base, name):
                yield f"{theirs}.{name}"


def _imported() -> Iterator[str]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _resolve(name: str) -> object:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = (
                getattr(found, part, None)
                if not inspect.isclass(found)
                else inspect.getattr_static(found, part, None)
            )
        return found
    return None


def _describe(found: object) -> str:
    if found is None:
        return "missing"
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    found = inspect.unwrap(found) if callable(found) else found
    if inspect.ismodule(found):
        return "module"
    if inspect.isclass(found):
        return _describe_class(found)
    if inspect.isfunction(found):
        return _plain(str(inspect.signature(found)))
    return type(found).__name__


def _describe_class(found: type) -> str:
    if issubclass(found, enum.Enum):
        return "enum " + ", ".join(found.__members__)
    if dataclasses.is_dataclass(found):
        return "fields " + ", ".join(field.name for field in dataclasses.fields(found))
    for listed in ("__struct_fields__", "_fields"):
        if hasattr(found, listed):
            return "fields " + ", ".join(getattr(found, listed))
    return _plain("class " + str(inspect.signature(found.__init__)))


def _plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def test_no_symbol_has_changed():
    recorded, installed = json.loads(RECORD.read_text()), signatures()
    changed = {
        name: f"\n  {name}\n    recorded:  {recorded.get(name)}\n    installed: {installed.get(name)}"
        for name in recorded.keys() | installed.keys()
        if recorded.get(name) != installed.get(name)
    }
    if changed:
        pytest.fail(
            "vLLM symbols differ from those recorded:" + "".join(changed[name] for name in sorted(changed))
        )


def test_every_recorded_symbol_exists():
    missing = [name for name, text in json.loads(RECORD.read_text()).items() if text == "missing"]
    assert not missing


def test_a_changed_signature_is_reported_with_its_name(monkeypatch):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    monkeypatch.setattr(AsyncScheduler, "schedule", lambda self, throttle_prefills, something_new: None)
    with pytest.raises(pytest.fail.Exception, match=r"AsyncScheduler\.schedule"):
        test_no_symbol_has_changed()


def test_scheduler_attributes_are_as_known(make_scheduler):
    scheduler = make_scheduler().scheduler
    assert {
        name: type(getattr(scheduler, name)).__name__ for name in SCHEDULER_ATTRIBUTES
    } == SCHEDULER_ATTRIBUTES
