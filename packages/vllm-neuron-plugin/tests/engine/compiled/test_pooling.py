# SPDX-License-Identifier: Apache-2.0
"""Embeddings of real engines against transformers in fp32: any batch, any order, whole prompts and chunks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from torch import Tensor
from vllm import PoolingParams
from vllm.v1.core.sched.output import SchedulerOutput

from neuron_core.graphs.buckets import Bucket, Phase

POOLING: dict[str, Any] = {
    "runner": "pooling",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 200,
}
CHUNKS = {
    "max_num_batched_tokens": 96,
    "additional_config": {"neuron_config": {"prefill_buckets": [32, 96], "max_prefill_seqs": 6}},
}
WHOLE = {
    "max_num_batched_tokens": 256,
    "additional_config": {"neuron_config": {"prefill_buckets": [64, 256], "max_prefill_seqs": 6}},
}
EMBED = PoolingParams(task="embed")
HIDDEN = 64


def write(model: Any, folder: Path, tokenizer: Path) -> Path:
    """Save a model with another's tokenizer, which vLLM wants of a pooling model even where nothing is text."""
    vary_norms(model)
    model.save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def vary_norms(model: Any) -> None:
    """All ones would hide a norm that is left out."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower():
                parameter.uniform_(0.5, 1.5)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A random decoder in the form of an embedding checkpoint: no head, Matryoshka dimensions allowed."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        is_matryoshka=True,
    )
    model = Qwen3Model(config).float()
    return write(model, tmp_path_factory.mktemp("qwen3-embedding"), tiny_llama)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    from transformers import BertConfig, BertModel

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = BertModel(config).float()
    return write(model, tmp_path_factory.mktemp("bert"), tiny_llama)


@torch.no_grad()
def hidden_of(folder: Path, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """transformers' last hidden states of each text by itself."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([list(text)])).last_hidden_state[0] for text in texts]


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum().sqrt()


def embed(engine: Any, texts: Sequence[Sequence[int]], params: Any = EMBED, **how: Any) -> list[Tensor]:
    return [output.outputs.data for output in engine.run(texts, params, **how)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def texts(make_prompts: Any) -> list[list[int]]:
    return [[7], [9] * 256, *make_prompts(26, 256, seed=11)]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def decoder(request: pytest.FixtureRequest, engines: Any, qwen3: Path) -> Any:
    return engines(qwen3, **POOLING, **CHUNKS, async_scheduling=request.param)


@pytest.mark.supports("pooling models", model="qwen3")
def test_last_token_embeddings_are_those_of_transformers(decoder, qwen3, texts):
    expected = [unit(hidden[-1]) for hidden in hidden_of(qwen3, texts)]
    assert_same(embed(decoder, texts), expected)
    assert_same(embed(decoder, texts[::-1], arrive=1), expected[::-1])


def test_a_failed_step_is_raised_where_nobody_asks_for_its_output(engines, qwen3, monkeypatch):
    engine = engines(qwen3, **POOLING, **CHUNKS, async_scheduling=True, seed=1)
    runner = engine.runner

    def failing(*args: Any) -> Any:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(runner.executor, "run", failing)
    engine.add([1, 2, 3], EMBED)
    runner.execute_model(engine.scheduler.schedule())  # as on a rank whose answers vLLM does not read
    runner.stream.submit(lambda: None).result()
    with pytest.raises(RuntimeError, match="on fire"):
        runner.execute_model(SchedulerOutput.make_empty())
    engines.made.pop(next(key for key, made in engines.made.items() if made is engine))
    engine.engine.engine_core.shutdown()


def test_a_text_alone_and_in_any_batch(decoder, texts):
    together = embed(decoder, texts)
    alone = [embed(decoder, [text])[0] for text in texts[:8]]
    assert_same(alone, together[:8])


def test_dimensions_and_normalisation_are_each_requests_own(decoder, qwen3, texts):
    some = texts[:6]
    params = [
        EMBED,
        PoolingParams(task="embed", dimensions=16),
        PoolingParams(task="embed", use_activation=False),
        PoolingParams(task="embed", dimensions=5, use_activation=False),
        PoolingParams(task="embed", dimensions=HIDDEN),
        EMBED,
    ]
    last = [hidden[-1] for hidden in hidden_of(qwen3, some)]
    expected = [unit(last[0]), unit(last[1][:16]), last[2], last[3][:5], unit(last[4]), unit(last[5])]
    found = embed(decoder, some, params)
    assert [len(row) for row in found] == [HIDDEN, 16, HIDDEN, 5, HIDDEN, HIDDEN]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_prefix_hit_changes_nothing(decoder, texts):
    first = embed(decoder, [texts[1]])
    decoder.engine.reset_prefix_cache()
    cached_before = embed(decoder, [texts[1][:160]])
    (output,) = decoder.run([texts[1]], EMBED)
    assert output.num_cached_tokens >= 144
    assert_same([output.outputs.data], first)
    assert_same(embed(decoder, [texts[1][:160]]), cached_before)


def test_a_preempted_text_is_computed_again(decoder, texts):
    expected = embed(decoder, [texts[1]])
    decoder.engine.reset_prefix_cache()
    name = decoder.add(texts[1], EMBED)
    assert not any(output.finished for output in decoder.step().values())
    preempted = decoder.preemptions
    assert decoder.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert decoder.preemptions == preempted + 1
    finished = {}
    while name not in finished:
        finished |= {key: output for key, output in decoder.step().items() if output.finished}
    assert_same([finished[name].outputs.data], expected)


def test_only_graphs_that_embed_are_compiled(decoder, texts):
    programs = decoder.runner.executor._programs
    assert {(bucket.phase, bucket.num_tokens, variant) for bucket, variant in programs} == {
        (Phase.EMBED, 32, "hidden"),
        (Phase.EMBED, 96, "hidden"),
    }
    before = decoder.graph_counts()
    embed(decoder, texts)
    assert decoder.graph_counts() == before


def counted(name: str, **labels: str) -> float:
    """A counter of the plugin, summed over all labels but those given."""
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"vllm_neuron:{name}" and labels.items() <= sample.labels.items()
    )


def test_steps_padding_and_overlap_are_counted(decoder, texts, monkeypatch):
    steps: list[tuple[Bucket, int, bool]] = []
    submit = decoder.runner._submit

    def watching(step: Any) -> Any:
        execution = submit(step)
        overlapped = decoder.runner._in_flight[-1].overlapped
        steps.append((step.batch.bucket, sum(step.batch.num_scheduled), overlapped))
        return execution

    monkeypatch.setattr(decoder.runner, "_submit", watching)
    names = ("async_steps_total", "sync_fallback_steps_total", "host_gap_seconds_count")
    decoder.check_idle()
    before = {name: counted(name) for name in names}
    graphs = {
        name: counted("graph_executions_total", bucket_name=name) for name in ("embed_s32", "embed_s96")
    }
    padding = counted("num_batched_tokens_padding_sum")
    embed(decoder, texts)
    decoder.check_idle()
    for name, count in graphs.items():
        ran = sum(bucket.name == name for bucket, _, _ in steps)
        assert counted("graph_executions_total", bucket_name=name) - count == ran > 0
    assert (
        counted("num_batched_tokens_padding_sum") - padding == sum(b.num_tokens - n for b, n, _ in steps) > 0
    )
    gone = {name: counted(name) - before[name] for name in names}
    overlapped = sum(each for *_, each in steps)
    assert gone["async_steps_total"] == overlapped
    assert gone["sync_fallback_steps_total"] == 0
    assert gone["host_gap_seconds_count"] >= max(overlapped, 2)  # of long texts each chunk follows another
    if decoder.core.vllm_config.scheduler_config.async_scheduling:
        assert overlapped > 0
    else:
        assert overlapped == 0


POOLED = {"CLS": lambda hidden: hidden[0], "MEAN": lambda hidden: hidden.mean(0)}


@pytest.fixture(scope="module", params=[("MEAN", False), ("CLS", True)], ids=["mean-sync", "cls-async"])
def encoder(request: pytest.FixtureRequest, engines: Any, bert: Path) -> tuple[Any, Any]:
    kind, overlap = request.param
    settings = {"pooler_config": {"pooling_type": kind}, "async_scheduling": overlap}
    return engines(bert, **POOLING, **WHOLE, **settings), POOLED[kind]


@pytest.mark.supports("pooling models", model="bert")
def test_encoder_embeddings_are_those_of_transformers(encoder, bert, texts):
    engine, pool = encoder
    expected = [unit(pool(hidden)) for hidden in hidden_of(bert, texts)]
    assert_same(embed(engine, texts), expected)
    assert_same(embed(engine, texts[::-1], arrive=1), expected[::-1])
    assert_same([embed(engine, [text])[0] for text in texts[:6]], expected[:6])


def test_an_encoder_keeps_no_cache_and_compiles_nothing_later(encoder, texts):
    engine, _ = encoder
    assert engine.runner.executor.kv_tensors == ()
    before = engine.graph_counts()
    embed(engine, texts)
    assert engine.graph_counts() == before


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3", "bert"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_two_ranks_give_the_same_embeddings(request, engines, texts, family, overlap):
    folder = request.getfixturevalue(family)
    shapes = CHUNKS if family == "qwen3" else WHOLE
    engine = engines(folder, **POOLING, **shapes, tensor_parallel_size=2, async_scheduling=overlap)
    pool = -1 if family == "qwen3" else 0
    assert_same(embed(engine, texts), [unit(hidden[pool]) for hidden in hidden_of(folder, texts)])
