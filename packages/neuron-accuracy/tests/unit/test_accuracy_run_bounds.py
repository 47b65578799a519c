# SPDX-License-Identifier: Apache-2.0
"""The long prompt that all levels share fits the subject that holds the fewest tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neuron_accuracy.run.triage import LONG_PROMPT, Roles, Triage


@pytest.mark.parametrize(("bound", "size"), [(None, LONG_PROMPT), (64, 52), (4096, LONG_PROMPT), (9, 1)])
def test_the_long_prompt_and_its_continuation_fit_the_subject(tmp_path, bound, size):
    def generate(prompts: list[Any], num_tokens: int, sampling: Any, top: int) -> list[Any]:
        return [SimpleNamespace(tokens=(1,) * num_tokens) for _ in prompts]

    subject: Any = SimpleNamespace(generate=generate)
    test: Any = SimpleNamespace(max_length=bound)
    prompts, tokens = Triage(Roles(test, subject), [[5, 6, 7]], tmp_path, num_tokens=12)._sequences()
    assert [len(prompt) for prompt in prompts] == [3, size, size]
    assert len(tokens) == 3
