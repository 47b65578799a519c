# SPDX-License-Identifier: Apache-2.0
"""A step's output on its way to vLLM: read from the device by whoever asks for it."""

from __future__ import annotations

from typing import TypeVar

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from neuron_core.devices.stream import Execution
from neuron_core.profiling.timeline import Kind, timed
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.logprobs import Scores, drawn_logprobs
from vllm_neuron.runner.step import StepResult

T = TypeVar("T")


@timed("wait for the stream", Kind.WAIT)
def wait_for(execution: Execution[T]) -> T:
    """The result of a submitted step, once it has run; raises what it raised."""
    return execution.result()


class StepOutput(AsyncModelRunnerOutput):
    """The output of a submitted step.

    With asynchronous scheduling vLLM asks from a thread of its own (the engine's, or a worker's output thread), so
    that copying tokens and computing log-probabilities does not keep the next step from being submitted.
    """

    def __init__(self, batch: Batch, execution: Execution[StepResult], scores: Scores) -> None:
        self._batch = batch
        self._execution = execution
        self._scores = scores

    @timed("output", Kind.OUTPUT)
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and read it; raises what the step raised."""
        result = wait_for(self._execution)
        batch = self._batch
        tokens = result.tokens.cpu()
        logprobs = None
        if result.logits is not None:
            logprobs = drawn_logprobs(result.logits, tokens, batch.requests, self._scores)
        ids = [request.request_id for request in batch.requests]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[
                [token] if draws else [] for token, draws in zip(tokens.tolist(), batch.draws, strict=False)
            ],
            logprobs=logprobs,
            prompt_logprobs_dict=result.prompt_logprobs,
        )
