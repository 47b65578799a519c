# SPDX-License-Identifier: Apache-2.0
"""A GGUF file written by the gguf package becomes the folder transformers reads from the same file itself."""

import json
import sys

import pytest
import torch

from neuron_core.errors import CheckpointError
from neuron_models.gguf import MANIFEST, convert, main

gguf = pytest.importorskip("gguf")


def write_gguf(path, reference, architecture="llama", extra=()):
    """Store a tiny transformers Llama the way llama.cpp's converter does, Q8_0 where rows allow it."""
    import numpy as np

    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    # A tiny byte-level BPE vocabulary: the 256 byte symbols, one merge and three special tokens.
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<unk>", "<s>", "</s>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_unk_token_id(257)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
    for name, parameter in reference.state_dict().items():
        prefix, leaf = name.removesuffix(".weight"), ""
        if prefix.startswith("model.layers."):
            layer, _, leaf = prefix.removeprefix("model.layers.").partition(".")
            stored = f"blk.{layer}.{names[leaf]}.weight"
        else:
            stored = f"{names[prefix]}.weight"
        array = parameter.numpy()
        if leaf in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in leaf else config.num_key_value_heads
            shape = array.shape
            array = array.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    for name in extra:
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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


@pytest.fixture
def reference(driver, tmp_path):
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return driver.write_checkpoint(driver.llama_config(**sizes), tmp_path / "reference")


@pytest.mark.supports("GGUF conversion", model="llama")
def test_the_folder_equals_what_transformers_reads_from_the_file(reference, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write_gguf(tmp_path / "tiny.gguf", reference)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    theirs = load_gguf_checkpoint(tmp_path / "tiny.gguf", return_tensors=True, model_to_load=reference)[
        "tensors"
    ]
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert ours.state_dict().keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(ours.state_dict()[name], expected.bfloat16()), name
    assert ours.config.rms_norm_eps == reference.config.rms_norm_eps
    assert ours.config.rope_parameters == reference.config.rope_parameters
    assert (ours.config.bos_token_id, ours.config.eos_token_id) == (258, 259)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("grüße")) == "grüße"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert tokenizer.model_max_length == reference.config.max_position_embeddings


def test_a_second_conversion_keeps_the_folder(reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    main([str(tmp_path / "tiny.gguf"), str(folder)])
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((folder / MANIFEST).read_text())["source"] == "tiny.gguf"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "reference", "tiny.gguf"]


def test_large_models_are_sharded_with_an_index(reference, tmp_path, monkeypatch):
    from neuron_models.checkpoint import Checkpoint

    write_gguf(tmp_path / "tiny.gguf", reference)
    monkeypatch.setattr("neuron_models.gguf.SHARD_BYTES", 40_000)
    folder = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert Checkpoint(folder).tensors.keys() == reference.state_dict().keys()


def test_what_cannot_be_converted_is_named_and_leaves_nothing(reference, tmp_path):
    write_gguf(tmp_path / "other.gguf", reference, architecture="gemma")
    write_gguf(tmp_path / "extra.gguf", reference, extra=("rope_freqs.weight",))
    (tmp_path / "broken.gguf").write_bytes(b"not a gguf file, by far")
    for file, words in (
        ("other", "'gemma'"),
        ("extra", "rope_freqs.weight"),
        ("broken", "GGUF"),
        ("absent", "no such"),
    ):
        with pytest.raises(CheckpointError, match=words):
            convert(tmp_path / f"{file}.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_folder_with_other_contents_is_not_touched(reference, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", reference)
    with pytest.raises(CheckpointError, match="holds something other"):
        convert(tmp_path / "tiny.gguf", tmp_path / "reference")


def test_without_the_extra_the_error_names_it(reference, tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf", reference)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"neuron-models\[gguf\]"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
