# SPDX-License-Identifier: Apache-2.0
"""Options of the vendor compiler: every documented value passes, everything else is refused by name."""

import pytest

from neuron_core.devices.chips import chip_for_target
from neuron_core.environ import Environment
from neuron_core.errors import ConfigError
from neuron_core.graphs.compilers.neuronx import NeuronxCompiler
from neuron_core.graphs.compilers.vendor_flags import OPTIONS, checked_flags, command_line

# aws-neuron-sdk: compiler/neuronx-cc/api-reference-guide/index.rst, SDK 2.32
DOCUMENTED = {
    "--model-type": "generic transformer unet-inference",
    "--auto-cast": "none matmult all",
    "--auto-cast-type": "bf16 fp16 tf32 fp8_e4m3",
    "--native-int64": "default enabled disabled",
    "--implicit-integer-downcast": "default all none dot scatter all_reduce reduce_scatter pow dot,pow",
    "--distribution-strategy": "llm-training",
    "--optlevel": "1 2 3",
    "-O": "1 2 3",
    "--verbose": "info warning error critical debug",
}
SWITCHES = (
    "--enable-mixed-precision-accumulation",
    "--disable-mixed-precision-accumulation",
    "--enable-saturate-infinity",
    "--enable-fast-context-switch",
    "--enable-fast-loading-neuron-binaries",
)
SET_BY_US = ("--framework", "--target", "--logical-nc-config", "-lnc", "--output", "--logfile")
CLEAN = Environment.read({})


def flags(user=None, target="trn2", lnc=None):
    chip = chip_for_target(target)
    return checked_flags(user, target, chip, lnc or chip.default_lnc)


def test_our_defaults_are_the_documented_ones():
    assert flags() == {
        "--framework": "XLA",
        "--target": "trn2",
        "--model-type": "transformer",
        "--auto-cast": "none",
        "--optlevel": "1",
        "--logical-nc-config": "2",
    }
    assert flags(lnc=1)["--logical-nc-config"] == "1"
    for target in ("trn1", "trn1n", "inf2"):  # the option exists from trn2 on
        assert "--logical-nc-config" not in flags(target=target)
    assert flags(target="trn3-rev2")["--target"] == "trn3-rev2"


def test_the_table_is_the_documented_table():
    documented = {name for name in (*DOCUMENTED, *SWITCHES, *SET_BY_US) if name.startswith("--")}
    assert set(OPTIONS) == documented


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in DOCUMENTED.items() for value in values.split()]
)
def test_every_documented_value_is_passed_on(name, value):
    user = {name: value}
    if name == "--auto-cast-type":
        user["--auto-cast"] = "matmult"
    long_name = "--optlevel" if name == "-O" else name
    checked = flags(user)
    assert checked[long_name] == value
    assert f"{long_name}={value}" in command_line(checked)
    assert flags({name.lstrip("-"): other for name, other in user.items()}) == checked


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_stands_alone_and_false_leaves_it_out(name):
    assert name in command_line(flags({name: True}, target="trn1"))
    assert flags({name: False}, target="trn1") == flags(target="trn1")
    with pytest.raises(ConfigError, match="is a switch; use True or False"):
        flags({name: "yes"}, target="trn1")


@pytest.mark.parametrize(
    ("user", "target", "message"),
    [
        ({"--optlvl": "2"}, "trn2", "did you mean '--optlevel'"),
        ({"auto_cast": "all"}, "trn2", "did you mean '--auto-cast'"),
        ({"--tensorizer-options": "x"}, "trn2", "unknown option of neuronx-cc compile"),
        ({"--auto-cast": "matmul"}, "trn2", "takes none, matmult, all"),
        ({"--optlevel": 4}, "trn2", "takes 1, 2, 3"),
        ({"--implicit-integer-downcast": "dot,all"}, "trn2", "takes dot, scatter"),
        ({"--optlevel": 1, "-O": 2}, "trn2", "--optlevel is given twice"),
        ({"--auto-cast-type": "bf16"}, "trn2", "no effect while --auto-cast is none"),
        ({"--native-int64": "enabled"}, "trn1", "trn2 and later only.*trn1"),
        ({"--enable-saturate-infinity": True}, "trn2", "has an effect on trn1 only.*trn2"),
        (dict.fromkeys(SWITCHES[:2], True), "trn2", "contradicts --enable-mixed-precision"),
    ],
)
def test_what_the_compiler_would_refuse_or_ignore_is_an_error_that_names_it(user, target, message):
    with pytest.raises(ConfigError, match=message) as caught:
        flags(user, target)
    assert str(next(iter(user.values()))) in str(caught.value) or next(iter(user)) in str(caught.value)


@pytest.mark.parametrize("name", SET_BY_US)
def test_what_we_set_cannot_be_set_by_a_flag(name):
    with pytest.raises(ConfigError, match=r"is set by .*; remove it"):
        flags({name: "1"})


def compiler(target="trn2", environment=CLEAN, **arguments):
    return NeuronxCompiler(target, environment=environment, **arguments)


@pytest.mark.parametrize(
    ("target", "values"),
    [("trn1", {1}), ("trn1n", {1}), ("inf2", {1}), ("trn2", {1, 2}), ("trn3", {1, 2}), ("trn3pre", {1, 2})],
)
def test_the_logical_core_size_is_checked_against_the_chip(target, values):
    for lnc in (1, 2):
        variable = Environment.read({"NEURON_LOGICAL_NC_CONFIG": str(lnc)})
        if lnc in values:
            assert compiler(target, lnc=lnc).target() == f"{target} lnc={lnc}"
            assert compiler(target, variable).target() == f"{target} lnc={lnc}"
        else:
            with pytest.raises(ConfigError, match=r"lnc=2: \w+ takes 1"):
                compiler(target, lnc=lnc)
            with pytest.raises(ConfigError, match=r"NEURON_LOGICAL_NC_CONFIG=2: \w+ takes 1"):
                compiler(target, variable)
    assert compiler(target).lnc == max(values)


def test_two_different_logical_core_sizes_are_an_error_that_names_both():
    variable = Environment.read({"NEURON_LOGICAL_NC_CONFIG": "1"})
    with pytest.raises(ConfigError, match="lnc=2: contradicts NEURON_LOGICAL_NC_CONFIG=1"):
        compiler(environment=variable, lnc=2)
    assert compiler(environment=variable, lnc=1).lnc == 1


def test_an_unknown_target_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="target='trn22': unknown compiler target; did you mean 'trn2'"):
        compiler("trn22")
