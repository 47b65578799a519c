# SPDX-License-Identifier: Apache-2.0
"""Environment variables, read in this module only: what must be known before any configuration exists."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from neuron_core.devices.chips import chip_for_target
from neuron_core.devices.registry import BUILT_IN, device_names
from neuron_core.errors import ConfigError, unknown_name_hint

__all__ = ["KNOWN_NAMES", "Environment", "export", "size_in_bytes", "snapshot", "unknown_names"]

PREFIX = "VLLM_NEURON_"

KNOWN_NAMES = (
    "VLLM_NEURON_DEVICE",
    "VLLM_NEURON_CACHE_DIR",
    "VLLM_NEURON_CACHE_MAX_SIZE",
    "VLLM_NEURON_REMOTE_CACHE",
    "VLLM_NEURON_REMOTE_TIMEOUT",
    "VLLM_NEURON_TRUSTED_DIGESTS",
    "VLLM_NEURON_TRUSTED_KEYS",
    "VLLM_NEURON_REQUIRE_COMPILED",
    "VLLM_NEURON_RETRY_FAILED",
    "VLLM_NEURON_COMPILE_JOBS",
    "VLLM_NEURON_CPU_COMPILE",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "NEURON_VISIBLE_DEVICES",
)
"""Variables a user may set.

Also read, because the Neuron runtime obeys them: ``NEURON_RT_VISIBLE_CORES``, ``NEURON_LOGICAL_NC_CONFIG``;
and, for the default cache directory, ``VLLM_CACHE_ROOT`` and ``XDG_CACHE_HOME``.
"""

_WARM_UP_HINT = (
    "warm-up always runs, so that no request waits for a compile; compiled graphs are loaded from the cache"
)

INERT_NAMES: dict[str, str] = {
    "NEURON_COMPILED_ARTIFACTS": "compiled graphs are kept in VLLM_NEURON_CACHE_DIR",
    "NEURON_LIBTORCH_REMOTE_CACHE": "use VLLM_NEURON_REMOTE_CACHE",
    "NEURON_COMPILE_CACHE_URL": "use VLLM_NEURON_CACHE_DIR, and VLLM_NEURON_REMOTE_CACHE for a shared one",
    "NEURON_LIBTORCH_COMPILATION_TIMEOUT": "a compile may take as long as it needs; others wait and say for whom",
    "NEURON_LIBTORCH_DISABLE_COMPILE_CACHE": "to compile afresh, use an empty VLLM_NEURON_CACHE_DIR",
    "VLLM_NEURON_BACKEND": "the compiler follows from the device; remove it",
    "VLLM_NEURON_CPU_MODE": "use VLLM_NEURON_DEVICE=cpu",
    "VLLM_NEURON_DISABLE_WARMUP_COMPILE": "use VLLM_NEURON_REQUIRE_COMPILED=1",
    "VLLM_NEURON_FRAMEWORK": "there is one framework; remove it",
    "VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION": "use vLLM's --kv-cache-memory-bytes",
    "VLLM_NEURON_MIN_KV_BUDGET_GIB": "start-up stops anyway when one request of --max-model-len does not fit",
    "VLLM_NEURON_SKIP_DECODE_WARMUP": _WARM_UP_HINT,
    "VLLM_NEURON_SKIP_ENCODER_WARMUP": _WARM_UP_HINT,
    "VLLM_NEURON_SKIP_PREFILL_WARMUP": _WARM_UP_HINT,
    "VLLM_NEURON_LOG_LEVEL": "use vLLM's VLLM_LOGGING_LEVEL",
    "VLLM_NEURON_DEBUG_MODE": "use vLLM's VLLM_LOGGING_LEVEL=DEBUG",
}
"""Variables of the official vllm-neuron plugin that do nothing here, and what to use instead."""


@dataclass(frozen=True)
class Environment:
    """What the environment says, checked.

    ``device`` forces a device; None lets discovery choose. ``visible_devices`` are the logical cores the
    ranks on this host may use, in rank order. ``visible_cores`` is what the user set for the runtime itself.
    ``cache_max_bytes`` None lets the compile cache grow; ``remote_timeout_s`` bounds each call to the remote one;
    ``trusted_digests`` and ``trusted_keys`` say which of its entries may be loaded. ``cpu_compile`` compiles and
    stops instead of serving. ``compile_jobs`` None is one compile per CPU of this process.
    """

    device: str | None
    cache_dir: Path
    cache_max_bytes: int | None
    remote_cache: str | None
    remote_timeout_s: float
    trusted_digests: Path | None
    trusted_keys: tuple[Path, ...]
    require_compiled: bool
    retry_failed: bool
    cpu_compile: bool
    compile_jobs: int | None
    platform_target: str | None
    visible_devices: tuple[int, ...] | None
    visible_cores: str | None
    logical_nc_config: int | None

    @classmethod
    def read(cls, mapping: Mapping[str, str] = os.environ) -> Environment:
        """Read and check every variable; an empty value counts as unset.

        Raises ``ConfigError`` for a wrong value.
        """
        values = {name: value.strip() for name, value in mapping.items() if value.strip()}
        cpu_compile = _flag("VLLM_NEURON_CPU_COMPILE", values)
        if cpu_compile and "NEURON_PLATFORM_TARGET_OVERRIDE" not in values:
            hint = "needs NEURON_PLATFORM_TARGET_OVERRIDE, the chip to compile for: cpu, trn2 or trn3"
            raise ConfigError("VLLM_NEURON_CPU_COMPILE", values["VLLM_NEURON_CPU_COMPILE"], hint)
        return cls(
            device=_device(values),
            cache_dir=_cache_dir(values),
            cache_max_bytes=_size("VLLM_NEURON_CACHE_MAX_SIZE", values),
            remote_cache=values.get("VLLM_NEURON_REMOTE_CACHE"),
            remote_timeout_s=_seconds("VLLM_NEURON_REMOTE_TIMEOUT", values, 10.0),
            trusted_digests=_file("VLLM_NEURON_TRUSTED_DIGESTS", values.get("VLLM_NEURON_TRUSTED_DIGESTS")),
            trusted_keys=_files("VLLM_NEURON_TRUSTED_KEYS", values),
            require_compiled=_flag("VLLM_NEURON_REQUIRE_COMPILED", values),
            retry_failed=_flag("VLLM_NEURON_RETRY_FAILED", values),
            cpu_compile=cpu_compile,
            compile_jobs=_count("VLLM_NEURON_COMPILE_JOBS", values),
            platform_target=_platform_target(values),
            visible_devices=_visible_devices(values),
            visible_cores=values.get("NEURON_RT_VISIBLE_CORES"),
            logical_nc_config=_logical_nc_config(values),
        )

    def check_multiprocess(self) -> None:
        """Raise ``ConfigError`` if the user set ``NEURON_RT_VISIBLE_CORES`` and worker processes will start.

        A core belongs to one process, and each worker sets the variable for itself. Call this in the process
        that starts the workers, before it does.
        """
        if self.visible_cores is not None:
            hint = "each worker sets this for its own core; unset it and list cores in NEURON_VISIBLE_DEVICES"
            raise ConfigError("NEURON_RT_VISIBLE_CORES", self.visible_cores, hint)


def export(variables: Mapping[str, str]) -> None:
    """Set variables for this process and the ones it starts, for libraries that read them at load time."""
    os.environ.update(variables)


def snapshot() -> dict[str, str]:
    """Every variable of this process as it is now."""
    return dict(os.environ)


def unknown_names(mapping: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are set and do nothing here: name -> one sentence saying so and what to use instead.

    Covers misspelt ``VLLM_NEURON_*`` names and the variables of the official vllm-neuron plugin.
    """
    found = {}
    for name in sorted(mapping):
        if name in KNOWN_NAMES:
            continue
        if name in INERT_NAMES:
            found[name] = f"{name} has no effect in this plugin: {INERT_NAMES[name]}"
        elif name.startswith(PREFIX):
            ours = [known for known in KNOWN_NAMES if known.startswith(PREFIX)]
            found[name] = f"{name} is not a known variable and has no effect: {unknown_name_hint(name, ours)}"
    return found


def size_in_bytes(setting: str, text: str) -> int:
    """Bytes of a size such as ``20GiB``, ``500MB`` or ``1048576``; raises ``ConfigError`` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(setting, text, "is not a size; 20GiB works")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def _size(name: str, values: Mapping[str, str]) -> int | None:
    return size_in_bytes(name, values[name]) if name in values else None


def _seconds(name: str, values: Mapping[str, str], default: float) -> float:
    text = values.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(name, text, "must be a number of seconds above 0; 10 works")
    return seconds


def _count(name: str, values: Mapping[str, str]) -> int | None:
    text = values.get(name)
    if text is not None and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(name, text, "must be a whole number of at least 1; 1 works")
    return None if text is None else int(text)


def _file(name: str, text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(name, text, "is no file; name an existing one")
    return path


def _files(name: str, values: Mapping[str, str]) -> tuple[Path, ...]:
    parts = [part for part in values.get(name, "").split(os.pathsep) if part]
    return tuple(path for part in parts if (path := _file(name, part)) is not None)


def _device(values: Mapping[str, str]) -> str | None:
    device = values.get("VLLM_NEURON_DEVICE")
    # Asking what others add reads the metadata of every installed distribution.
    if device is not None and device not in BUILT_IN and device not in (known := device_names()):
        hint = f"{unknown_name_hint(device, known)} (unset chooses)"
        raise ConfigError("VLLM_NEURON_DEVICE", device, hint)
    return device


def _cache_dir(values: Mapping[str, str]) -> Path:
    if "VLLM_NEURON_CACHE_DIR" in values:
        path = Path(values["VLLM_NEURON_CACHE_DIR"]).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise ConfigError(
                "VLLM_NEURON_CACHE_DIR", str(path), "is a file; name a directory (it may not exist yet)"
            )
        return path
    # The same default root as vLLM's own, so that one volume mount keeps both caches.
    user_cache = values.get("XDG_CACHE_HOME", "~/.cache")
    root = Path(values.get("VLLM_CACHE_ROOT", f"{user_cache}/vllm"))
    return root.expanduser().absolute() / "neuron"


def _flag(name: str, values: Mapping[str, str]) -> bool:
    value = values.get(name, "0")
    if value.lower() not in ("0", "1", "false", "true"):
        raise ConfigError(name, value, "must be 0 or 1")
    return value.lower() in ("1", "true")


def _platform_target(values: Mapping[str, str]) -> str | None:
    target = values.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    if target is not None and target != "cpu":
        chip_for_target(target)
    return target


def _visible_devices(values: Mapping[str, str]) -> tuple[int, ...] | None:
    name = "NEURON_VISIBLE_DEVICES"
    text = values.get(name)
    if text is None:
        return None
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(
                name, text, f"cannot read {part.strip()!r}; use core numbers and ranges such as 0,1,4-7"
            )
        cores.extend(range(int(first), int(last or first) + 1))
    if len(set(cores)) != len(cores):
        raise ConfigError(name, text, "lists a core twice; a core belongs to one process")
    return tuple(cores)


def _logical_nc_config(values: Mapping[str, str]) -> int | None:
    text = values.get("NEURON_LOGICAL_NC_CONFIG")
    if text is None:
        return None
    if text not in ("1", "2"):
        raise ConfigError("NEURON_LOGICAL_NC_CONFIG", text, "must be 1 or 2")
    return int(text)
