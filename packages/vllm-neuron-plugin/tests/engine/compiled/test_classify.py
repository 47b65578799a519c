# SPDX-License-Identifier: Apache-2.0
"""Classes and scores of pairs of real engines against transformers' …ForSequenceClassification in fp32."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import PoolingParams

CLASSIFY = PoolingParams(task="classify")
LOGITS = PoolingParams(task="classify", use_activation=False)
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 80,
}
WORDS = [f"word{index}" for index in range(100)]
QUERY = "word1 word2 word3"
DOCUMENTS = ["word4 word5", "word3 word2 word1 word7 word8 word9", "word1", "word2 word3 word50 word51 " * 8]


def shapes(tokens: int) -> dict[str, Any]:
    """Limits of steps; graphs are interpreted, which starts faster."""
    buckets = {"compiler": "fx", "prefill_buckets": [32, tokens], "max_prefill_seqs": 6}
    return {"max_num_batched_tokens": tokens, "additional_config": {"neuron_config": buckets}}


def write(model: Any, folder: Path) -> Path:
    """Save a model whose norms, biases and heads all count."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias") or "token_type" in name or name.startswith("score"):
                parameter.normal_(std=0.3)
    model.float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def make_bert(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``make_bert(labels)``: a random encoder with that many classes, and a tokenizer of words that knows pairs."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    def make(labels: int) -> Path:
        torch.manual_seed(labels)
        folder = tmp_path_factory.mktemp(f"bert-{labels}")
        write(BertForSequenceClassification(BertConfig(**SIZES, num_labels=labels)), folder)
        words = folder / "vocab.txt"
        words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
        BertTokenizerFast(str(words), model_max_length=128).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def make_decoder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Any:
    """``make_decoder(family, labels)``: a random decoder with that many classes."""
    import transformers

    def make(family: str, labels: int) -> Path:
        torch.manual_seed(labels)
        folder = tmp_path_factory.mktemp(f"{family}-{labels}")
        config = getattr(transformers, f"{family}Config")(
            **SIZES, num_key_value_heads=2, head_dim=16, num_labels=labels, pad_token_id=2
        )
        write(getattr(transformers, f"{family}ForSequenceClassification")(config), folder)
        for file in tiny_llama.glob("tokenizer*.json"):
            shutil.copy(file, folder)
        return folder

    return make


@torch.no_grad()
def logits_of(folder: Path, **inputs: Any) -> Tensor:
    """transformers' logits of one text or pair by itself."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return model(**{name: torch.tensor([list(values)]) for name, values in inputs.items()}).logits[0]


def pair_of(folder: Path, query: str, document: str | None = None) -> dict[str, Any]:
    """A pair, or one text, as transformers tokenizes it."""
    from transformers import AutoTokenizer

    return dict(AutoTokenizer.from_pretrained(folder)(query, document))


def classes(engine: Any, texts: Sequence[Sequence[int]], params: Any = CLASSIFY, **how: Any) -> list[Tensor]:
    return [output.outputs.data for output in engine.run(texts, params, **how)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def texts(make_prompts: Any) -> list[list[int]]:
    return [[7], [9] * 128, *make_prompts(10, 128, seed=12)]


def check_classes(engine: Any, folder: Path, texts: list[list[int]]) -> None:
    """Probabilities and logits, in any order, together and alone."""
    logits = [logits_of(folder, input_ids=text) for text in texts]
    expected = [x.softmax(-1) if len(x) > 1 else x.sigmoid() for x in logits]
    assert_same(classes(engine, texts), expected)
    assert_same(classes(engine, texts[::-1], arrive=1), expected[::-1])
    assert_same([classes(engine, [text])[0] for text in texts[:3]], expected[:3])
    params = [CLASSIFY, LOGITS, LOGITS]
    assert_same(classes(engine, texts[:3], params), [expected[0], logits[1], logits[2]])


@pytest.mark.supports("classification and scoring", model="bert")
def test_an_encoders_classes_are_those_of_transformers(engines, make_bert, texts):
    folder = make_bert(3)
    engine = engines(folder, **SETTINGS, **shapes(128))
    check_classes(engine, folder, texts)
    with pytest.raises(ValueError, match="num_labels == 1"):
        engine.llm.score(QUERY, DOCUMENTS, use_tqdm=False)


def check_decoder(engines: Any, folder: Path, texts: list[list[int]], **settings: Any) -> None:
    """Long texts come in chunks."""
    check_classes(engines(folder, **SETTINGS, **shapes(64), **settings), folder, texts)


@pytest.mark.supports("classification and scoring", model="llama")
def test_a_llamas_classes_are_those_of_transformers(engines, make_decoder, texts):
    check_decoder(engines, make_decoder("Llama", 3), texts)


@pytest.mark.supports("classification and scoring", model="qwen3")
def test_a_qwen3s_scores_are_those_of_transformers(engines, make_decoder, texts):
    check_decoder(engines, make_decoder("Qwen3", 1), texts, async_scheduling=True)


def test_logits_are_calibrated_as_asked(engines, make_bert, texts):
    folder = make_bert(2)
    settings = {"pooler_config": {"logit_mean": 0.25, "logit_sigma": 2.0}}
    engine = engines(folder, **SETTINGS, **shapes(128), **settings)
    logits = [logits_of(folder, input_ids=text) for text in texts[:4]]
    assert_same(classes(engine, texts[:4]), [((x - 0.25) / 2.0).softmax(-1) for x in logits])


@pytest.fixture(scope="module")
def cross_encoder(engines: Any, make_bert: Any) -> tuple[Any, Path]:
    folder = make_bert(1)
    return engines(folder, **SETTINGS, **shapes(128)), folder


def test_the_score_of_a_pair_is_that_of_a_cross_encoder(cross_encoder):
    engine, folder = cross_encoder
    pairs = [pair_of(folder, QUERY, document) for document in DOCUMENTS]
    expected = [float(logits_of(folder, **pair).sigmoid()) for pair in pairs]
    untyped = [float(logits_of(folder, input_ids=pair["input_ids"]).sigmoid()) for pair in pairs]
    assert max(abs(a - b) for a, b in zip(expected, untyped, strict=True)) > 0.01
    found = [output.outputs.score for output in engine.llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert found == pytest.approx(expected, abs=2e-5)


def test_pairs_and_single_texts_share_steps(cross_encoder):
    engine, folder = cross_encoder
    pairs = [pair_of(folder, QUERY, document) for document in DOCUMENTS]
    asked, params, expected = [], [], []
    for pair in pairs:
        ids = pair["input_ids"]
        start = pair["token_type_ids"].index(1)
        both = {"compressed_token_type_ids": start}
        asked += [ids, ids]
        params += [CLASSIFY, PoolingParams(task="classify", extra_kwargs=both)]
        expected += [logits_of(folder, input_ids=ids).sigmoid(), logits_of(folder, **pair).sigmoid()]
    assert_same(classes(engine, asked, params), expected)


def test_a_server_that_classifies_does_not_embed(cross_encoder):
    engine, _ = cross_encoder
    assert engine.core.get_supported_tasks() == ("classify",)
    with pytest.raises(ValueError, match="embed"):
        engine.llm.embed(QUERY, use_tqdm=False)


def post(url: str, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.nightly
def test_the_routes_of_a_server(start_server, make_bert, graph_cache, tmp_path):
    folder = make_bert(1)
    # fmt: off
    limits = [
        "--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "128",
        "--served-model-name", "tiny",
        "--additional-config", '{"neuron_config": {"compiler": "fx", "prefill_buckets": [128]}}',
    ]
    # fmt: on
    server = start_server(graph_cache, tmp_path / "serve.log", folder, limits)
    server.wait_until_ready()
    expected = [float(logits_of(folder, **pair_of(folder, QUERY, text)).sigmoid()) for text in DOCUMENTS]
    status, answer = post(server.url, "/score", model="tiny", queries=QUERY, documents=DOCUMENTS)
    assert status == 200
    assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-4)
    status, answer = post(server.url, "/rerank", model="tiny", query=QUERY, documents=DOCUMENTS)
    assert status == 200
    ranked = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    assert [item["index"] for item in answer["results"]] == ranked
    status, answer = post(server.url, "/classify", model="tiny", input=QUERY)
    ids = pair_of(folder, QUERY)["input_ids"]
    assert status == 200
    assert answer["data"][0]["probs"] == pytest.approx(
        logits_of(folder, input_ids=ids).sigmoid().tolist(), abs=1e-4
    )
    assert post(server.url, "/v1/embeddings", model="tiny", input=QUERY)[0] in (400, 404)
    status, answer = post(server.url, "/pooling", model="tiny", input=QUERY, task="token_classify")
    assert status == 400 and "token_classify" in json.dumps(answer)
    server.stop()
