# SPDX-License-Identifier: Apache-2.0
"""Turn a quantised GGUF file into a Hugging Face folder: ``python -m neuron_models.gguf GGUF OUT``.

The weights are dequantised to bfloat16; tokenizer and chat template come out of the same file, so a model
that is only published as GGUF can be served with no network. Needs the extra ``gguf``.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from neuron_core.errors import CheckpointError

MANIFEST = "neuron_gguf.json"
FORMAT = 1
SHARD_BYTES = 2 << 30

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_path: str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> Path:
    """Write the Llama-architecture model in ``gguf_path`` as the Hugging Face folder ``out_dir``; return it.

    The folder appears complete or not at all, and is kept as it is when it already holds this file's
    conversion. Raises `CheckpointError` if the file is not a Llama model this can convert or ``out_dir``
    holds something else, `ModuleNotFoundError` if the extra is not installed.
    """
    source, target = Path(gguf_path), Path(out_dir)
    if not source.is_file():
        raise CheckpointError(f"{source}: no such GGUF file")
    manifest = {"format": FORMAT, "source": source.name, "sha256": _sha256(source)}
    if _is_complete(target, manifest):
        return target
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(
            f"{target}: holds something other than the conversion of {source.name}; give an empty folder"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_folder(source, staging)
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        staging.chmod(0o755)
        _publish(staging, target, manifest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _is_complete(folder: Path, manifest: dict[str, Any]) -> bool:
    path = folder / MANIFEST
    return path.is_file() and json.loads(path.read_text()) == manifest


def _publish(staging: Path, target: Path, manifest: dict[str, Any]) -> None:
    try:
        os.rename(staging, target)
    except OSError:
        # Another process may have published the same conversion first; its copy is as good as ours.
        if not _is_complete(target, manifest):
            raise


def _write_folder(source: Path, folder: Path) -> None:
    reader = _open(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _model_config(metadata, tied)
    _write_weights(reader, config, folder)
    _write_json(folder / "config.json", config)
    special = {key: value for key, value in config.items() if key.endswith("_token_id")}
    _write_json(folder / "generation_config.json", special)
    _write_tokenizer(source, folder, int(config["max_position_embeddings"]))


def _open(source: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading GGUF files needs the extra 'gguf': pip install 'neuron-models[gguf]'", name="gguf"
        ) from error
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{source}: not a readable GGUF file ({error})") from error


def _model_config(metadata: dict[str, Any], tied: bool) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"GGUF architecture {architecture!r} cannot be converted; only 'llama' can")
    scaling = sorted(name for name in metadata if name.startswith("llama.rope.scaling."))
    if scaling:
        raise CheckpointError(f"GGUF RoPE scaling cannot be converted: {', '.join(scaling)}")
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token_id"] = token_id
    return config


def _shortest(value: float) -> float:
    """Undo the widening of a float32 metadata value: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    kind = rest.removesuffix(".weight")
    if not (
        name.startswith("blk.") and block.isdigit() and rest.endswith(".weight") and kind in _LAYER_NAMES
    ):
        raise CheckpointError(f"GGUF tensor {name!r} has no place in a Llama model")
    return f"model.layers.{block}.{_LAYER_NAMES[kind]}.weight"


def _shards(tensors: list[Any]) -> Iterator[list[Any]]:
    shard: list[Any] = []
    size = 0
    for tensor in tensors:
        if shard and size + 2 * tensor.n_elements > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += 2 * tensor.n_elements
    yield shard


def _write_weights(reader: Any, config: dict[str, Any], folder: Path) -> None:
    shards = list(_shards(list(reader.tensors)))
    weight_map: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards, 1):
        file = (
            "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        )
        weights = {_hf_name(tensor.name): _dequantise(tensor, config) for tensor in shard}
        save_file(weights, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(weights, file)
        total += sum(weight.nbytes for weight in weights.values())
    if len(shards) > 1:
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


def _dequantise(tensor: Any, config: dict[str, Any]) -> torch.Tensor:
    import gguf

    weight = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }.get(tensor.name.partition(".")[2].partition(".")[2])
    if heads is not None:
        weight = _rotate_half_order(weight, heads)
    return torch.tensor(weight, dtype=torch.bfloat16)


def _rotate_half_order(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    # GGUF stores q and k rows for interleaved rotary pairs; Hugging Face expects both halves one after the
    # other.
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(source: Path, folder: Path, context_length: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: convert, then print the folder."""
    parser = argparse.ArgumentParser(prog="python -m neuron_models.gguf", description=__doc__)
    parser.add_argument("gguf", type=Path, help="the GGUF file (Llama architecture)")
    parser.add_argument("out", type=Path, help="the Hugging Face folder to write")
    options = parser.parse_args(arguments)
    print(convert(options.gguf, options.out))


if __name__ == "__main__":
    main()
