# SPDX-License-Identifier: Apache-2.0
"""``vllm-neuron config``: given and effective values, who changed them, refusals, and nothing else on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import ValidationError

from vllm_neuron.cli.arguments import ServeArguments, engine_config, reasons
from vllm_neuron.cli.config_report import report
from vllm_neuron.cli.resolve import Flag, Resolved, resolve
from vllm_neuron.config import bucket_plan


def resolved(model: Path, *words: str) -> Resolved:
    return resolve(ServeArguments.parse(str(model), words))


def flags_of(found: Resolved) -> dict[str, Flag]:
    return {flag.name: flag for flag in found.flags}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--max-model-len", "128"], {"max_model_len": 128}),
        (["--max_model_len=1k", "-tp", "2"], {"max_model_len": 1000, "tensor_parallel_size": 2}),
        # Given with its default value is given.
        (["--load-format", "auto", "--port", "8000"], {"load_format": "auto", "port": 8000}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
    ],
)
def test_only_what_was_written_counts_as_given(words, given):
    assert ServeArguments.parse("model", words).given == given


def test_a_file_of_flags_is_read_and_the_command_line_goes_before_it(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("port: 8123\nmax-num-seqs: 4\n")
    parsed = ServeArguments.parse("model", ["--config", str(path), "--max-num-seqs", "5"])
    assert parsed.given["port"] == 8123 and parsed.given["max_num_seqs"] == 5
    assert parsed.options.model == "model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modle-len", "3"], "not ones that vllm serve takes; did you mean --max-model-len?"),
        (["--max-num-seqs", "x"], "argument --max-num-seqs: invalid int value: 'x'"),
        (["--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
    ],
)
def test_words_the_server_does_not_take_are_named(words, message):
    with pytest.raises(click.UsageError) as error:
        ServeArguments.parse("model", words)
    assert message in error.value.message


def test_neuron_compile_takes_the_flags_of_the_http_server_too(tiny_llama, make_config):
    words = [
        "--port",
        "8123",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "128",
    ]
    ours = engine_config(str(tiny_llama), [*words, "--dtype", "float32"])
    assert bucket_plan(ours) == bucket_plan(make_config())


def test_each_flag_says_what_it_became_and_who_changed_it(tiny_llama):
    found = flags_of(
        resolved(
            tiny_llama,
            *("--port", "8123", "--api-key", "confidential", "--served-model-name", "a", "b"),
            *("--max-model-len", "128", "--compilation-config", '{"mode": 0}'),
        )
    )
    port = found["--port"]
    assert (port.given, port.effective, port.place) == (8123, 8123, "")
    assert "HTTP server" in port.reason
    assert "confidential" not in str(found["--api-key"])
    assert (found["--served-model-name"].given, found["--served-model-name"].effective) == (["a", "b"], "a")
    assert "vLLM" in found["--served-model-name"].reason
    assert (found["--max-model-len"].changed, found["--max-model-len"].reason) == (False, "")
    assert found["--compilation-config"].changed and "neuron_core" in found["--compilation-config"].reason


def test_what_the_plugin_sets_by_itself_is_listed_with_both_values(tiny_llama):
    found = resolved(tiny_llama)
    changes = {change.setting: change for change in found.changes}
    settings = found.settings()
    assert {"parallel_config.worker_cls", "scheduler_config.scheduler_cls", "compilation_config.mode"} <= set(
        changes
    )
    assert all(settings[name] == change.after != change.before for name, change in changes.items())
    from vllm.platforms import current_platform

    assert not {"check_and_update_config", "apply_config_platform_defaults"} & vars(current_platform).keys()


def test_a_warning_of_the_start_is_a_remark(tiny_llama):
    found = resolved(
        tiny_llama, "--max-num-batched-tokens", "1000", "--max-num-seqs", "2", "--max-model-len", "64"
    )
    assert any("max_num_batched_tokens (1000) exceeds" in remark for remark in found.remarks)


def test_a_refused_setting_is_the_servers_error(tiny_llama, make_config):
    with pytest.raises(ValidationError) as ours:
        resolved(tiny_llama, "--block-size", "24")
    with pytest.raises(ValidationError) as theirs:
        make_config(block_size=24)
    assert reasons(ours.value) == reasons(theirs.value)
    assert reasons(ours.value).startswith("--block-size=24: must be a multiple of 16")


def test_what_pydantic_refuses_is_named_with_its_value(tiny_llama):
    with pytest.raises(ValidationError) as refused:
        resolved(tiny_llama, "--max-num-seqs", "0")
    assert "--max-num-seqs=0: Input should be greater than or equal to 1" in reasons(refused.value)


@pytest.fixture
def data(tiny_llama, tmp_path, monkeypatch, graph_cache) -> dict[str, Any]:
    monkeypatch.setenv("VLLM_NEURON_CACHE_DIR", str(graph_cache))
    words = ("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "128")
    return report(resolved(tiny_llama, *words, "--dtype", "float32", "--num-gpu-blocks-override", "5"))


def test_the_report_is_json_with_the_plan_and_the_estimate(data, make_config):
    assert json.loads(json.dumps(data)) == data
    plan = bucket_plan(make_config())
    keys = ("name", "tokens", "rows", "context", "cost")
    shown = [tuple(bucket[key] for key in keys) for bucket in data["buckets"]]
    assert shown == [(b.name, b.num_tokens, b.num_seqs, b.context_len, b.cost) for b in plan.all()]
    # 128 tokens are 8 blocks of 16, and the null block.
    assert data["memory"]["request_blocks"] == 9
    assert "holds 5 blocks" in data["memory"]["error"] and "\n" not in data["memory"]["error"]
    assert data["memory"]["kv_bytes"] is None


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_neuron.cli", "config", *(str(word) for word in words)]
    # A server that only compiles is asked for: the command must not become one.
    asked = {"VLLM_NEURON_CPU_COMPILE": "1", "NEURON_PLATFORM_TARGET_OVERRIDE": "cpu"}
    environ = {**os.environ, **asked, "VLLM_NEURON_DEVICE": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def test_a_process_prints_one_document_or_one_line_and_exit_code_2(
    tiny_llama, tmp_path, graph_cache, monkeypatch
):
    """A folder with the configuration alone is enough, without weights and tokenizer."""
    monkeypatch.setenv("VLLM_NEURON_CACHE_DIR", str(graph_cache))
    (tmp_path / "config.json").write_bytes((tiny_llama / "config.json").read_bytes())
    good, bad = start(tmp_path, "--json", "--max-num-seqs", "2"), start(tiny_llama, "--json", "--enable-lora")
    output, log = good.communicate(timeout=240)
    assert good.returncode == 0, log[-3000:]
    document = json.loads(output)
    assert [flag["flag"] for flag in document["flags"]] == ["--max-num-seqs"]
    assert document["architecture"] == "LlamaForCausalLM" and document["memory"]["error"] is None
    output, log = bad.communicate(timeout=240)
    assert (bad.returncode, output) == (2, "")
    errors = [line for line in log.splitlines() if line.startswith("Error: ")]
    assert errors == [log.splitlines()[-1]] and "LoRA is not supported; merge the adapter" in errors[0]
