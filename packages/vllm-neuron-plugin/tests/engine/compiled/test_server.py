# SPDX-License-Identifier: Apache-2.0
"""One real ``vllm serve`` on the CPU device, asked through the ``openai`` client."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.supports("chat completions", model="llama")
def test_chat_knows_the_capital(server):
    reply = server.client.chat.completions.create(
        model=server.name, messages=FRANCE, temperature=0, max_tokens=24
    )
    assert "Paris" in reply.choices[0].message.content
    assert reply.usage.completion_tokens <= 24 and reply.usage.prompt_tokens > 5


@pytest.mark.supports("streaming", model="llama")
def test_streamed_pieces_are_the_whole(server):
    settings = {"model": server.name, "messages": FRANCE, "temperature": 0, "max_tokens": 24}
    whole = server.client.chat.completions.create(**settings).choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content
        for chunk in server.client.chat.completions.create(**settings, stream=True)
    ]
    assert len(pieces) > 3 and "".join(piece or "" for piece in pieces) == whole


def test_n_completions_with_a_seed_are_repeatable(server):
    settings = {"model": server.name, "prompt": "My favourite animal is", "n": 3, "seed": 5, "max_tokens": 12}
    once, again = ([c.text for c in server.client.completions.create(**settings).choices] for _ in range(2))
    assert once == again and len(set(once)) == 3


@pytest.mark.supports("stop strings", model="llama")
def test_a_stop_string_ends_the_text_before_it(server):
    settings = {"model": server.name, "prompt": "Count: one, two, three,", "temperature": 0, "max_tokens": 40}
    whole = server.client.completions.create(**settings).choices[0].text
    stop = whole.split()[3]
    choice = server.client.completions.create(**settings, stop=[stop]).choices[0]
    assert choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop"


def test_logprobs_of_greedy_tokens_are_the_largest(server):
    choice = server.client.chat.completions.create(
        model=server.name, messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    ).choices[0]
    assert len(choice.logprobs.content) == 5
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs) <= 0.0


def test_a_prompt_longer_than_the_limit_is_http_400(server):
    with pytest.raises(openai.BadRequestError, match="256"):
        server.client.completions.create(model=server.name, prompt=[9] * 300, max_tokens=1)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("kv_transfer_params", {"kv_transfer_params": {"do_remote_decode": True}}),
        ("regex", {"structured_outputs": {"regex": "(never closed"}}),
        ("no such type", {"structured_outputs": {"json": {"type": "no such type"}}}),
        ("Choice", {"structured_outputs": {"choice": []}}),
        ("check_structured_outputs_count", {"structured_outputs": 0.5}),
        ("check_system_message_content_type", {"messages": 7}),
        ("priority", {"priority": 2**63}),
        ("--scheduling-policy priority", {"priority": 7}),
        ("whitespace_pattern", {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}),
        ("structured_outputs", {"structured_outputs": {"choice": ["x"]}, "use_beam_search": True, "n": 2}),
        ("repetition_penalty", {"repetition_penalty": 1e-40}),
        ("logit_bias", {"logit_bias": {"7": 1000}}),
    ],
)
def test_what_cannot_be_honoured_is_http_400_by_name(server, name, body):
    with pytest.raises(openai.BadRequestError, match=name):
        server.client.chat.completions.create(
            model=server.name, messages=FRANCE, max_tokens=4, extra_body=body
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["\ud800"]),
        ("bad_words", ["\ud800"]),
        ("request_id", "\ud800"),
        ("session_id", "\ud800"),
        ("structured_outputs", {"json": {"type": "integer", "maximum": 10**30}}),
        ("repetition_detection", {"max_pattern_size": 2**64, "min_pattern_size": 1, "min_count": 2}),
    ],
)
def test_what_cannot_be_sent_to_the_engine_is_http_400_by_name(server, name, value):
    body = {"model": server.name, "prompt": "a", "max_tokens": 1, name: value}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 400
    assert name in json.load(caught.value)["error"]["message"]


def test_a_priority_of_the_header_is_held_against_its_limits(server):
    def ask(priority: int):
        return server.client.completions.create(
            model=server.name, prompt=[9], max_tokens=1, extra_headers={"X-Vllm-Priority": str(priority)}
        )

    assert ask(0).choices
    for priority, said in ((1, "--scheduling-policy priority"), (2**63, "9223372036854775808")):
        with pytest.raises(openai.BadRequestError, match=said):
            ask(priority)


def test_a_form_that_no_handler_reads_is_http_400(server):
    body = {"model": server.name, "prompt": "a", "structured_outputs": 0.5}
    with pytest.raises(openai.BadRequestError, match="CompletionRequest"):
        server.client.with_options(base_url=server.url).post("/invocations", body=body, cast_to=object)


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
# As with OpenAI, only the arguments of a strict tool are held to its schema.
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": CITY, "strict": True},
    }
    for name in ("forecast", "museums")
]


def is_of_city(arguments: str) -> bool:
    found = json.loads(arguments)
    return found.keys() == {"city", "days"} and found["city"] in ("Paris", "Rome") and found["days"] in (1, 2)


@pytest.mark.supports("structured outputs", model="llama")
def test_an_answer_is_of_its_json_schema(server):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    choice = (
        server.client.chat.completions.create(
            model=server.name, messages=FRANCE, temperature=1, seed=3, max_tokens=60, response_format=form
        )
    ).choices[0]
    assert choice.finish_reason == "stop" and is_of_city(choice.message.content)


@pytest.mark.supports("tool calls", model="llama")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["named", "required"])
def test_a_tool_is_called_with_its_arguments(server, choice, stream):
    named = {"type": "function", "function": {"name": "museums"}}
    settings = {
        "model": server.name,
        "messages": [{"role": "user", "content": "Two days in Rome, please."}],
        "tools": TOOLS,
        "tool_choice": named if choice == "named" else "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    answer = server.client.chat.completions.create(**settings, stream=stream)
    if stream:
        pieces = [call.function for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        name = "".join(piece.name or "" for piece in pieces)
        arguments = "".join(piece.arguments or "" for piece in pieces)
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert is_of_city(arguments)
    assert name == "museums" if choice == "named" else name in ("forecast", "museums")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_that_need_not_be_called(server, choice):
    message = (
        server.client.chat.completions.create(
            model=server.name,
            messages=FRANCE,
            tools=TOOLS[:1],
            tool_choice=choice,
            temperature=0,
            max_tokens=24,
        )
        .choices[0]
        .message
    )
    assert message.content or (choice == "auto" and message.tool_calls)


def counters(server: Any) -> dict[str, float]:
    """Every series of the metrics page that may only rise."""
    page = urllib.request.urlopen(f"{server.url}/metrics", timeout=30).read().decode()
    rising = re.findall(r"^(\S+_(?:total|count|sum)(?:\{[^}]*\})?) (\S+)$", page, re.MULTILINE)
    return {name: float(value) for name, value in rising}


def test_fifty_clients_of_whom_some_leave(server):
    draw = random.Random(50)
    prompts = [
        f"{start} {word}" for start in ("A story of", "The list:") for word in ("cats", "rain", "iron")
    ]
    settings = {"model": server.name, "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    alone = {p: server.client.completions.create(prompt=p, **settings).choices[0].text for p in prompts}
    clients = [
        (draw.choice(prompts), draw.choice([None, draw.randint(0, 20)]), draw.uniform(0, 2))
        for _ in range(50)
    ]

    def ask(prompt: str, leaves_after: int | None, delay: float) -> tuple[str, str, bool]:
        time.sleep(delay)
        text = ""
        with server.client.completions.create(prompt=prompt, stream=True, **settings) as stream:
            for index, chunk in enumerate(stream):
                if index == leaves_after:
                    return prompt, text, False
                text += chunk.choices[0].text
        return prompt, text, True

    before = seen = counters(server)
    with ThreadPoolExecutor(len(clients)) as pool:
        asked = [pool.submit(ask, *client) for client in clients]
        while not all(each.done() for each in asked):
            now = counters(server)
            assert all(now[name] >= value for name, value in seen.items())
            seen = now
            time.sleep(0.1)
    answers = [each.result() for each in asked]
    stayed = [answer for answer in answers if answer[2]]
    assert 10 < len(stayed) < 45
    for prompt, text, to_the_end in answers:
        assert text == alone[prompt] if to_the_end else alone[prompt].startswith(text)
    deadline = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") or server.metric("vllm:num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while server.metric("vllm_neuron:kv_blocks_free") != server.metric("vllm_neuron:kv_blocks_total"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    after = counters(server)
    rose = {name: after[name] - before.get(name, 0.0) for name in after}
    finished = {name: value for name, value in rose.items() if name.startswith("vllm:request_success_total")}
    assert sum(value for name, value in finished.items() if 'finished_reason="length"' in name) >= len(stayed)
    assert sum(finished.values()) <= len(clients)
    hits, queries = (
        sum(value for name, value in rose.items() if name.startswith(f"vllm:prefix_cache_{kind}_total"))
        for kind in ("hits", "queries")
    )
    assert 0 <= hits <= queries


@pytest.mark.supports("abort", model="llama")
def test_a_stream_closed_midway_gives_its_blocks_back(server):
    settings = {
        "model": server.name,
        "prompt": "Once upon a time",
        "max_tokens": 240,
        "extra_body": {"ignore_eos": True},
    }
    stream = server.client.completions.create(**settings, stream=True)
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    deadline = time.monotonic() + 30
    while server.metric("vllm:num_requests_running") + server.metric("vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline, "the request goes on after its client left"
        time.sleep(0.2)
    assert server.metric("vllm:request_success_total") > 0


@pytest.mark.supports("metrics", model="llama")
def test_metrics_of_the_plugin_are_on_the_servers_page(server):
    server.client.completions.create(model=server.name, prompt="Hello", max_tokens=2, temperature=0)
    ready = server.graphs()
    assert ready > 0 and server.metric("vllm_neuron:graph_executions_total") > 0
    server.client.completions.create(
        model=server.name, prompt="Hello again", max_tokens=2, temperature=0.7, logprobs=1
    )
    assert server.graphs() == ready
    assert server.metric("vllm_neuron:device_memory_bytes") > server.metric(
        "vllm_neuron:model_load_size_bytes"
    )
    found = [server.metric(f"vllm_neuron:compile_cache_{kind}_total") for kind in ("hits", "misses")]
    assert sum(found) > 0
    assert (
        server.metric("vllm_neuron:startup_time_seconds")
        > server.metric("vllm_neuron:model_load_time_seconds")
        > 0
    )
    deadline = time.monotonic() + 30
    while server.metric("vllm_neuron:kv_blocks_free") < server.metric("vllm_neuron:kv_blocks_total"):
        assert time.monotonic() < deadline, "blocks are held though no request runs"
        time.sleep(0.2)


def test_vllm_bench_serve_runs_against_it(server, tmp_path):
    # fmt: off
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai",
        "--endpoint", "/v1/completions", "--base-url", server.url, "--model", server.name,
        "--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "8",
        "--num-prompts", "6", "--ignore-eos",
    ]
    # fmt: on
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=server.environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Successful requests:\s+6\b", done.stdout), done.stdout[-2000:]
