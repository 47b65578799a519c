# SPDX-License-Identifier: Apache-2.0
"""What the server benchmark asks for, and when it refuses to say a number. Nothing is started or timed here."""

import math
from pathlib import Path

import pytest

import bench
import bench_report
import bench_serve
from devtools.console import Failure


def options(*words):
    return bench.read_options(["--serve", "--self", *words])


def result(**changes):
    whole = {"completed": 4, "total_output_tokens": 512, "request_throughput": 2.5}
    return whole | {"p99_tpot_ms": 31.0, "p99_ttft_ms": 250.0} | changes


def test_every_request_answered_in_full_gives_figures():
    assert bench_serve.figures_of(result(), 4) == {
        "serve_requests_s": 2.5,
        "serve_tpot_p99_ms": 31.0,
        "serve_ttft_p99_ms": 250.0,
    }


@pytest.mark.parametrize("changes", [{"completed": 3}, {"total_output_tokens": 511}])
def test_a_failed_request_or_a_short_answer_gives_none(changes):
    with pytest.raises(Failure, match=r"[34] of 4 requests were answered, by 51[12] of 512 tokens"):
        bench_serve.figures_of(result(**changes), 4)


def test_the_prefix_ratio_is_one_of_medians():
    cold, warm = [1.0, 4.0, 2.0], [0.5, 0.25, 9.0]
    assert math.isclose(bench_serve.hit_ratio(cold, warm, hits=3 * 448), 0.5 / 2.0)


@pytest.mark.parametrize("hits", [0, 3 * 448 - 16, 3 * 448 + 16])
def test_a_prefix_not_found_in_full_gives_no_ratio(hits):
    with pytest.raises(Failure, match=rf"of the 1344 tokens of shared prefixes the server found {hits}"):
        bench_serve.hit_ratio([1.0] * 3, [0.1] * 3, hits)


def test_both_servers_are_told_the_same_and_room_for_all_clients():
    given = options("--engine-args", '{"enable_prefix_caching": false, "block_size": 32}')
    command = bench_serve.server_command(given, Path("/models/m"), 8123)
    assert command[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m"]
    settings = dict(zip(command[4:-3:2], command[5:-3:2], strict=True))
    assert settings == {
        "--host": "127.0.0.1",
        "--port": "8123",
        "--dtype": "bfloat16",
        "--max-model-len": "1024",
        "--max-num-seqs": "16",
    }
    assert command[-3:] == ["--no-enable-prefix-caching", "--block-size", "32"]


def test_engine_arguments_become_the_servers_flags():
    given = {"async_scheduling": True, "kv_cache_dtype": "auto", "additional_config": {"a": [1]}}
    assert bench_serve.flags(given) == [
        *("--async-scheduling", "--kv-cache-dtype", "auto"),
        *("--additional-config", '{"a": [1]}'),
    ]


def test_the_client_is_vllms_and_understands_what_it_is_asked():
    from vllm.benchmarks.datasets.datasets import _parse_range_ratio
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    command = bench_serve.client_command("http://127.0.0.1:1", Path("/models/m"), 40, Path("/out/r.json"))
    assert command[2:4] == ["bench", "serve"]
    parsed = parser.parse_args(command[4:])
    spread = _parse_range_ratio(parsed.random_range_ratio)
    longest = parsed.random_input_len * (1 + spread["input"])
    shortest = parsed.random_input_len * (1 - spread["input"])
    assert (shortest, longest, parsed.random_output_len, spread["output"]) == (128, 384, 128, 0)
    assert (parsed.max_concurrency, parsed.num_prompts, parsed.ignore_eos) == (16, 40, True)
    assert (parsed.result_dir, parsed.result_filename) == ("/out", "r.json")


def test_serving_and_capturing_do_not_go_together(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--serve", "--capture"])
    assert "give it with --peer or --self" in capsys.readouterr().err


def cells(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_our_own_figure_stands_beside_the_ratios():
    ours = {"serve_requests_s": 3.0, "prefix_hit_ttft_ratio": 0.25}
    found = {
        "runs": {"ours": [ours], "peer": [{"serve_requests_s": 2.0}]},
        "ratios": {"serve_requests_s": [1.5]},
    }
    assert cells(bench_report.peer_table(found)) == [
        ("serve_requests_s", "3", "2", "1.50 ×", "", "≥ 1.2", "met"),
        ("prefix_hit_ttft_ratio", "0.25", "", "", "", "≤ 0.3", "met"),
    ]


def test_a_missed_goal_is_shown_for_our_side_alone():
    found = {"runs": {"ours": [{"serve_requests_s": 3.0, "prefix_hit_ttft_ratio": 0.5}]}}
    assert cells(bench_report.serve_table(found)) == [
        ("serve_requests_s", "3", "", ""),
        ("prefix_hit_ttft_ratio", "0.5", "≤ 0.3", "missed"),
    ]
