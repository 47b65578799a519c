# SPDX-License-Identifier: Apache-2.0
"""Memory and processors within control-group limits, on planted kernel files and on this host."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.host import Host
from neuron_core.errors import ConfigError

MIB = 1024**2


def plant(root: Path, files: dict[str, str]) -> Host:
    files = {"proc/meminfo": "MemTotal: 8192000 kB\nMemFree: 10 kB\nMemAvailable: 4096000 kB\n"} | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root / "proc", root / "sys", frozenset(range(8)))


def sizes(host: Host) -> tuple[int, int]:
    return host.total_memory_bytes(), host.available_memory_bytes()


def test_without_control_groups_the_kernel_s_figures_count(tmp_path: Path) -> None:
    assert sizes(plant(tmp_path, {})) == (8192000 * 1024, 4096000 * 1024)


def test_v2_takes_the_tightest_level_and_counts_inactive_cache_as_free(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    host = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            base + "pod/memory.max": f"{1000 * MIB}\n",
            base + "pod/memory.current": f"{900 * MIB}\n",
            base + "pod/memory.stat": f"anon 1\ninactive_file {50 * MIB}\n",
            base + "pod/app/memory.max": "max\n",
            base + "pod/app/memory.current": f"{800 * MIB}\n",
        },
    )
    assert sizes(host) == (1000 * MIB, 150 * MIB)


def test_v2_memory_above_the_throttling_limit_of_an_ancestor_is_not_counted(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    host = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            base + "pod/memory.max": f"{1000 * MIB}\n",
            base + "pod/memory.high": f"{700 * MIB}\n",
            base + "pod/memory.current": f"{400 * MIB}\n",
            base + "pod/app/memory.high": "max\n",
            base + "pod/app/memory.current": f"{300 * MIB}\n",
        },
    )
    assert sizes(host) == (700 * MIB, 300 * MIB)


def test_v1_limit_of_an_ancestor_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/"
    host = plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/slice/job/step\n",
            base + "slice/memory.limit_in_bytes": f"{900 * MIB}\n",
            base + "slice/memory.usage_in_bytes": f"{600 * MIB}\n",
            base + "slice/job/memory.limit_in_bytes": "9223372036854771712\n",
            base + "slice/job/memory.usage_in_bytes": f"{500 * MIB}\n",
            base + "slice/job/step/memory.limit_in_bytes": f"{2000 * MIB}\n",
            base + "slice/job/step/memory.usage_in_bytes": f"{100 * MIB}\n",
        },
    )
    assert sizes(host) == (900 * MIB, 300 * MIB)


def test_v1_in_a_container_finds_its_group_at_the_mount(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/"
    host = plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
            base + "memory.limit_in_bytes": f"{2000 * MIB}\n",
            base + "memory.usage_in_bytes": f"{500 * MIB}\n",
            base + "memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n",
        },
    )
    assert sizes(host) == (2000 * MIB, 1600 * MIB)


def test_v1_unlimited_is_a_huge_number_and_changes_nothing(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/"
    host = plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            base + "memory.limit_in_bytes": "9223372036854771712\n",
            base + "memory.usage_in_bytes": "5\n",
        },
    )
    assert sizes(host) == (8192000 * 1024, 4096000 * 1024)


def test_an_exceeded_limit_leaves_nothing_not_less(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/"
    files = {"proc/self/cgroup": "0::/\n", base + "memory.max": "100\n", base + "memory.current": "200\n"}
    assert sizes(plant(tmp_path, files)) == (100, 0)


def test_this_host_agrees_with_psutil() -> None:
    total, available = sizes(Host())
    assert 0 < available <= total <= psutil.virtual_memory().total
    assert available <= psutil.virtual_memory().available + 256 * MIB


def test_hardware_threads_of_one_core_are_neighbours(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for cpu in range(8):  # as on most x86 servers: thread n shares core n % 4
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology/"
        files |= {topology + "core_id": f"{cpu % 4}\n", topology + "physical_package_id": "0\n"}
    device = CpuDevice(plant(tmp_path, files))
    assert device.threads(0, 1) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert device.threads(1, 4) == [1, 5]


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("250000 100000", 3), ("1600000 100000", 8)]
)
def test_v2_cpu_quota_limits_the_threads(quota: str, expected: int, tmp_path: Path) -> None:
    host = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota + "\n"})
    cpus = host.cpus()
    assert len(set(cpus)) == expected and set(cpus) <= set(range(8))


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("200000", 2), ("50000", 1)])
def test_v1_cpu_quota_limits_the_threads(quota: str, expected: int, tmp_path: Path) -> None:
    base = "sys/fs/cgroup/cpu/"
    files = {
        "proc/self/cgroup": "3:cpu:/\n",
        base + "cpu.cfs_quota_us": quota,
        base + "cpu.cfs_period_us": "100000",
    }
    assert len(plant(tmp_path, files).cpus()) == expected


def run_on(cpus: set[int], code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_this_host_s_processors_are_those_it_may_run_on() -> None:
    some = {min(os.sched_getaffinity(0))}
    code = "from neuron_core.devices.host import Host; print(set(Host().cpus()))"
    assert run_on(some, code) == str(some)


def test_binding_the_main_thread_leaves_a_second_device_all_processors() -> None:
    code = """
import os
from neuron_core.devices.cpu import CpuDevice
first = CpuDevice().threads(0, 1)
os.sched_setaffinity(0, first[:1])
print(CpuDevice().threads(0, 1) == first)
"""
    assert run_on(set(os.sched_getaffinity(0)), code) == "True"


class Cpus(Host):
    """A host with the given number of processors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        object.__setattr__(self, "count", count)

    def cpus(self) -> list[int]:
        return list(range(self.count))  # type: ignore[attr-defined]


@given(cpus=st.integers(1, 70), world_size=st.integers(1, 70))
def test_slices_are_equal_and_disjoint_while_there_are_processors_enough(cpus: int, world_size: int) -> None:
    device = CpuDevice(Cpus(cpus))
    slices = [device.threads(rank, world_size) for rank in range(world_size)]
    used = [cpu for part in slices for cpu in part]
    assert len({len(part) for part in slices}) == 1
    assert set(used) <= set(range(cpus))
    if world_size <= cpus:
        assert len(set(used)) == len(used) > cpus - world_size
    else:
        assert set(used) == set(range(cpus))


def test_a_rank_outside_the_host_s_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank=2"):
        CpuDevice().threads(2, 2)


def test_flags_are_sorted_and_a_file_without_them_gives_none(tmp_path: Path) -> None:
    text = "processor : 0\nflags\t\t: sse avx2 aes\nprocessor : 1\nflags : other\n"
    assert plant(tmp_path, {"proc/cpuinfo": text}).isa_flags() == ("aes", "avx2", "sse")
    assert plant(tmp_path, {"proc/cpuinfo": "processor : 0\n"}).isa_flags() == ()


def test_identity_changes_with_the_instruction_set_only(tmp_path: Path) -> None:
    def identity(flags: str) -> str:
        return CpuDevice(plant(tmp_path, {"proc/cpuinfo": f"flags : {flags}\n"})).identity()

    assert identity("avx2 fma tsc") == identity("fma avx2 nopl")
    assert identity("avx2 fma") != identity("avx2 fma avx512_bf16")


def test_starting_without_kernels_still_sets_the_rank_s_thread_count() -> None:
    before = torch.get_num_threads()
    try:
        device = CpuDevice()
        device.start(1, 2)
        assert torch.get_num_threads() == len(device.threads(1, 2))
        assert device.identity().endswith(f"-t{len(device.threads(1, 2))}")
    finally:
        torch.set_num_threads(before)
