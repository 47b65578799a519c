# SPDX-License-Identifier: Apache-2.0
"""Answers of a server that are not what the API says: an error that names the server and what it said."""

from __future__ import annotations

import copy

import pytest
import torch

from neuron_accuracy.errors import SubjectError
from neuron_accuracy.subjects.server_scores import completion_rows, prompt_rows

URL = "http://server/v1"
GOOD = {
    "logprobs": {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:7": -2.0}, {"token_id:6": -1.0, "token_id:5": None}],
    },
    "prompt_logprobs": [None, {"5": {"logprob": -0.5}, "7": {"logprob": None}}],
}


def name(token):
    return int(token.removeprefix("token_id:"))


def read(choice):
    return completion_rows(choice, name, URL), prompt_rows(choice, URL)


def test_a_right_answer_is_read():
    (tokens, rows), of_prompt = read(GOOD)
    assert tokens == [5, 6]
    assert rows[0] == {5: -0.5, 7: -2.0} and torch.tensor(rows[1][5]).isnan()
    assert of_prompt[0] == {} and of_prompt[1][5] == -0.5 and torch.tensor(of_prompt[1][7]).isnan()


def changed(*path, value=None, gone=False):
    """The right answer with what is at the path another value, or gone."""
    choice = copy.deepcopy(GOOD)
    holder = choice
    for step in path[:-1]:
        holder = holder[step]
    if gone:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return choice


@pytest.mark.parametrize(
    "choice",
    [
        changed("logprobs", "token_logprobs", gone=True),
        changed("logprobs", "token_logprobs", value=None),
        changed("logprobs", "token_logprobs", value=[-0.5]),
        changed("logprobs", "token_logprobs", 1, value="x"),
        changed("logprobs", "token_logprobs", 1, value=[1]),
        changed("logprobs", "token_logprobs", 1, value=10**400),
        changed("logprobs", "top_logprobs", value=[{"token_id:5": -0.5}]),
        changed("logprobs", "top_logprobs", 0, value=["token_id:5"]),
        changed("logprobs", "top_logprobs", 0, value={"token_id:x": -0.5}),
        changed("logprobs", "top_logprobs", 0, value={"token_id:5": {}}),
        changed("logprobs", "tokens", 0, value="token_id:x"),
        changed("logprobs", "tokens", 0, value="token_id:-1"),
        changed("logprobs", "tokens", 0, value=f"token_id:{2**70}"),
        changed("logprobs", "tokens", 0, value=None),
        changed("logprobs", value=[1]),
        changed("prompt_logprobs", value=5),
        changed("prompt_logprobs", 1, value=[1]),
        changed("prompt_logprobs", 1, value={"x": {"logprob": -0.5}}),
        changed("prompt_logprobs", 1, value={"5": -0.5}),
        changed("prompt_logprobs", 1, value={"5": {}}),
        changed("prompt_logprobs", 1, value={"5": {"logprob": "x"}}),
    ],
)
def test_an_answer_of_another_form_is_an_error(choice):
    with pytest.raises(
        SubjectError, match=r"^http://server/v1: its (prompt_)?logprobs cannot be read .* works$"
    ):
        read(choice)
