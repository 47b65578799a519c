# SPDX-License-Identifier: Apache-2.0
"""The chip table against the columns AWS publishes separately."""

import pytest

from neuron_core.devices.chips import CHIPS, chip_for_instance, chip_for_target, chip_named
from neuron_core.errors import ConfigError

GIB = 1024**3


@pytest.mark.parametrize(
    ("name", "lnc", "logical_cores", "core_gib"),
    [
        # The published per-core columns: the table derives them from chip totals.
        ("trn1", 1, 2, 16),
        ("trn1n", 1, 2, 16),
        ("inf2", 1, 2, 16),
        ("trn2", 2, 4, 24),
        ("trn2", 1, 8, 12),
        ("trn3", 2, 4, 36),
        ("trn3", 1, 8, 18),
    ],
)
def test_logical_cores_and_their_memory(name: str, lnc: int, logical_cores: int, core_gib: int) -> None:
    chip = chip_named(name)
    assert chip.logical_cores_at(lnc) == logical_cores
    assert chip.logical_core_bytes_at(lnc) == core_gib * GIB


@pytest.mark.parametrize(
    ("instance", "chips", "logical_cores"),
    [
        ("inf2.xlarge", 1, 2),
        ("inf2.48xlarge", 12, 24),
        ("trn1.32xlarge", 16, 32),
        ("trn1n.32xlarge", 16, 32),
        ("trn2.3xlarge", 1, 4),
        ("trn2u.48xlarge", 16, 64),
    ],
)
def test_instances_have_the_published_number_of_logical_cores(
    instance: str, chips: int, logical_cores: int
) -> None:
    chip = chip_for_instance(instance + "\n")
    assert chip is not None
    assert chips * chip.logical_cores == logical_cores


def test_other_instances_have_no_chip() -> None:
    assert chip_for_instance("c7i.4xlarge") is None


def test_fp8_range_is_the_chip_s_own() -> None:
    assert {name: chip.fp8_max for name, chip in CHIPS.items() if chip.fp8_max} == {
        "trn2": 240.0,
        "trn3": 448.0,
    }


@pytest.mark.parametrize(("target", "name"), [("trn3pre", "trn3"), ("trn3-rev2", "trn3"), ("inf2", "inf2")])
def test_targets(target: str, name: str) -> None:
    assert chip_for_target(target).name == name


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"chip='trn4'.*did you mean 'trn\d"):
        chip_named("trn4")
    with pytest.raises(ConfigError, match="NEURON_PLATFORM_TARGET_OVERRIDE='trainium'"):
        chip_for_target("trainium")


def test_logical_core_size_a_chip_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="trn1 takes 1"):
        chip_named("trn1").logical_cores_at(2)


def test_every_figure_has_a_source() -> None:
    for chip in CHIPS.values():
        sourced = {field for fields, _ in chip.sources for field in fields.split(", ")}
        needed = {"physical_cores", "hbm_bytes", "hbm_bytes_per_s", "bf16_tflops", "lnc_values", "targets"}
        assert needed <= sourced, chip.name
        assert chip.fp8_max is None or "fp8_max" in sourced
