# SPDX-License-Identifier: Apache-2.0
"""What engine the graphs in a cache were compiled for, so that a server of other shapes is refused by name."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_core.errors import ConfigError
from neuron_core.graphs.key import text_digest
from vllm_neuron.checks import kv_dtype
from vllm_neuron.config import bucket_plan, neuron_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["EngineRecord", "require_engine"]

FOLDER = "engines"
_NOT_SHAPES = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class EngineRecord:
    """The settings that decide an engine's graphs; ``model`` is a digest of the model's configuration."""

    model: str
    dtype: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    compiler: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    prefill_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    decode_context_length_buckets: tuple[int, ...]
    max_prefill_seqs: int
    enable_prompt_embeds: bool

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> EngineRecord:
        """Of an engine's configuration."""
        model, plan = vllm_config.model_config, bucket_plan(vllm_config)
        sizes = {
            key: value for key, value in model.hf_text_config.to_dict().items() if key not in _NOT_SHAPES
        }
        return cls(
            model=text_digest(json.dumps(sizes, sort_keys=True, default=str)),
            dtype=str(model.dtype),
            kv_cache_dtype=str(kv_dtype(vllm_config)),
            tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
            compiler=neuron_config(vllm_config).compiler,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            block_size=plan.block_size,
            prefill_buckets=tuple(plan.prefill_tokens),
            decode_buckets=tuple(plan.decode_seqs),
            decode_context_length_buckets=tuple(plan.decode_contexts),
            max_prefill_seqs=plan.max_prefill_seqs,
            enable_prompt_embeds=model.enable_prompt_embeds,
        )

    def write(self, cache_dir: Path) -> None:
        """Keep it beside the graphs."""
        content = json.dumps(asdict(self), indent=1)
        folder = cache_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{uuid.uuid4().hex}.tmp"
        temporary.write_text(content)
        os.replace(temporary, folder / f"{text_digest(content)[:32]}.json")

    def differences(self, other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """``(setting, ours, theirs)`` of each setting that a stored record has otherwise."""
        ours = json.loads(json.dumps(asdict(self)))
        return [(name, value, other.get(name)) for name, value in ours.items() if other.get(name) != value]


def require_engine(vllm_config: VllmConfig, cache_dir: Path) -> None:
    """Raise ``ConfigError`` when graphs of this model were compiled here, but for an engine of other shapes.

    The error names the setting, its value and the value the graphs have. A cache without a record of this model
    says nothing: what is missing is then named bucket by bucket.
    """
    ours = EngineRecord.of(vllm_config)
    stored = [
        record
        for record in _read(cache_dir)
        if (record.get("model"), record.get("dtype")) == (ours.model, ours.dtype)
    ]
    candidates = [ours.differences(record) for record in stored]
    if not candidates or [] in candidates:
        return
    nearest = min(candidates, key=len)
    name, value, theirs = nearest[0]
    also = "".join(f", {setting}={other!r} instead of {own!r}" for setting, own, other in nearest[1:])
    raise ConfigError(
        name,
        value,
        f"the graphs in {cache_dir} were compiled for {name}={theirs!r}{also}, and VLLM_NEURON_REQUIRE_COMPILED "
        f"forbids compiling others: use {theirs!r}, or run `neuron compile` with the settings of this server",
    )


def _read(cache_dir: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for path in sorted((cache_dir / FOLDER).glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # half written by a process that died; the graphs themselves are checked one by one
        if isinstance(record, dict):
            records.append(record)
    return records
