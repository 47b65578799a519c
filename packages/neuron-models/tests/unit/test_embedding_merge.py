# SPDX-License-Identifier: Apache-2.0
"""Embeddings in place of tokens: what transformers makes of them, mixed with tokens, on every rank."""

import pytest
import torch

from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket, BucketPlan, Phase
from neuron_core.graphs.model_programs import ModelPrograms
from neuron_core.graphs.signature import structural_signature
from neuron_core.prompt_embeds import IS_TOKEN, PROMPT_EMBEDS, only_tokens
from neuron_core.step import StepInput
from neuron_models import build_model, registry
from neuron_models.program import MixedEmbeddingPart
from neuron_models.rope import RotaryTable
from neuron_parallel import ParallelGroups, ParallelPlan

BUCKETS = (Bucket(Phase.PREFILL, 32, 4, 64), Bucket(Phase.DECODE, 4, 4, 64))


def model_of(config, prompt_embeds, groups=None):
    groups = groups or ParallelGroups.single()
    return build_model(config, dtype=torch.float32, groups=groups, block_size=4, prompt_embeds=prompt_embeds)


def embedded(embeds, places, rows):
    """The two inputs of a step of ``rows`` tokens with ``embeds`` at ``places``."""
    values, is_token = torch.zeros(rows, embeds.shape[1]), torch.ones(rows, dtype=torch.int32)
    values[places], is_token[places] = embeds, 0
    return {PROMPT_EMBEDS: values, IS_TOKEN: is_token}


@pytest.mark.supports("prompt embeddings", model="llama")
@pytest.mark.supports("prompt embeddings", model="qwen3")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_transformers_given_the_same_embeddings(driver, tmp_path, family):
    reference = driver.write_checkpoint(getattr(driver, f"{family}_config")(), tmp_path)
    runner = driver.PagedRunner.load(tmp_path)
    runner.model.takes_prompt_embeds = True
    tokens, width = [5, 17, 99, 3, 42, 8, 1], runner.model.hidden_size
    given = 0.3 * torch.randn(4, width, generator=torch.Generator().manual_seed(1))
    # Row 0: tokens. Row 1: three embeddings between tokens, then one for the decode step.
    mixed = reference.get_input_embeddings()(torch.tensor([[7, 0, 0, 0, 9, 0]])).detach()
    mixed[0, 1:4], mixed[0, 5] = given[:3], given[3]
    with torch.no_grad():
        expected = [
            reference(torch.tensor([[*tokens, 2]])).logits[0],
            reference(inputs_embeds=mixed).logits[0],
        ]
    execute = runner.execute
    extra = embedded(given[:3], torch.tensor([8, 9, 10]), 32)
    runner.execute = lambda bucket, variant, values: execute(bucket, variant, values | extra)
    out = runner.prefill([tokens, [7, 0, 0, 0, 9]])
    for row, last in ((0, len(tokens) - 1), (1, 4)):
        torch.testing.assert_close(out["logits"][row], expected[row][last], atol=1e-4, rtol=1e-4)
    extra = embedded(given[3:], torch.tensor([1]), 4)
    out = runner.decode([2, 0, 0, 0])
    for row in (0, 1):
        torch.testing.assert_close(out["logits"][row], expected[row][-1], atol=1e-4, rtol=1e-4)


def test_each_rank_takes_its_own_rows():
    # Between the layers of a prefill step rank r of two has tokens r * T / 2 and on.
    table = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))

    class Split(torch.nn.Module):
        def forward(self, token_ids, rank, sequence_parallel):
            rows = table[token_ids]
            return rows.chunk(2)[int(rank)] if sequence_parallel else rows

    from transformers import LlamaConfig

    part = MixedEmbeddingPart(Split(), RotaryTable(LlamaConfig(hidden_size=8, num_attention_heads=1), 8))
    ids, positions = torch.arange(10, 16, dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    given = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    inputs = tuple(embedded(given, torch.tensor([1, 2, 4]), 6).values())
    whole = table[ids].clone()
    whole[[1, 2, 4]] = given
    halves = [
        part(ids, positions, torch.tensor([rank], dtype=torch.int32), *inputs, sequence_parallel=True)[0]
        for rank in (0, 1)
    ]
    assert torch.equal(torch.cat(halves), whole)
    alone = part(ids, positions, torch.tensor([0], dtype=torch.int32), *inputs, sequence_parallel=False)[0]
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.phase.name)
def test_an_engine_without_them_has_the_programs_it_had(driver, bucket):
    config = driver.llama_config()
    plain, mixed = (model_of(config, wanted) for wanted in (False, True))
    names = {"token_ids", "positions", "rank"}
    (embed, *rest), (other, *others) = (m.program(bucket, "sample").parts for m in (plain, mixed))
    assert set(embed.inputs) == names and set(other.inputs) == names | {PROMPT_EMBEDS, IS_TOKEN}
    assert structural_signature(embed.module) != structural_signature(other.module)
    for part, same in zip(rest, others, strict=True):
        assert (part.inputs, part.static) == (same.inputs, same.static)
        assert structural_signature(part.module) == structural_signature(same.module)
    plan = BucketPlan.from_limits(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=4, token_multiple=1
    )
    specs = [set(ModelPrograms(model, plan, 9).specs(bucket)) for model in (plain, mixed)]
    assert specs[1] - specs[0] == {PROMPT_EMBEDS, IS_TOKEN} and specs[0] < specs[1]
    padding = ModelPrograms(mixed, plan, 9).padding(bucket)
    kept = ("kv.", "sampling.")  # what outlives a step
    assert set(padding) == {name for name in specs[1] if not name.startswith(kept)}
    assert padding[IS_TOKEN].all() and padding[PROMPT_EMBEDS].shape == (bucket.num_tokens, 32)
    assert only_tokens(bucket.num_tokens, plain) == {}
    assert not set(StepInput.names()) & {PROMPT_EMBEDS, IS_TOKEN}


def test_a_model_that_takes_tokens_alone_is_named(driver, monkeypatch):
    class TokensOnly:
        check = staticmethod(lambda config, plan: None)
        from_config = staticmethod(lambda config, **settings: TokensOnly())

    monkeypatch.setitem(registry._factories, "LlamaForCausalLM", TokensOnly)
    with pytest.raises(ConfigError, match="--enable-prompt-embeds=True: TokensOnly takes token ids alone"):
        model_of(driver.llama_config(), True, ParallelGroups.describe(ParallelPlan(1)))
