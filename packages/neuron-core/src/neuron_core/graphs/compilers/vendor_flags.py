# SPDX-License-Identifier: Apache-2.0
"""Options of ``neuronx-cc compile``: those we pass, and those a user may, checked before anything is compiled.

Names and values are those of aws-neuron-sdk: compiler/neuronx-cc/api-reference-guide/index.rst (SDK 2.32). Options
outside that page exist and change between releases; they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from neuron_core.devices.chips import ChipSpec
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["OPTIONS", "Option", "checked_flags", "command_line"]

SETTING = "neuronx flags"

DOWNCAST_OPS = ("dot", "scatter", "all_reduce", "reduce_scatter", "pow")
FIRST_GENERATION = ("trn1", "trn1n", "inf2")


@dataclass(frozen=True)
class Option:
    """One option: ``values`` are what it takes (None: a switch without a value).

    ``in_artifact`` says whether it changes the compiled file and so belongs to the key. ``owner`` names what
    sets it instead, when a user may not.
    """

    name: str
    values: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    in_artifact: bool = True
    owner: str = ""


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("--model-type", ("generic", "transformer", "unet-inference")),
        Option("--auto-cast", ("none", "matmult", "all")),
        Option("--auto-cast-type", ("bf16", "fp16", "tf32", "fp8_e4m3")),
        Option("--native-int64", ("default", "enabled", "disabled")),
        Option("--implicit-integer-downcast", ("default", "all", "none", *DOWNCAST_OPS)),
        Option("--distribution-strategy", ("llm-training",)),
        Option("--optlevel", ("1", "2", "3"), ("-O",)),
        Option("--enable-mixed-precision-accumulation"),
        Option("--disable-mixed-precision-accumulation"),
        Option("--enable-saturate-infinity"),
        Option("--enable-fast-context-switch"),
        Option("--enable-fast-loading-neuron-binaries"),
        Option("--verbose", ("info", "warning", "error", "critical", "debug"), in_artifact=False),
        Option("--framework", ("XLA",), owner="graphs are always lowered to XLA"),
        Option("--target", owner="the compiler's target"),
        Option("--logical-nc-config", ("1", "2"), ("-lnc", "--lnc"), owner="lnc or NEURON_LOGICAL_NC_CONFIG"),
        Option("--output", owner="the compile cache"),
        Option("--logfile", owner="the compile cache"),
    )
}
"""Every documented option of ``compile`` by its long name."""

_BY_NAME = {name: option for option in OPTIONS.values() for name in (option.name, *option.aliases)}


def checked_flags(user: Mapping[str, object] | None, target: str, chip: ChipSpec, lnc: int) -> dict[str, str]:
    """Our defaults with the user's flags over them: long option name -> value, "" for a switch; in fixed order.

    A user's name may lack its dashes (``optlevel``); a switch takes True, or False to leave it out. Raises
    ``ConfigError`` for an unknown or owned option, a value the option or the chip does not take, and options
    that contradict each other.
    """
    flags = {
        "--framework": "XLA",
        "--target": target,
        "--model-type": "transformer",
        "--auto-cast": "none",
        "--optlevel": "1",
    }
    if chip.name not in FIRST_GENERATION:
        flags["--logical-nc-config"] = str(lnc)
    given: dict[str, str] = {}
    for name, value in (user or {}).items():
        option = _option(name)
        text = _value(option, value)
        if option.name in given:
            raise ConfigError(SETTING, name, f"{option.name} is given twice; give it once")
        if text is not None:
            given[option.name] = text
    flags.update(sorted(given.items()))
    _check_together(flags, chip)
    return flags


def command_line(flags: Mapping[str, str]) -> list[str]:
    """The arguments that stand for ``flags``; a switch stands alone."""
    return [name if value == "" else f"{name}={value}" for name, value in flags.items()]


def _option(name: str) -> Option:
    stripped = name.lstrip("-")
    for candidate in (name, f"--{stripped}", f"-{stripped}"):
        option = _BY_NAME.get(candidate)
        if option is not None:
            if option.owner:
                raise ConfigError(SETTING, name, f"is set by {option.owner}; remove it")
            return option
    free = [known for known, option in _BY_NAME.items() if not option.owner]
    hint = unknown_name_hint(f"--{stripped}", free)
    raise ConfigError(SETTING, name, f"unknown option of neuronx-cc compile; {hint}")


def _value(option: Option, value: object) -> str | None:
    if option.values is None:
        if not isinstance(value, bool):
            raise ConfigError(f"{SETTING}[{option.name}]", value, "is a switch; use True or False")
        return "" if value else None
    text = str(value)
    parts = text.split(",") if option.name == "--implicit-integer-downcast" else [text]
    listed = len(parts) > 1
    for part in parts:
        if part not in option.values or (listed and part not in DOWNCAST_OPS):
            allowed = DOWNCAST_OPS if listed else option.values
            raise ConfigError(f"{SETTING}[{option.name}]", value, f"takes {', '.join(allowed)}")
    return text


_Rule = tuple[str, Callable[[Mapping[str, str], str], bool], str]

_RULES: tuple[_Rule, ...] = (
    (
        "--auto-cast-type",
        lambda flags, chip: flags["--auto-cast"] == "none",
        "has no effect while --auto-cast is none; set --auto-cast to matmult or all as well",
    ),
    (
        "--disable-mixed-precision-accumulation",
        lambda flags, chip: "--enable-mixed-precision-accumulation" in flags,
        "contradicts --enable-mixed-precision-accumulation; keep one",
    ),
    (
        "--native-int64",
        lambda flags, chip: chip in FIRST_GENERATION and flags["--native-int64"] == "enabled",
        "64-bit integers run natively on trn2 and later only; remove it",
    ),
    (
        "--enable-saturate-infinity",
        lambda flags, chip: chip not in FIRST_GENERATION,
        "has an effect on trn1 only; remove it",
    ),
)
"""Option, when it is refused (given all flags and the chip's name), and why."""


def _check_together(flags: Mapping[str, str], chip: ChipSpec) -> None:
    for name, refused, hint in _RULES:
        if name in flags and refused(flags, chip.name):
            raise ConfigError(f"{SETTING}[{name}]", flags[name] or True, f"{hint} (target chip {chip.name})")
