# SPDX-License-Identifier: Apache-2.0
"""What a server's flags become: given and effective values, and who changed what on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from neuron_core.errors import NeuronError
from vllm_neuron.cli.arguments import ServeArguments, flag_name
from vllm_neuron.defaults import SCHEDULER, WORKER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Change", "Flag", "Resolved", "plain", "resolve", "settings_of"]

HOOKS = ("apply_config_platform_defaults", "check_and_update_config")
"""Where vLLM lets a platform change its configuration."""

FIRST = ("model_config", "cache_config", "parallel_config", "scheduler_config", "load_config")
"""Parts of the configuration whose fields are flags of the same name; looked through before the others."""

PLACES = {
    "kv_cache_dtype": "cache_config.cache_dtype",
    "scheduling_policy": "scheduler_config.policy",
    "cpu_offload_gb": "offload_config.uva.cpu_offload_gb",
    "cpu_offload_params": "offload_config.uva.cpu_offload_params",
    "offload_group_size": "offload_config.prefetch.offload_group_size",
    "attention_backend": "attention_config.backend",
}
"""Flags that vLLM keeps under another name."""

SECRETS = ("api_key", "hf_token", "ssl_keyfile_password")
"""Settings whose value is nobody's business."""

_OWN_COMPILER = "vLLM compiles nothing here: graphs are captured and compiled by neuron_core"
WHY = {
    "compilation_config.mode": _OWN_COMPILER,
    "compilation_config.cudagraph_mode": _OWN_COMPILER,
    "parallel_config.worker_cls": f"{WORKER} runs the compiled graphs",
    "scheduler_config.scheduler_cls": f"{SCHEDULER} gives every step a shape that is compiled",
}
"""Why the plugin sets what it sets."""

_BY_PLUGIN = "set by the plugin"
_BY_VLLM = "settled by vLLM"
_BY_SERVER = "read by the HTTP server"


@dataclass(frozen=True)
class Flag:
    """A flag that was given: ``place`` is where vLLM keeps it (empty: outside of the engine)."""

    name: str
    given: Any
    effective: Any
    place: str
    reason: str

    @property
    def changed(self) -> bool:
        """Whether the server will use another value than the given one."""
        return bool(self.given != self.effective)


@dataclass(frozen=True)
class Change:
    """A setting that the plugin changed while vLLM made its configuration."""

    setting: str
    before: Any
    after: Any

    @property
    def reason(self) -> str:
        """Why."""
        return WHY.get(self.setting, _BY_PLUGIN)


@dataclass(frozen=True)
class Resolved:
    """A server's configuration, and how it came about; ``remarks`` are the warnings it gave."""

    vllm_config: VllmConfig
    flags: tuple[Flag, ...]
    changes: tuple[Change, ...]
    remarks: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """Every setting by its place, such as ``cache_config.block_size``, ready for JSON."""
        return settings_of(self.vllm_config)


def resolve(arguments: ServeArguments) -> Resolved:
    """Make the configuration as the server does; raises what the server would end with."""
    changes: dict[str, Change] = {}
    from vllm.logger import configure_logging_from_args

    # As the server does, and before warnings are collected: it replaces the handlers of vLLM's loggers.
    configure_logging_from_args(arguments.options)
    with _warnings() as remarks, _observed(changes):
        vllm_config = arguments.engine_config()
    flags = tuple(_flag(name, value, vllm_config, changes) for name, value in arguments.given.items())
    return Resolved(vllm_config, flags, tuple(changes.values()), tuple(dict.fromkeys(remarks)))


def settings_of(vllm_config: VllmConfig) -> dict[str, Any]:
    """The configuration, flat: ``part.field`` -> a value ready for JSON; objects of other libraries are left out."""
    found: dict[str, Any] = {}
    for part in fields(vllm_config):
        value = getattr(vllm_config, part.name)
        if is_dataclass(value):
            found.update({f"{part.name}.{name}": plain(field) for name, field in _public(value)})
        else:
            found[part.name] = plain(value)
    return found


def plain(value: Any) -> Any:
    """A value as JSON holds it; of a configuration object, what differs from its defaults."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [
            plain(item) for item in (value if isinstance(value, list | tuple) else sorted(value, key=str))
        ]
    if is_dataclass(value) and not isinstance(value, type):
        return _differing(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value).removeprefix("torch.")


def _differing(value: Any) -> dict[str, Any]:
    default: object = None
    with suppress(TypeError, ValueError):  # it needs arguments: all of it is shown
        default = type(value)()
    mine = {name: plain(field) for name, field in _public(value)}
    theirs = {} if default is None else {name: plain(field) for name, field in _public(default)}
    return {name: field for name, field in mine.items() if name not in theirs or theirs[name] != field}


def _public(part: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(part):
        if not field.name.startswith("_") and hasattr(part, field.name):
            value = getattr(part, field.name)
            if not hasattr(value, "to_dict"):  # a model's own configuration, which is a file of its own
                yield field.name, _shown(field.name, value)


def _shown(name: str, value: Any) -> Any:
    return "(hidden)" if name in SECRETS and value else value


def _flag(name: str, value: Any, vllm_config: VllmConfig, changes: Mapping[str, Change]) -> Flag:
    given = plain(_shown(name, value))
    place = _place(name, vllm_config)
    if not place:
        return Flag(flag_name(name), given, given, "", _BY_SERVER)
    effective = plain(_shown(name, _at(vllm_config, place)))
    touched = [change for change in changes.values() if change.setting.startswith(place)]
    reason = ""
    if given != effective:
        reason = touched[0].reason if touched else _BY_VLLM
    return Flag(flag_name(name), given, effective, place, reason)


def _place(name: str, vllm_config: VllmConfig) -> str:
    if name in PLACES:
        return PLACES[name]
    parts = [field.name for field in fields(vllm_config)]
    if name in parts:
        return name
    for part in (*FIRST, *(part for part in parts if part not in FIRST)):
        value = getattr(vllm_config, part)
        if is_dataclass(value) and hasattr(value, name):
            return f"{part}.{name}"
    return ""


def _at(vllm_config: VllmConfig, place: str) -> Any:
    value: Any = vllm_config
    for name in place.split("."):
        value = getattr(value, name)
    return value


@contextmanager
def _observed(changes: dict[str, Change]) -> Iterator[None]:
    """Note what the platform's hooks change; vLLM calls them while it makes its configuration."""
    from vllm.platforms import current_platform

    from vllm_neuron.platform import NeuronPlatform

    if not isinstance(current_platform, NeuronPlatform):
        chosen = type(current_platform).__name__
        raise NeuronError(f"vLLM chose {chosen} instead of this plugin; `neuron doctor` says why")
    for hook in HOOKS:
        setattr(current_platform, hook, _noting(getattr(current_platform, hook), changes))
    try:
        yield
    finally:
        for hook in HOOKS:
            delattr(current_platform, hook)


def _noting(hook: Callable[[VllmConfig], None], changes: dict[str, Change]) -> Callable[[VllmConfig], None]:
    def call(vllm_config: VllmConfig) -> None:
        before = settings_of(vllm_config)
        hook(vllm_config)
        for setting, after in settings_of(vllm_config).items():
            first = changes[setting].before if setting in changes else before.get(setting)
            if before.get(setting) != after:
                changes[setting] = Change(setting, first, after)

    return call


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of vLLM and of the plugin, which go to the log as well."""
    handler, logger = _Collector(), logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
