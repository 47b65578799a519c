# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: what a grammar allows comes out and nothing else, and nobody else in the batch notices."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

LIMITS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_logprobs": -1,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 600,
    "additional_config": {"neuron_config": {"prefill_buckets": [128, 512], "decode_buckets": [1, 6, 16]}},
}
PROMPT = "Answer with one short line. "


def schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """A JSON schema every text of which is short, so that a model that draws at random comes to its end."""
    kinds = ["integer", "boolean", "null", "enum", "string", "const"] + ["object", "array"] * (depth > 0)
    kind = draw.choice(kinds)
    if kind == "integer":
        low = draw.randint(-99, 99)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 300)}
    if kind == "enum":
        return {"enum": draw.sample(["red", "Grün", 'qu"ote', 7, -1, True, None, "back\\slash"], 3)}
    if kind == "const":
        return {"const": draw.choice(["x y", 0, False])}
    if kind == "string":
        return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(2, 9)}
    if kind == "array":
        return {
            "type": "array",
            "items": schema(draw, depth - 1),
            "minItems": draw.randint(0, 1),
            "maxItems": draw.randint(1, 3),
        }
    if kind == "object":
        names = draw.sample(["id", "name", "größe", "is_on", "a b"], draw.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: schema(draw, depth - 1) for name in names},
            "required": names,
            "additionalProperties": False,
        }
    return {"type": kind}


def regex(draw: random.Random) -> str:
    """A regular expression that matches short texts alone."""
    atoms = [
        "[a-f]{2}",
        r"\d{1,4}",
        "(yes|no|perhaps)",
        "x?y",
        "[A-Z][a-z]{0,3}",
        "é",
        r"\.",
        "-",
        "(ab){1,2}",
    ]
    return "".join(draw.choice(atoms) for _ in range(draw.randint(1, 5)))


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, engines: Callable[..., Any], smollm2: Path) -> Any:
    # The grammar decides about white space too; without this a model may go on indenting for ever.
    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    return engines(smollm2, **LIMITS, structured_outputs_config=config, async_scheduling=request.param)


def constrained(engine: Any, kind: str, given: list[Any], seed: int, **sampling: Any) -> list[str]:
    """The texts of one request for each constraint, drawn at temperature 1."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = engine.llm.get_tokenizer()
    prompts = [tokenizer.encode(f"{PROMPT}{index}") for index in range(len(given))]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed + index,
            max_tokens=300,
            structured_outputs=StructuredOutputsParams(**{kind: one}),
            **sampling,
        )
        for index, one in enumerate(given)
    ]
    outputs = [output.outputs[0] for output in engine.run(prompts, params)]
    assert [output.finish_reason for output in outputs] == ["stop"] * len(given)
    return [output.text for output in outputs]


def check_schemas(engine: Any, count: int, seed: int) -> None:
    draw = random.Random(seed)
    schemas = [schema(draw) for _ in range(count)]
    for wanted, text in zip(schemas, constrained(engine, "json", schemas, seed), strict=True):
        jsonschema.validate(json.loads(text), wanted)


def check_regexes(engine: Any, count: int, seed: int) -> None:
    draw = random.Random(seed)
    patterns = [regex(draw) for _ in range(count)]
    for pattern, text in zip(patterns, constrained(engine, "regex", patterns, seed), strict=True):
        assert re.fullmatch(pattern, text), (pattern, text)


@pytest.mark.supports("structured outputs", model="llama")
def test_every_answer_is_of_its_schema(engine):
    check_schemas(engine, 16, seed=1)


def test_every_answer_matches_its_expression(engine):
    check_regexes(engine, 16, seed=2)


@pytest.mark.nightly
def test_three_hundred_schemas_and_a_hundred_expressions(engine):
    check_schemas(engine, 300, seed=3)
    check_regexes(engine, 100, seed=4)


def test_other_kinds_and_edited_logits_under_a_grammar(engine):
    choices = [["yes", "no"], ["ein", "eins"]]
    assert all(
        text in allowed
        for text, allowed in zip(constrained(engine, "choice", choices, seed=5), choices, strict=True)
    )
    grammar = ['root ::= "<" ("b" | "cc")+ ">"'] * 2
    for text in constrained(engine, "grammar", grammar, seed=6, repetition_penalty=1.3, logit_bias={5: 9.0}):
        assert re.fullmatch(r"<(b|cc)+>", text)


def test_neighbours_without_a_grammar_write_what_they_write_alone(engine):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = engine.llm.get_tokenizer()
    plain = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=7, max_tokens=24, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, seed=8, top_k=20, max_tokens=24, presence_penalty=0.5),
    ]
    prompts = [tokenizer.encode(text) for text in ("The sea is", "Once upon a time", "A list of birds:")]
    alone = [engine.tokens([prompt], params)[0] for prompt, params in zip(prompts, plain, strict=True)]
    bound = SamplingParams(temperature=1, seed=9, max_tokens=60)
    bound.structured_outputs = StructuredOutputsParams(json={"enum": ["left", "right"]})
    compiled = engine.graph_counts()
    everything = [(prompts[0], bound), *zip(prompts, plain, strict=True), (prompts[1], bound)]
    mixed = engine.tokens(
        [prompt for prompt, _ in everything], [params for _, params in everything], arrive=2
    )
    assert mixed[1:4] == alone
    assert engine.graph_counts() == compiled


def test_log_probabilities_are_of_what_the_grammar_leaves(engine):
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer = engine.llm.get_tokenizer()
    prompt = tokenizer.encode("Do you like rain? ")
    words = ["a", "b", "c"]
    first = [tokenizer.encode(word)[0] for word in words]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    whole = engine.run([prompt], free)[0].outputs[0].logprobs[0]
    params.structured_outputs = StructuredOutputsParams(choice=words)
    found = engine.run([prompt], params)[0].outputs[0].logprobs[0]
    expected = torch.tensor([whole[token].logprob for token in first]).log_softmax(0)
    assert [found[token].logprob for token in first] == pytest.approx(expected.tolist(), abs=1e-3)
    assert all(lp.logprob == float("-inf") for token, lp in found.items() if token not in first)


def test_others_run_while_a_grammar_is_compiled(engine, monkeypatch):
    """Case G2: a grammar that takes its time, first alone and then beside a request without one."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    constrained(engine, "choice", [["warm"]], seed=1)  # a backend is made with the first grammar
    backend = engine.core.structured_output_manager.backend
    compile_grammar = backend.compile_grammar
    wait = threading.Event()

    def slowly(*args: Any, **more: Any) -> Any:
        assert wait.wait(60)
        return compile_grammar(*args, **more)

    monkeypatch.setattr(backend, "compile_grammar", slowly)
    bound = SamplingParams(temperature=0, max_tokens=40)
    bound.structured_outputs = StructuredOutputsParams(json={"enum": ["slow", "late"]})
    tokenizer = engine.llm.get_tokenizer()
    slow = engine.add(tokenizer.encode(PROMPT), bound)
    for _ in range(5):
        assert not engine.step()  # nothing else to do
    free = engine.add(
        tokenizer.encode("The sea is"), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )
    finished: dict[str, Any] = {}
    while free not in finished:
        finished |= engine.step()
    assert slow not in finished
    wait.set()
    deadline = time.monotonic() + 60
    while slow not in finished:
        assert time.monotonic() < deadline
        finished |= engine.step()
    assert json.loads(finished[slow].outputs[0].text) in ("slow", "late")


FOR_ONE_BACKEND = [("json", {"enum": ["plum"]}), ("regex", "^(plum)$"), ("choice", ["plum"])]
"""What vLLM leaves to xgrammar, where it chooses."""
FOR_ANOTHER = [("json", {"type": "array", "items": [{"type": "string"}]}), ("regex", "^(|x)$")]
"""What xgrammar does not take."""


@pytest.mark.parametrize("turned", [False, True], ids=["one-first", "another-first"])
def test_no_grammar_decides_for_those_after_it(engines, smollm2, turned):
    """Case G4: with the backend left to vLLM, each grammar goes to a backend that takes it."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_neuron.grammar_backends import backends_of

    engine = engines(smollm2, **LIMITS)
    prompt = engine.llm.get_tokenizer().encode(PROMPT)
    plain = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    alone = engine.tokens([prompt], plain)
    both = [FOR_ANOTHER, FOR_ONE_BACKEND] if turned else [FOR_ONE_BACKEND, FOR_ANOTHER]
    for kind, given in [*both[0], *both[1], *both[0]]:
        bound = SamplingParams(temperature=0, max_tokens=40)
        bound.structured_outputs = StructuredOutputsParams(**{kind: given})
        (output,) = engine.run([prompt], [bound])
        text = output.outputs[0].text
        expected = {"json": ('"plum"',), "regex": ("plum",), "choice": ("plum",)}[kind]
        if given == FOR_ANOTHER[0][1]:  # without an end that a small model comes to
            assert text.lstrip().startswith("[")
        else:
            assert text in (("", "x") if given == FOR_ANOTHER[1][1] else expected)
    assert len(backends_of(engine.core.structured_output_manager).by_name) == 2
    assert engine.tokens([prompt], plain) == alone


@pytest.mark.parametrize(
    "backend",
    ["guidance", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("xgrammar", "outlines"))],
)
def test_every_backend_of_vllm(engines, smollm2, backend):
    engine = engines(smollm2, **LIMITS, structured_outputs_config={"backend": backend})
    wanted = {
        "type": "object",
        "properties": {"n": {"enum": [4, 7, 19]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    for text in constrained(engine, "json", [wanted] * 2, seed=11):
        assert json.loads(text)["n"] in (4, 7, 19)


def test_a_grammar_of_another_vocabulary_is_an_error():
    import numpy as np
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_neuron.runner.grammar import allowed_tokens
    from vllm_neuron.runner.requests import Request

    one = Request("a", 0, np.zeros(1, np.int32), None)
    two = replace(one, request_id="b")
    mask = np.array([[3, 4]], np.int32)
    found = allowed_tokens(GrammarOutput(["b"], mask), [one, two], 4, 33)
    assert found.tolist() == [[-1, -1], [3, 4], [-1, -1], [-1, -1]]
    assert allowed_tokens(None, [one], 4, 33) is None
    with pytest.raises(ValueError, match="vocabulary of 65"):
        allowed_tokens(GrammarOutput(["b"], mask), [one, two], 4, 65)
