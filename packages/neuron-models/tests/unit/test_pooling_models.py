# SPDX-License-Identifier: Apache-2.0
"""Hidden states of pooling models against transformers in fp32: several texts in one step, and every refusal."""

import pytest
import torch
from transformers import BertConfig
from transformers import BertModel as ReferenceBert

from neuron_core.errors import CheckpointError, ConfigError
from neuron_core.graphs.buckets import Bucket, Phase
from neuron_core.graphs.model_programs import HIDDEN_STATES, variants
from neuron_core.step import StepInput
from neuron_models import load_weights
from neuron_models.pooling import build_pooling_model, check_pooling_model
from neuron_parallel import ParallelGroups, ParallelPlan

TEXTS = [[5, 17, 99, 3, 42], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [100, 0, 1]]
BUCKET = Bucket(Phase.EMBED, 32, 4, 64)
BLOCK_SIZE = 16


def bert_config(**changes):
    sizes = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return BertConfig(**(sizes | changes), architectures=["BertModel"])


def write_bert(folder, **changes):
    torch.manual_seed(0)
    reference = ReferenceBert(bert_config(**changes)).float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "LayerNorm.weight" in name else 0.25 * noise)
    reference.save_pretrained(folder)
    return reference


def load(config, folder):
    groups = ParallelGroups.single()
    model = build_pooling_model(config, dtype=torch.float32, groups=groups, block_size=BLOCK_SIZE)
    load_weights(model, folder, groups.tp, 0)
    return model


@torch.no_grad()
def hidden_states(model, texts):
    """Of each text, ``[tokens, hidden]``, all in one step; blocks of the texts lie one after another."""
    step, at, width = StepInput.padding(BUCKET, BLOCK_SIZE), 0, BUCKET.context_len // BLOCK_SIZE
    for row, text in enumerate(texts):
        span, places = slice(at, at + len(text)), torch.arange(len(text), dtype=torch.int32)
        at += len(text)
        step.token_ids[span] = torch.tensor(text, dtype=torch.int32)
        step.positions[span], step.request_rows[span] = places, row
        step.slots[span] = (1 + row * width) * BLOCK_SIZE + places
        step.block_tables[row] = torch.arange(1 + row * width, 1 + (row + 1) * width, dtype=torch.int32)
    cache = {f"kv.{i}": x.allocate(1 + width * len(texts)) for i, x in enumerate(model.kv_layouts)}
    (variant,) = variants(BUCKET)
    found = model.program(BUCKET, variant).run_eager(step.as_values() | cache)[HIDDEN_STATES]
    return found[:at].split([len(text) for text in texts])


def assert_equal_to(reference, model):
    for text, found in zip(TEXTS, hidden_states(model, TEXTS), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 2, "type_vocab_size": 1}])
def test_encoder_equals_transformers(tmp_path, changes):
    reference = write_bert(tmp_path, **changes)
    assert_equal_to(reference, load(bert_config(**changes), tmp_path))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("whole", [True, False], ids=["with-head", "without-head"])
def test_decoder_equals_transformers_under_either_name(driver, tmp_path, family, tied, whole):
    config = getattr(driver, f"{family}_config")(tie_word_embeddings=tied)
    causal = driver.write_checkpoint(config, tmp_path)
    if not whole:  # as embedding checkpoints are saved: no head, and names without `model.`
        causal.model.save_pretrained(tmp_path)
    assert_equal_to(causal.model, load(config, tmp_path))


def test_a_missing_tensor_is_named_once(driver, tmp_path):
    from safetensors.torch import load_file, save_file

    config = driver.llama_config()
    driver.write_checkpoint(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: .*norm\.weight"):
        load(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu': is not implemented for bert; use 'gelu'"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"hidden_size": 30}, "hidden_size=30: must be a multiple of 4 heads"),
    ],
)
def test_encoder_refuses_what_it_does_not_compute(changes, message):
    with pytest.raises(ConfigError) as caught:
        check_pooling_model(bert_config(**changes), ParallelPlan(1))
    assert message in str(caught.value)


def test_decoder_trained_to_see_whole_texts_is_refused(driver):
    config = driver.llama_config()
    check_pooling_model(config, ParallelPlan(1))
    config.is_causal = False
    with pytest.raises(ConfigError, match="is_causal=False: attention over the whole text"):
        check_pooling_model(config, ParallelPlan(1))


def test_a_pooling_model_draws_no_tokens(tmp_path):
    write_bert(tmp_path)
    model = load(bert_config(), tmp_path)
    with pytest.raises(ConfigError, match="variant='greedy'"):
        model.program(Bucket(Phase.PREFILL, 32, 4, 64), "greedy")
