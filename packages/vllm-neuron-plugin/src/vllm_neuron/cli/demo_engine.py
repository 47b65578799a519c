# SPDX-License-Identifier: Apache-2.0
"""A demo's engine: vLLM in this process, one question at a time, and what its counters say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.prometheus import get_prometheus_registry

from neuron_core.errors import ConfigError
from neuron_core.metrics import PREFIX

__all__ = ["Answer", "DemoEngine"]

SHORT_PROMPT = 64
"""Tokens of the bucket that a question fits."""


@dataclass
class Answer:
    """A text and what it took; times in seconds since the question, ``cached_tokens`` of the prompt."""

    text: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, per second between the first and the last."""
        span_s = self.last_token_s - self.first_token_s
        return (self.num_tokens - 1) / span_s if self.num_tokens > 1 and span_s > 0 else 0.0


class DemoEngine:
    """One vLLM engine with room for one short conversation, so that few graphs are compiled."""

    def __init__(self, model: str, max_model_len: int) -> None:
        begun = time.perf_counter()
        self.llm = LLM(
            model,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_model_len,
            max_num_seqs=1,
            additional_config={"neuron_config": {"prefill_buckets": _prefill_buckets(max_model_len)}},
            # A demo is a guest: it takes four times what it needs, not nine tenths of the memory.
            num_gpu_blocks_override=4 * -(-max_model_len // 16) + 1,
        )
        self.start_s = time.perf_counter() - begun
        self._ids = count()

    @property
    def buckets(self) -> list[str]:
        """Names of the engine's buckets."""
        from vllm_neuron.config import bucket_plan

        return [bucket.name for bucket in bucket_plan(self.llm.llm_engine.vllm_config).all()]

    def ask(self, question: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
        """Answer greedily; ``on_text`` gets each piece of text as it comes.

        Raises ``ConfigError`` if prompt and answer are longer than the model length.
        """
        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
        prompt = self._prompt(question)
        longest = engine.vllm_config.model_config.max_model_len
        if len(prompt) + max_tokens > longest:
            works = f"--max-model-len {len(prompt) + max_tokens}"
            reason = f"with a prompt of {len(prompt)} exceeds --max-model-len {longest}; {works} works"
            raise ConfigError("--max-tokens", max_tokens, reason)
        answer = Answer(num_prompt_tokens=len(prompt))
        begun = time.perf_counter()
        engine.add_request(f"demo-{next(self._ids)}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                now = time.perf_counter() - begun
                answer.first_token_s = answer.first_token_s or now
                answer.last_token_s = now
                piece = output.outputs[0]
                answer.num_tokens += len(piece.token_ids)
                answer.cached_tokens = output.num_cached_tokens or 0
                answer.text += piece.text
                on_text(piece.text)
        return answer

    def _prompt(self, question: str) -> list[int]:
        tokenizer: Any = self.llm.get_tokenizer()
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer.encode(question))
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def counts(self, name: str) -> dict[str, int]:
        """A counter of ours by bucket, as ``/metrics`` of a server would show it."""
        found: dict[str, int] = {}
        for family in get_prometheus_registry().collect():
            for sample in family.samples:
                if sample.name == f"{PREFIX}{name}_total" and sample.value:
                    bucket = sample.labels["bucket_name"]
                    found[bucket] = found.get(bucket, 0) + round(sample.value)
        return found


def _prefill_buckets(max_model_len: int) -> list[int]:
    """One for short prompts and the one there has to be: each costs compile time at a first start."""
    return [size for size in (SHORT_PROMPT,) if size < max_model_len] + [max_model_len]
