# SPDX-License-Identifier: Apache-2.0
"""Memory settings that make no sense or are not ours are refused by name, and the estimate follows those that are."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest
import torch
from vllm import EngineArgs

from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.host import Host
from neuron_core.errors import CapacityError
from neuron_core.memory import format_bytes
from neuron_models import build_model
from neuron_parallel import ParallelGroups, ParallelPlan
from vllm_neuron import weights
from vllm_neuron.load_progress import LoadProgress
from vllm_neuron.start_estimate import StartEstimates

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, 5])
def test_a_utilization_outside_its_range_is_refused_by_name(make_config, value):
    with pytest.raises(ValueError, match=rf"gpu_memory_utilization[\s\S]*input_value={value}"):
        make_config(gpu_memory_utilization=value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cpu_offload_gb": 0.5}, "--cpu-offload-gb=0.5: not supported; use 0"),
        (
            {"offload_group_size": 2, "offload_num_in_group": 1},
            "--offload-group-size=2: not supported; use 0",
        ),
        ({"kv_offloading_size": 2.0}, "--kv-offloading-size=2.0: not supported; leave it out"),
        ({"swap_space": 4}, "unexpected keyword argument 'swap_space'"),
    ],
    ids=str,
)
def test_memory_elsewhere_is_refused_by_name(make_config, arguments, message):
    with pytest.raises(Exception) as caught:
        make_config(**arguments)
    assert message in str(caught.value)


def test_swap_space_is_no_flag(capsys):
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--swap-space", "4"])
    assert "--swap-space" in capsys.readouterr().err


class Room(Host):
    """A host of 4 GiB with the given bytes free."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        object.__setattr__(self, "free_bytes", free_bytes)

    def total_memory_bytes(self) -> int:
        return 4 * GIB

    def available_memory_bytes(self) -> int:
        return self.free_bytes  # type: ignore[attr-defined]


class Cores(CpuDevice):
    """The CPU device as if each rank had that memory to itself, as the cores of a chip have."""

    ranks_share_memory = False
    overlaps_host = True


@pytest.fixture
def estimates(make_config):
    """``estimates(device, **settings)``: those of the tiny model in float32."""

    def make(device, **settings):
        config = make_config(**settings)

        def model(groups):
            return build_model(
                config.model_config.hf_text_config, dtype=torch.float32, groups=groups, block_size=16
            )

        return StartEstimates(config, device, model)

    return make


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_weights_of_a_degree_are_those_of_the_real_model(estimates, make_config, degree):
    config = make_config().model_config.hf_text_config
    real = build_model(
        config,
        dtype=torch.float32,
        groups=ParallelGroups.describe(ParallelPlan(degree)),
        block_size=16,
    )
    expected = sum(parameter.nbytes for parameter in real.parameters())
    expected += sum(buffer.nbytes for buffer in real.buffers())
    found = estimates(CpuDevice(Room(GIB))).of(degree)
    assert found.footprint.weights_bytes == expected
    assert found.request_bytes == sum(layout.allocate(9).nbytes for layout in real.kv_layouts)
    assert (found.total_bytes, found.free_bytes) == (4 * GIB // degree, GIB // degree)


def test_settings_reach_the_estimate(estimates):
    found = estimates(
        CpuDevice(Room(GIB)), gpu_memory_utilization=0.5, num_gpu_blocks_override=77, max_model_len=64
    ).own()
    assert (found.utilization, found.num_blocks, found.max_model_len) == (0.5, 77, 64)
    assert estimates(CpuDevice(Room(GIB)), kv_cache_memory_bytes=MIB).own().requested_kv_bytes == MIB


@pytest.mark.parametrize("degree", [1, 2])
def test_a_step_of_the_plan_is_a_term_of_the_estimate_and_of_the_budget(estimates, degree):
    # The prompt's activations of one layer alone, [tokens, intermediate / ranks] of gate and up, and the logits.
    small, large = (
        estimates(
            CpuDevice(Room(GIB)),
            max_model_len=256,
            max_num_batched_tokens=tokens,
            hf_overrides={"intermediate_size": 4096},
        ).of(degree)
        for tokens in (64, 256)
    )
    for estimate, tokens in ((small, 64), (large, 256)):
        size = estimate.footprint.activation_bytes
        assert 2 * tokens * 4096 // degree * 4 < size < 8 * tokens * 4096 // degree * 4
        shown = format_bytes(size)
        assert re.search(rf"activation headroom +{re.escape(shown)}\n", estimate.table())
        assert estimate.budget().activation_bytes == size
    more = large.footprint.activation_bytes - small.footprint.activation_bytes
    used = [e.budget().limits["utilization"] for e in (small, large)]
    assert used[0] - used[1] == more > 0


def test_logits_of_many_requests_decide_where_prompts_are_short(estimates):
    # Float32 [requests, vocabulary], made and kept; two of them that outlive the step; and bits per token.
    sizes = {"max_model_len": 16, "max_num_batched_tokens": 512, "max_num_seqs": 512}
    footprint = estimates(CpuDevice(Room(GIB)), **sizes).own().footprint
    assert 4 * 512 * 256 * 4 <= footprint.activation_bytes < 9 * 512 * 256 * 4


def test_other_degrees_are_those_that_divide_the_model(estimates):
    # 4 heads, 2 KV heads, intermediate size 128.
    degrees = [make().tensor_parallel_size for make in estimates(CpuDevice(Room(GIB))).others()]
    assert degrees == [2, 4]
    # A prefill bucket is shared by the ranks too.
    buckets = {"neuron_config": {"prefill_buckets": [66, 128]}}
    made = estimates(CpuDevice(Room(GIB)), additional_config=buckets)
    assert [make().tensor_parallel_size for make in made.others()] == [2]


def test_more_ranks_help_only_where_they_bring_memory(estimates):
    # Steps small beside the weights, half of which then leave room for one.
    sizes = {
        "max_model_len": 16,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "hf_overrides": {"intermediate_size": 2048},
    }
    whole = estimates(CpuDevice(Room(GIB)), **sizes).own()
    free = whole.loading_bytes - 1
    for device, message in (
        (Cores(Room(free)), r"--tensor-parallel-size 2 works\."),
        (CpuDevice(Room(free)), r"No other --tensor-parallel-size works here\."),
    ):
        made = estimates(device, **sizes)
        with pytest.raises(CapacityError, match=message):
            made.own().require_fit(made.others())


def test_a_long_load_shows_a_bar_on_the_first_rank_only(capsys):
    def shown(**settings):
        with LoadProgress(**settings) as progress:
            progress(5 * 10**6, 10**7)
            progress(10**7, 10**7)
        return capsys.readouterr().err

    assert shown(shown=True) == ""
    assert shown(shown=False, quiet_s=0.0) == ""
    text = shown(shown=True, quiet_s=0.0)
    assert re.search(r"Weights:.*100%.*10\.0M/10\.0M", text, re.S)


@pytest.mark.parametrize("wanted", [True, False])
def test_vllm_s_switch_for_the_bar_is_honoured(make_config, monkeypatch, capsys, wanted):
    monkeypatch.setattr(weights, "LoadProgress", functools.partial(LoadProgress, quiet_s=0.0))
    config = make_config(use_tqdm_on_load=wanted)
    groups = ParallelGroups.single()
    hf_config = config.model_config.hf_text_config
    model = build_model(hf_config, dtype=torch.float32, groups=groups, block_size=16)
    said = weights.fill_weights(model, config, groups.tp, dummy=False, shown=True)
    assert f"{len(list(model.parameters()))} parameters read in" in said
    assert ("Weights:" in capsys.readouterr().err) is wanted


RANK = """
import sys
import torch.distributed as dist
from vllm_neuron.start_estimate import _agreed
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
print(*_agreed(10 + rank, 20 - rank))
dist.destroy_process_group()
"""


def test_ranks_decide_by_the_smallest_figures_among_them(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        assert out.splitlines()[-1] == "10 19"
