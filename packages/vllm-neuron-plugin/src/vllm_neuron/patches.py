# SPDX-License-Identifier: Apache-2.0
"""The register of everything this plugin changes in vLLM from outside: what, why, and when it can go.

Each entry's ``apply`` may be called any number of times in a process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs

from neuron_core.environ import export
from vllm_neuron.forking import give_threads_back_before_fork

__all__ = ["PATCHES", "Patch", "apply_patches", "pin_model_runner", "quiet_accelerator_cache"]

MODEL_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


@dataclass(frozen=True)
class Patch:
    """One change of vLLM or of what it calls."""

    what: str
    why: str
    remove_when: str
    apply: Callable[[], None]


def pin_model_runner() -> None:
    """Set ``VLLM_USE_V2_MODEL_RUNNER=0`` unless the user has set it (1 is refused by the platform)."""
    if envs.VLLM_USE_V2_MODEL_RUNNER is None:
        export({MODEL_RUNNER_VARIABLE: "0"})


def quiet_accelerator_cache() -> None:
    """Make ``torch.accelerator``'s cache calls no-ops where torch has no accelerator."""
    if torch.accelerator.is_available():
        return
    for name in ("empty_cache", "empty_host_cache"):
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, _nothing_to_empty)


def _nothing_to_empty() -> None:
    return None


def _check_architectures_first() -> None:
    from vllm.model_executor.models.registry import _ModelRegistry

    from vllm_neuron.models import check_architectures

    original = _ModelRegistry.inspect_model_cls
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def inspect_model_cls(self: Any, architectures: str | list[str], model_config: Any) -> Any:
        check_architectures([architectures] if isinstance(architectures, str) else architectures)
        return original(self, architectures, model_config)

    _ModelRegistry.inspect_model_cls = inspect_model_cls


def _default_async_scheduling() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    original = EngineArgs.create_engine_config
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.async_scheduling is None:
            self.async_scheduling = current_platform.default_async_scheduling()
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _check_prompts() -> None:
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.prompt_admission import admit_embeds, check_tokens

    render, validate = BaseRenderer._process_embeds, InputProcessor._validate_model_input
    if hasattr(render, "__wrapped__"):
        return

    # Where a stream can still be answered with a status,
    @functools.wraps(render)
    def _process_embeds(self: Any, prompt: Any) -> Any:
        rendered = render(self, prompt)
        rendered["prompt_embeds"] = admit_embeds(rendered, self.model_config)
        return rendered

    # and where prompts that were rendered elsewhere come in.
    @functools.wraps(validate)
    def _validate_model_input(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        validate(self, prompt_input, prompt_type)
        if prompt_input["type"] == "embeds":
            prompt_input["prompt_embeds"] = admit_embeds(prompt_input, self.model_config)
        else:
            check_tokens(prompt_input["prompt_token_ids"], self.model_config)

    BaseRenderer._process_embeds = _process_embeds
    InputProcessor._validate_model_input = _validate_model_input


def _check_extra_args() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.admission import refuse_unread
    from vllm_neuron.runner.processors import has_custom_processors

    original = InputProcessor._build_logits_processors_params_validator
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _build_logits_processors_params_validator(self: Any) -> Callable[[Any], None]:
        validate: Callable[[Any], None] = original(self)
        if has_custom_processors(self.model_config):
            return validate
        return refuse_unread  # the other has no processor to ask

    InputProcessor._build_logits_processors_params_validator = _build_logits_processors_params_validator


def _check_payload_layout() -> None:
    from vllm.renderers import embed_utils

    from vllm_neuron.prompt_admission import check_layout

    original = embed_utils.safe_to_dense
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def safe_to_dense(tensor: Any, *, parameter: str) -> torch.Tensor:
        check_layout(tensor, parameter)
        dense: torch.Tensor = original(tensor, parameter=parameter)
        return dense

    embed_utils.safe_to_dense = safe_to_dense


def _check_request_forms() -> None:
    from pydantic import TypeAdapter
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.admission import check_utf8, settle
    from vllm_neuron.request_forms import MISREAD, as_validation_error, check_priority

    validate, process = TypeAdapter.validate_python, InputProcessor.process_inputs
    if hasattr(validate, "__wrapped__"):
        return

    @functools.wraps(validate)
    def validate_python(self: Any, value: Any, /, **settings: Any) -> Any:
        try:
            return validate(self, value, **settings)
        except MISREAD as error:
            refusal = as_validation_error(error, value)
            if refusal is None:
                raise
            raise refusal from error

    @functools.wraps(process)
    def process_inputs(
        self: Any,
        request_id: str,
        *args: Any,
        priority: int = 0,
        session_id: str | None = None,
        **kwargs: Any,
    ) -> Any:
        check_utf8(request_id, "request_id")
        check_utf8(session_id, "session_id")
        # Offline, a priority without that policy is documented to do nothing; only servers' AsyncLLM chooses a rank.
        policy = self.vllm_config.scheduler_config.policy if "data_parallel_rank" in kwargs else "priority"
        check_priority(priority, policy)
        request = process(self, request_id, *args, priority=priority, session_id=session_id, **kwargs)
        if request.sampling_params is not None:
            settle(request.sampling_params, self.vllm_config)
        return request

    setattr(TypeAdapter, "validate_python", validate_python)  # noqa: B010, mypy knows its overloads
    InputProcessor.process_inputs = process_inputs


def _keep_grammar_backends_apart() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_neuron.grammar_backends import backend_name, backends_of

    begin, create = StructuredOutputManager.grammar_init, StructuredOutputManager._create_grammar
    clear = StructuredOutputManager.clear_backend
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        held, name = backends_of(self), backend_name(request)
        with held.lock:
            self.backend = held.by_name.get(name)
            begin(self, request)
            held.by_name[name] = self.backend

    @functools.wraps(create)
    def _create_grammar(self: Any, request: Any) -> Any:
        return create(backends_of(self).bound(self, request), request)

    @functools.wraps(clear)
    def clear_backend(self: Any) -> None:
        last = self.backend
        clear(self)
        backends_of(self).destroy_others(last)

    StructuredOutputManager.grammar_init = grammar_init
    StructuredOutputManager._create_grammar = _create_grammar
    StructuredOutputManager.clear_backend = clear_backend


def _check_what_is_dropped() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_neuron.beam_admission import check_beam_search, check_watermark
    from vllm_neuron.request_forms import check_bias

    from_optional, resolve = SamplingParams.from_optional, InputProcessor.resolve_watermarking
    if hasattr(from_optional, "__wrapped__"):
        return

    @functools.wraps(from_optional)
    def checked(*args: Any, **settings: Any) -> Any:
        check_bias(settings.get("logit_bias"))
        return from_optional(*args, **settings)

    @functools.wraps(resolve)
    def resolve_watermarking(self: Any, params: Any) -> Any:
        check_watermark(params)
        return resolve(self, params)

    InputProcessor.resolve_watermarking = resolve_watermarking
    setattr(SamplingParams, "from_optional", staticmethod(checked))  # noqa: B010, mypy knows its signature
    for request in (ChatCompletionRequest, CompletionRequest):
        _check_beams_of(request, check_beam_search)


def _check_beams_of(request: Any, check: Callable[[Any], None]) -> None:
    original = request.to_beam_search_params

    @functools.wraps(original)
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        return original(self, *args, **kwargs)

    request.to_beam_search_params = to_beam_search_params


PATCHES = (
    Patch(
        what=f"the environment variable {MODEL_RUNNER_VARIABLE} is set to 0",
        why="the variable decides the scheduler's wire format; unset, vLLM picks by whether Triton is there",
        remove_when="the runner speaks the format of model runner V2",
        apply=pin_model_runner,
    ),
    Patch(
        what="OpenMP's threads are given back before a fork",
        why="vLLM forks EngineCore, and the child of a process that has computed on several threads waits for ever",
        remove_when="vLLM starts EngineCore by spawn on every platform",
        apply=give_threads_back_before_fork,
    ),
    Patch(
        what="torch.accelerator.empty_cache and empty_host_cache do nothing where torch has no accelerator",
        why="vLLM's shutdown calls them on every platform but its own CPU one, and they raise: the engine "
        "process exits with an error",
        remove_when="vllm.distributed.parallel_state.cleanup_dist_env_and_memory asks the platform",
        apply=quiet_accelerator_cache,
    ),
    Patch(
        what="vLLM's model registry refuses an architecture this plugin has no model for",
        why="vLLM would import its own implementation in a subprocess (17 s), then fail for want of kernels",
        remove_when="vLLM asks Platform.verify_model_arch before it inspects a model",
        apply=_check_architectures_first,
    ),
    Patch(
        what="EngineArgs takes the default of async_scheduling from the platform",
        why="by the time a platform hook sees the setting, vLLM's default and a user's choice look the same",
        remove_when="a platform hook runs before vLLM decides async_scheduling",
        apply=_default_async_scheduling,
    ),
    Patch(
        what="vLLM's renderers and InputProcessor check prompt embeddings and bring them into the model's type, and "
        "its InputProcessor refuses tokens that the model lacks",
        why="vLLM checks width and type in its HTTP front end alone and values nowhere, tokens against the tokenizer "
        "if that has more, and Platform.validate_request is not told which model a request is for",
        remove_when="vLLM checks embeddings and tokens of every front end, and keys cached blocks by where tokens are",
        apply=_check_prompts,
    ),
    Patch(
        what="vLLM's InputProcessor refuses extra_args in an engine without custom logits processors",
        why="nothing reads them there, and Platform.validate_request is not told which engine a request is for",
        remove_when="vLLM refuses them, or the hook is given the engine's configuration",
        apply=_check_extra_args,
    ),
    Patch(
        what="a payload of embeddings that holds a nested tensor or one without memory is refused",
        why="vLLM answers HTTP 500 or 501 to what is the client's mistake",
        remove_when="vllm.utils.sparse_utils.safe_to_dense refuses them",
        apply=_check_payload_layout,
    ),
    Patch(
        what="vLLM's requests refuse a logit_bias outside [-100, 100], and beam search what it does not read",
        why="vLLM clamps the one and drops the other, and answers as if all had been honoured",
        remove_when="vLLM refuses both",
        apply=_check_what_is_dropped,
    ),
    Patch(
        what="pydantic's TypeAdapter.validate_python refuses what a validator of vLLM's requests cannot read, and "
        "vLLM's InputProcessor what else it cannot send or nobody reads: priorities, names, bad words of no token",
        why="vLLM answers HTTP 500 to what is the client's mistake: its validators read fields before their types "
        "are checked, and neither names nor the header X-Vllm-Priority are held against any limits; and "
        "Platform.validate_request is told neither the priority, the engine's settings nor the tokens of bad words",
        remove_when="vLLM's validators of mode `before` check what they read, and InputProcessor all it sends",
        apply=_check_request_forms,
    ),
    Patch(
        what="vLLM's StructuredOutputManager keeps a backend for each name, and gives a grammar to its request's",
        why="with the backend left to vLLM, the first grammar of a server decides for all that follow: those that its "
        "backend does not take are HTTP 500 as long as the server lives",
        remove_when="vLLM's engine takes the backend that its front end chose for a request",
        apply=_keep_grammar_backends_apart,
    ),
)


def apply_patches() -> None:
    """Apply every entry of the register to this process."""
    for patch in PATCHES:
        patch.apply()
