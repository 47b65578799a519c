# SPDX-License-Identifier: Apache-2.0
"""The plugin's settings, ``--additional-config '{"neuron_config": {…}}'``, parsed into ``NeuronConfig``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_core.errors import ConfigError, unknown_name_hint
from neuron_core.graphs.buckets import BucketPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_neuron.accuracy.settings import CaptureSettings, ReplacementSettings, SnapshotSettings

__all__ = ["COMPILERS", "NeuronConfig", "bucket_plan", "neuron_config", "reference_markdown"]

SECTION = "neuron_config"
COMPILERS = ("inductor", "fx")

Check = Callable[[str, object], Any]


def _whole_numbers(setting: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_is_int(item) for item in value):
        raise ConfigError(
            setting, value, "must be a list of whole numbers; [128, 256, 512] works for a maximum of 512"
        )
    return tuple(value)


def _positive(setting: str, value: object) -> int:
    if not _is_int(value) or value < 1:  # type: ignore[operator]
        raise ConfigError(setting, value, "must be a whole number of at least 1; 1 works")
    return value  # type: ignore[return-value]


def _flag(setting: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(setting, value, "must be true or false; true works")
    return value


def _compiler(setting: str, value: object) -> str:
    if value not in COMPILERS:
        hint = unknown_name_hint(str(value), COMPILERS)
        raise ConfigError(setting, value, f"no such compiler; {hint}")
    return str(value)


def _file(setting: str, value: object) -> str:
    if not isinstance(value, str) or not Path(value).is_file():
        raise ConfigError(
            setting, value, "must be the path of a file that exists; leave it out to use the model's"
        )
    return value


def _capture(setting: str, value: object) -> CaptureSettings:
    from vllm_neuron.accuracy.settings import parse_capture

    return parse_capture(setting, value)


def _replacement(setting: str, value: object) -> ReplacementSettings:
    from vllm_neuron.accuracy.settings import parse_replacement

    return parse_replacement(setting, value)


def _snapshots(setting: str, value: object) -> SnapshotSettings:
    from vllm_neuron.accuracy.settings import parse_snapshots

    return parse_snapshots(setting, value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _setting(default: object, check: Check, doc: str, *, kind: str, optional: bool = False) -> Any:
    metadata = {"check": check, "doc": doc, "kind": kind, "optional": optional}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class NeuronConfig:
    """Everything under ``neuron_config``; each field's meaning is in its metadata and on the docs page."""

    prefill_buckets: tuple[int, ...] | None = _setting(
        None,
        _whole_numbers,
        "Token counts a prefill step is padded to. Strictly ascending, each a multiple of the "
        "tensor-parallel size, ending exactly at the smaller of `max_num_batched_tokens` and "
        "`max_model_len` (rounded up to a multiple of the tensor-parallel size). Default: powers of two from "
        "64, and from 128 what lies half-way between them, up to that end.",
        kind="list of integers",
        optional=True,
    )
    decode_buckets: tuple[int, ...] | None = _setting(
        None,
        _whole_numbers,
        "Request counts a decode step is padded to. Strictly ascending, ending exactly at `max_num_seqs`. "
        "Default: powers of two from 1 up to that end.",
        kind="list of integers",
        optional=True,
    )
    decode_context_length_buckets: tuple[int, ...] | None = _setting(
        None,
        _whole_numbers,
        "Contexts, in tokens, that the block tables of a decode step are cut to. Strictly ascending, each below "
        "`max_model_len`, whose own context is always added, and a multiple of the block size and, where "
        "`max_model_len` exceeds 128, of 128. `[]` leaves the full context alone. Default: powers of two from 512, "
        "or of four or more where those would make more than 48 decode buckets.",
        kind="list of integers",
        optional=True,
    )
    max_prefill_seqs: int | None = _setting(
        None,
        _positive,
        "Most requests packed into one prefill step, at most `max_num_seqs`. Default: 8, or `max_num_seqs` "
        "if less.",
        kind="integer",
        optional=True,
    )
    max_consecutive_prefills: int = _setting(
        8,
        _positive,
        "Most prefill steps in a row while requests wait to decode. A small value keeps the time between "
        "tokens short under load, a large one the time to first token.",
        kind="integer",
    )
    compiler: str = _setting(
        "inductor",
        _compiler,
        "What turns a captured graph into an executable: `inductor` generates machine code, `fx` interprets "
        "the graph node by node (slow; for finding faults).",
        kind="one of `inductor`, `fx`",
    )
    kv_scales: str | None = _setting(
        None,
        _file,
        "A safetensors file with the scales of an FP8 KV cache (`--kv-cache-dtype fp8`). Default: "
        "`kv_scales.safetensors` in the model's folder, else the checkpoint's own scales, else 1.0.",
        kind="path",
        optional=True,
    )
    on_device_sampling: bool = _setting(
        True,
        _flag,
        "Sample inside the graph, so that logits stay on the device unless a request asks for something that "
        "needs them. `false` moves every request's sampling to the host.",
        kind="boolean",
    )

    tensor_capture: CaptureSettings | None = _setting(  # noqa: RUF009 -- frozen too
        None,
        _capture,
        "Write tensors of modules, and KV caches, to `folder` as steps compute them: `modules`, `tensors`, `phases`, "
        "`steps`, `requests`, `ranks`, `kv`, `max_bytes`. For comparing runs; see Captures.",
        kind="object",
        optional=True,
    )
    tensor_replacement: ReplacementSettings | None = _setting(  # noqa: RUF009 -- frozen too
        None,
        _replacement,
        "Let outputs of `modules` be taken from the capture in `folder` instead; which are, `neuron-accuracy bisect` "
        "says while the engine runs.",
        kind="object",
        optional=True,
    )
    input_snapshots: SnapshotSettings | None = _setting(  # noqa: RUF009 -- frozen too
        None,
        _snapshots,
        "Keep graphs with their inputs and outputs in `folder`, of the steps that `steps`, `tokens` or `requests` "
        "select; also `parts`, `ranks`, `max_snapshots`. `neuron-accuracy replay` runs them.",
        kind="object",
        optional=True,
    )

    @property
    def observes(self) -> bool:
        """Whether anything looks into steps."""
        return bool(self.tensor_capture or self.tensor_replacement or self.input_snapshots)

    @classmethod
    def from_additional_config(cls, additional: object) -> NeuronConfig:
        """Parse ``--additional-config``; raises ``ConfigError`` on an unknown key, wrong type or value."""
        section = _section(additional)
        known = {item.name: item for item in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in section.items():
            setting = f"{SECTION}.{name}"
            if name not in known:
                raise ConfigError(setting, value, f"unknown key; {unknown_name_hint(str(name), known)}")
            metadata = known[name].metadata
            values[name] = (
                None if value is None and metadata["optional"] else metadata["check"](setting, value)
            )
        return cls(**values)


def _section(additional: object) -> Mapping[str, object]:
    works = 'use {"neuron_config": {}}'
    if not isinstance(additional, Mapping):
        raise ConfigError("additional_config", additional, f"must be a JSON object; {works}")
    for name, value in additional.items():
        if name != SECTION:
            raise ConfigError(
                f"additional_config.{name}", value, f"unknown key; {unknown_name_hint(str(name), [SECTION])}"
            )
    section = additional.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"additional_config.{SECTION}", section, f"must be a JSON object; {works}")
    return section


def neuron_config(vllm_config: VllmConfig) -> NeuronConfig:
    """The settings of this engine; raises ``ConfigError`` naming what cannot be used."""
    return NeuronConfig.from_additional_config(vllm_config.additional_config)


def bucket_plan(vllm_config: VllmConfig, tensor_parallel_size: int | None = None) -> BucketPlan:
    """The shapes this engine compiles: a pure function of the configuration, equal in every process.

    ``tensor_parallel_size`` asks for those of another number of ranks; ``ConfigError`` if it does not divide them.
    """
    settings = neuron_config(vllm_config)
    scheduler = vllm_config.scheduler_config
    return BucketPlan.from_limits(
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        block_size=vllm_config.cache_config.block_size,
        prefill_buckets=settings.prefill_buckets,
        decode_buckets=settings.decode_buckets,
        decode_context_length_buckets=settings.decode_context_length_buckets,
        max_prefill_seqs=settings.max_prefill_seqs,
        token_multiple=tensor_parallel_size or vllm_config.parallel_config.tensor_parallel_size,
        pooling=vllm_config.model_config.runner_type == "pooling",
    )


def reference_markdown() -> str:
    """The settings as a Markdown table: the source of the table in ``docs/configuration.md``."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for item in fields(NeuronConfig):
        kind = item.metadata["kind"] + (" or null" if item.metadata["optional"] else "")
        rows.append(f"| `{item.name}` | {kind} | `{json.dumps(item.default)}` | {item.metadata['doc']} |")
    return "\n".join(rows) + "\n"
