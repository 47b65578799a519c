# SPDX-License-Identifier: Apache-2.0
"""Custom logits processors of vLLM's interface: who is in which place, what was drawn, and who may pass arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class Placed(LogitsProcessor):
    """Follows vLLM's updates to the letter, with something of its own per request that only moves keep."""

    def __init__(self, *_: Any) -> None:
        self.places: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update:
            for place in batch_update.removed:
                self.places.pop(place, None)
            for place, params, _, output in batch_update.added:
                self.places[place] = (params, output, list(output))
            for a, b, direction in batch_update.moved:
                one, other = self.places.pop(a, None), self.places.pop(b, None)
                self.places[b] = one
                if direction is MoveDirectionality.SWAP:
                    self.places[a] = other
            assert sorted(self.places) == list(range(batch_update.batch_size))

    def wanted(self, key: str):
        for place, (params, output, own) in self.places.items():
            value = (params.extra_args or {}).get(key)
            if value is not None:
                yield place, value, output, own


class Counting(Placed):
    """Draws ``count_from``, then one more each time; keeps what it left to be drawn, which must be what was."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        first = (sampling_params.extra_args or {}).get("count_from")
        if first is not None and not isinstance(first, int):
            raise ValueError("count_from must be a number")

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(self.places)
        for place, first, output, own in self.wanted("count_from"):
            assert own == output, "another request's place, or its tokens did not grow"
            own.append(first + len(output))
            logits[place] = float("-inf")
            logits[place, own[-1]] = 0.0
        return logits


class Peaked(Placed):
    """Leaves the likeliest token alone where ``peaked`` is asked for."""

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for place, *_ in self.wanted("peaked"):
            logits[place, logits[place] < logits[place].max()] = float("-inf")
        return logits


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request, engines, tiny_llama: Path, tiny_settings: dict[str, Any]) -> Any:
    settings = tiny_settings | {"async_scheduling": request.param, "logits_processors": [Counting, Peaked]}
    return engines(tiny_llama, **settings)


@pytest.mark.supports("custom logits processors", model="llama")
def test_each_request_is_processed_by_its_own_arguments_in_any_batch(
    engine, make_prompts, continuations, tiny_llama
):
    prompts = make_prompts(9, 60, seed=41)
    plain = continuations(tiny_llama, prompts, 12)
    params, expected = [], []
    for index, text in enumerate(plain):
        settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4 + index, "ignore_eos": True}
        if index % 3 == 1:
            settings["extra_args"] = {"count_from": 20 * index}
            text = [20 * index + place for place in range(12)]
        elif index % 3 == 2:
            settings |= {"temperature": 1.7, "seed": index, "extra_args": {"peaked": True}}
        params.append(SamplingParams(**settings))
        expected.append(text[: 4 + index])
    assert engine.tokens(prompts, params) == expected
    assert engine.tokens(prompts[::-1], params[::-1], arrive=2)[::-1] == expected


def test_a_processor_judges_its_arguments(engine):
    with pytest.raises(VLLMValidationError, match="count_from must be a number"):
        engine.add([5, 6], SamplingParams(extra_args={"count_from": "x"}))


def test_an_engine_without_processors_refuses_arguments_for_one(engines, tiny_llama, tiny_settings):
    engine = engines(tiny_llama, **tiny_settings)
    with pytest.raises(VLLMValidationError, match=r"parameter=extra_args\.count_from"):
        engine.add([5, 6], SamplingParams(extra_args={"count_from": 5}))
