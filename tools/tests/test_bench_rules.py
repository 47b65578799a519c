# SPDX-License-Identifier: Apache-2.0
"""When the benchmark refuses to compare, and under which environment each side runs. Nothing is timed here."""

import math
import os
import sys

import pytest

import bench
import bench_answers
import bench_gaps
import bench_report
import bench_run
import bench_sides
from devtools.console import Failure

TEXTS = [{"prompt": [1, 2], "output": [3, 4]}]
SAME = [[[-0.25, -0.25], [-0.5, -0.5]]]


def side(texts=TEXTS, own=SAME, other=SAME):
    return {"texts": texts, "own": own, "other": other}


def test_agreement_counts_likeliest_tokens_and_averages_gaps():
    own = [[[-0.25, -0.25], [-0.5, -0.5]], [[-1.0, -1.0], [-2.0, -1.0]]]
    other = [[[-0.25, -0.25], [-0.75, -0.5]], [[-1.5, -1.5], [-2.0, -1.5]]]
    found = bench_answers.compare(own, other)
    assert found.top1 == 2 / 4
    assert math.isclose(found.logprob_gap, (0 + 0.25 + 0.5 + 0) / 4)
    assert not found.is_same_model


@pytest.mark.parametrize(("own", "other"), [([], []), (SAME, []), (SAME, [SAME[0][:1]])])
def test_nothing_to_compare_is_not_agreement(own, other):
    with pytest.raises(ValueError, match="did not score the same texts"):
        bench_answers.compare(own, other)


def test_equal_sides_are_accepted():
    found = bench.judged(side(), side())
    assert (found["identical_texts"], found["texts"]) == (1, 1)
    assert all(agreement == {"top1": 1.0, "logprob_gap": 0.0} for agreement in found["agreement"].values())


def test_another_winner_refuses_the_ratios_whichever_side_finds_it():
    worse = [[[-0.25, -0.25], [-0.5, -0.4]]]
    with pytest.raises(Failure, match=r"our texts, judged by the peer, 50\.0% of the tokens"):
        bench.judged(side(), side(other=worse))
    with pytest.raises(Failure, match=r"the peer's texts, judged by us, 50\.0% of the tokens"):
        bench.judged(side(other=worse), side())


def test_the_right_winners_of_another_distribution_refuse_the_ratios():
    flat = [[[-0.45, -0.45], [-0.7, -0.7]]]
    with pytest.raises(Failure, match=r"100\.0% .* 0\.200 nats apart \(allowed 0\.1\)"):
        bench.judged(side(), side(other=flat))


def test_different_prompts_refuse_the_ratios():
    with pytest.raises(Failure, match="tokenizers"):
        bench.judged(side(), side(texts=[{"prompt": [1], "output": [3, 4]}]))


@pytest.mark.parametrize(
    ("mine", "other", "complaint"),
    [
        (("0.32.0", "CpuPlatform"), ("0.32.0", "CpuPlatform"), "not this plugin"),
        (("0.32.0", "NeuronPlatform"), ("0.32.0", "NeuronPlatform"), "the peer's vLLM chose NeuronPlatform"),
        (("0.32.0", "NeuronPlatform"), ("0.31.1+cpu", "CpuPlatform"), r"vLLM 0\.31\.1 and we have 0\.32\.0"),
    ],
)
def test_a_peer_that_is_no_peer_is_refused(mine, other, complaint):
    with pytest.raises(Failure, match=complaint):
        bench_sides.check_peer(mine, other)


def test_a_peer_of_the_same_version_is_accepted():
    bench_sides.check_peer(("0.32.0", "NeuronPlatform"), ("0.32.0+cpu", "CpuPlatform"))


def test_the_peer_sees_nothing_of_ours_and_each_side_has_its_own_caches(tmp_path, monkeypatch):
    for name, value in {
        "PYTHONPATH": "ours",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NEURON_DEVICE": "cpu",
    }.items():
        monkeypatch.setenv(name, value)
    python = tmp_path / "peer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    side = bench_sides.peer("peer/bin/python", ["VLLM_CPU_NUM_OF_RESERVED_CPU=0"])
    assert side.python == str(python)
    other = side.environ(tmp_path)
    mine = bench_sides.ours().environ(tmp_path)
    assert not {"PYTHONPATH", "VLLM_TARGET_DEVICE", "VLLM_NEURON_DEVICE"} & other.keys()
    assert other["PATH"].split(os.pathsep)[0] == str(python.parent)
    assert (other["VLLM_CPU_NUM_OF_RESERVED_CPU"], other["VLLM_CPU_KVCACHE_SPACE"]) == ("0", "1")
    assert (mine["PYTHONPATH"], mine["VLLM_NEURON_DEVICE"]) == ("ours", "cpu")
    assert "VLLM_TARGET_DEVICE" not in mine
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert mine[name].startswith(str(tmp_path))


def test_a_peer_variable_without_a_value_and_a_missing_peer_are_refused():
    with pytest.raises(Failure, match="NAME=VALUE"):
        bench_sides.peer(sys.executable, ["VLLM_CPU_OMP_THREADS_BIND"])
    with pytest.raises(Failure, match="--peer nowhere/python: no such interpreter"):
        bench_sides.peer("nowhere/python", [])


def test_prompts_share_no_prefix_and_stay_in_the_vocabulary():
    prompts = [tuple(bench_run.prompt(64, seed)["prompt_token_ids"]) for seed in range(300)]
    assert len({ids[:4] for ids in prompts}) == 300
    assert all(100 <= token < bench_run.FILLER_IDS for ids in prompts for token in ids)


def test_a_goal_knows_its_direction():
    faster, sooner = bench_report.Goal(2.2, at_least=True), bench_report.Goal(0.75, at_least=False)
    assert (faster.is_met(2.2), faster.is_met(2.1), str(faster)) == (True, False, "≥ 2.2")
    assert (sooner.is_met(0.75), sooner.is_met(0.8), str(sooner)) == (True, False, "≤ 0.75")


def test_ratios_are_medians_of_rounds_taken_in_turn():
    runs = {
        "ours": [{"output_tok_s_b1": 90.0}, {"output_tok_s_b1": 60.0}],
        "peer": [{"output_tok_s_b1": 30.0}, {"output_tok_s_b1": 30.0}],
    }
    table = bench_report.peer_table({"runs": runs, "ratios": {"output_tok_s_b1": [3.0, 2.0]}})
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["output_tok_s_b1", "75", "30", "2.50 ×", "2.00 – 3.00", "≥ 2.2", "met"]


class Told:
    """A bench and a side that measure what they are told, one run after another."""

    def __init__(self, runs, rounds):
        self.runs = iter(runs)
        self.model = "model"
        self.options = bench.read_options(["--gaps", "--rounds", str(rounds)])

    def caches(self, side, index):
        return None

    def side(self):
        made = bench_sides.ours()
        return type("ToldSide", (bench_sides.Side,), {"figures": lambda *_: next(self.runs)})(
            made.name, made.python, made.variables
        )


def gap_run(gap, texts="same"):
    return {"host_gap_ms_b1": gap, "texts": texts}


def test_gaps_are_ratios_of_runs_that_follow_each_other():
    # Rounds take turns: plain first, then asynchronous first.
    told = Told([gap_run(gap) for gap in (4.0, 1.0, 8.0, 2.0, 1.0, 2.0, 3.0, 6.0)], rounds=2)
    found = bench_gaps.compare(told, told.side())
    assert found["async_over_sync"] == {
        "cpu host_gap_ms_b1": [1.0 / 4.0, 1.0 / 2.0],
        "latency host_gap_ms_b1": [2.0 / 8.0, 3.0 / 6.0],
    }


def test_other_texts_refuse_the_ratios_of_gaps():
    told = Told([gap_run(1.0), gap_run(1.0), gap_run(1.0), gap_run(1.0, "other")], rounds=1)
    with pytest.raises(Failure, match="texts differ"):
        bench_gaps.compare(told, told.side())
