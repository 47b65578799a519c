# SPDX-License-Identifier: Apache-2.0
"""Graphs that were compiled for other decode contexts are named before anything is found missing."""

from __future__ import annotations

import pytest

from neuron_core.errors import ConfigError
from vllm_neuron.engine_record import EngineRecord, require_engine


def with_contexts(make_config, contexts):
    neuron = {"decode_context_length_buckets": contexts}
    return make_config(
        max_model_len=256, max_num_batched_tokens=256, additional_config={"neuron_config": neuron}
    )


def test_other_contexts_are_refused_with_both_lists(make_config, tmp_path):
    EngineRecord.of(with_contexts(make_config, [128])).write(tmp_path)
    require_engine(with_contexts(make_config, [128]), tmp_path)
    with pytest.raises(ConfigError, match=r"decode_context_length_buckets=\[\]: .* use \[128\]"):
        require_engine(with_contexts(make_config, []), tmp_path)


def test_a_record_is_of_the_lists_worked_out_and_not_of_what_was_written(make_config):
    assert EngineRecord.of(with_contexts(make_config, None)) == EngineRecord.of(
        with_contexts(make_config, [])
    )


def test_graphs_without_prompt_embeddings_are_refused_by_name(make_config, tmp_path):
    EngineRecord.of(make_config()).write(tmp_path)
    with pytest.raises(ConfigError, match=r"enable_prompt_embeds=True: .* use False"):
        require_engine(make_config(enable_prompt_embeds=True), tmp_path)


def test_another_cache_type_is_refused_with_both(make_config, tmp_path):
    EngineRecord.of(make_config()).write(tmp_path)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='torch.float8_e4m3fn': .* use 'torch\.\w+'"):
        require_engine(make_config(kv_cache_dtype="fp8"), tmp_path)
