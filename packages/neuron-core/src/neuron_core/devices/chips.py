# SPDX-License-Identifier: Apache-2.0
"""The Neuron chips and the figures sizing and compilation need, each with the AWS document it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["CHIPS", "ChipSpec", "chip_for_instance", "chip_for_target", "chip_named"]

GIB = 1024**3

_HARDWARE = "aws-neuron-sdk: about-neuron/arch/neuron-hardware/"
_LNC = "aws-neuron-sdk: about-neuron/arch/neuron-features/logical-neuroncore-config.rst"
_COMPILER = "aws-neuron-sdk: compiler/neuronx-cc/api-reference-guide/index.rst"
_FP8 = "aws-neuron-sdk: vllm-neuron/docs/design/vllm/kv-cache-quantization.md"
_FIELD = "field notes of users, not confirmed by an AWS document"


@dataclass(frozen=True)
class ChipSpec:
    """One Neuron chip.

    A *logical core* is what a process owns: ``lnc`` physical cores acting as one. ``fp8_max`` is the largest
    finite E4M3 value the chip computes with, None where FP8 KV caches are not supported. ``targets`` are
    names ``neuronx-cc --target`` takes, and ``sources`` says where each figure was published.
    """

    name: str
    physical_cores: int
    lnc_values: tuple[int, ...]
    default_lnc: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_tflops: float
    fp8_max: float | None
    targets: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]

    @property
    def logical_cores(self) -> int:
        """Logical cores of one chip at its default LNC."""
        return self.logical_cores_at(self.default_lnc)

    @property
    def logical_core_bytes(self) -> int:
        """HBM bytes of one logical core at its default LNC."""
        return self.logical_core_bytes_at(self.default_lnc)

    def logical_cores_at(self, lnc: int) -> int:
        """Logical cores of one chip when ``lnc`` physical cores make one.

        Raises ``ConfigError`` for an ``lnc`` the chip does not have.
        """
        if lnc not in self.lnc_values:
            works = " or ".join(map(str, self.lnc_values))
            raise ConfigError("NEURON_LOGICAL_NC_CONFIG", lnc, f"{self.name} takes {works}")
        return self.physical_cores // lnc

    def logical_core_bytes_at(self, lnc: int) -> int:
        """HBM bytes per logical core; half a bank at LNC 1 on trn2 and trn3, where two cores share one."""
        return self.hbm_bytes // self.logical_cores_at(lnc)


def _first_generation(name: str, document: str) -> ChipSpec:
    return ChipSpec(
        name=name,
        physical_cores=2,
        lnc_values=(1,),
        default_lnc=1,
        hbm_bytes=32 * GIB,
        hbm_bytes_per_s=820 * GIB,
        bf16_tflops=190.0,
        fp8_max=None,
        targets=(name,),
        sources=(
            ("physical_cores, hbm_bytes, hbm_bytes_per_s, bf16_tflops", _HARDWARE + document),
            ("lnc_values", "aws-neuron-sdk: compiler/error-codes (NCC_EARG001)"),
            ("targets", _COMPILER),
        ),
    )


CHIPS: dict[str, ChipSpec] = {
    "trn1": _first_generation("trn1", "trainium.rst"),
    "trn1n": _first_generation("trn1n", "trainium.rst"),
    "inf2": _first_generation("inf2", "inferentia2.rst"),
    "trn2": ChipSpec(
        name="trn2",
        physical_cores=8,
        lnc_values=(1, 2),
        default_lnc=2,
        hbm_bytes=96 * GIB,
        hbm_bytes_per_s=2.9e12,
        bf16_tflops=667.0,
        fp8_max=240.0,
        targets=("trn2",),
        sources=(
            ("physical_cores, hbm_bytes, hbm_bytes_per_s, bf16_tflops", _HARDWARE + "trainium2.rst"),
            ("lnc_values, default_lnc", _LNC),
            ("fp8_max", _FP8),
            ("targets", _COMPILER),
        ),
    ),
    "trn3": ChipSpec(
        name="trn3",
        physical_cores=8,
        lnc_values=(1, 2),
        default_lnc=2,
        hbm_bytes=144 * GIB,
        hbm_bytes_per_s=4.9e12,
        bf16_tflops=671.0,
        fp8_max=448.0,
        targets=("trn3", "trn3pre"),
        sources=(
            ("physical_cores, hbm_bytes, hbm_bytes_per_s, bf16_tflops", _HARDWARE + "trainium3.rst"),
            ("lnc_values", _LNC),
            ("default_lnc, targets", _FIELD),
            ("fp8_max", _FP8),
        ),
    ),
}
"""Every supported chip by name."""


def chip_named(name: str) -> ChipSpec:
    """The chip of that name. Raises ``ConfigError`` with the nearest name for an unknown one."""
    if name not in CHIPS:
        raise ConfigError("chip", name, f"unknown chip; {unknown_name_hint(name, CHIPS)}")
    return CHIPS[name]


def chip_for_target(target: str, setting: str = "NEURON_PLATFORM_TARGET_OVERRIDE") -> ChipSpec:
    """The chip a compiler target stands for; a revision suffix (``trn3-rev2``) is allowed.

    Raises ``ConfigError`` naming ``setting`` for an unknown target.
    """
    by_target = {name: chip for chip in CHIPS.values() for name in chip.targets}
    base = target.split("-", 1)[0]
    if base not in by_target:
        raise ConfigError(setting, target, f"unknown compiler target; {unknown_name_hint(base, by_target)}")
    return by_target[base]


def chip_for_instance(instance_type: str) -> ChipSpec | None:
    """The chip of an EC2 instance type such as ``trn2u.48xlarge``, or None if it has no known chip."""
    family = instance_type.strip().split(".", 1)[0].lower()
    return CHIPS.get(family) or CHIPS.get(family.removesuffix("u"))
