# SPDX-License-Identifier: Apache-2.0
"""The register of everything this plugin changes in vLLM from outside: what, why, and when it can go.

Each entry's ``apply`` may be called any number of times in a process.
"""

from __future__ import annotations

from vllm_neuron.forking import give_threads_back_before_fork
from vllm_neuron.patches.grammars import keep_grammar_backends_apart
from vllm_neuron.patches.patch import Patch
from vllm_neuron.patches.process import MODEL_RUNNER_VARIABLE, pin_model_runner, quiet_accelerator_cache
from vllm_neuron.patches.requests import (
    check_extra_args,
    check_payload_layout,
    check_prompts,
    check_request_forms,
    check_what_is_dropped,
)
from vllm_neuron.patches.start import check_architectures_first, default_async_scheduling

__all__ = [
    "MODEL_RUNNER_VARIABLE",
    "PATCHES",
    "Patch",
    "apply_patches",
    "pin_model_runner",
    "quiet_accelerator_cache",
]

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
        apply=check_architectures_first,
    ),
    Patch(
        what="EngineArgs takes the default of async_scheduling from the platform",
        why="by the time a platform hook sees the setting, vLLM's default and a user's choice look the same",
        remove_when="a platform hook runs before vLLM decides async_scheduling",
        apply=default_async_scheduling,
    ),
    Patch(
        what="vLLM's renderers and InputProcessor check prompt embeddings and bring them into the model's type, and "
        "its InputProcessor refuses tokens that the model lacks",
        why="vLLM checks width and type in its HTTP front end alone and values nowhere, tokens against the tokenizer "
        "if that has more, and Platform.validate_request is not told which model a request is for",
        remove_when="vLLM checks embeddings and tokens of every front end, and keys cached blocks by where tokens are",
        apply=check_prompts,
    ),
    Patch(
        what="vLLM's InputProcessor refuses extra_args in an engine without custom logits processors",
        why="nothing reads them there, and Platform.validate_request is not told which engine a request is for",
        remove_when="vLLM refuses them, or the hook is given the engine's configuration",
        apply=check_extra_args,
    ),
    Patch(
        what="a payload of embeddings that holds a nested tensor or one without memory is refused",
        why="vLLM answers HTTP 500 or 501 to what is the client's mistake",
        remove_when="vllm.utils.sparse_utils.safe_to_dense refuses them",
        apply=check_payload_layout,
    ),
    Patch(
        what="vLLM's requests refuse a logit_bias outside [-100, 100], and beam search what it does not read",
        why="vLLM clamps the one and drops the other, and answers as if all had been honoured",
        remove_when="vLLM refuses both",
        apply=check_what_is_dropped,
    ),
    Patch(
        what="pydantic's TypeAdapter.validate_python refuses what a validator of vLLM's requests cannot read, and "
        "vLLM's InputProcessor what else it cannot send or nobody reads: priorities, names, bad words of no token",
        why="vLLM answers HTTP 500 to what is the client's mistake: its validators read fields before their types "
        "are checked, and neither names nor the header X-Vllm-Priority are held against any limits; and "
        "Platform.validate_request is told neither the priority, the engine's settings nor the tokens of bad words",
        remove_when="vLLM's validators of mode `before` check what they read, and InputProcessor all it sends",
        apply=check_request_forms,
    ),
    Patch(
        what="vLLM's StructuredOutputManager keeps a backend for each name, and gives a grammar to its request's",
        why="with the backend left to vLLM, the first grammar of a server decides for all that follow: those that its "
        "backend does not take are HTTP 500 as long as the server lives",
        remove_when="vLLM's engine takes the backend that its front end chose for a request",
        apply=keep_grammar_backends_apart,
    ),
)


def apply_patches() -> None:
    """Apply every entry of the register to this process."""
    for patch in PATCHES:
        patch.apply()
