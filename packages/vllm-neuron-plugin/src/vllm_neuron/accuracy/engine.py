# SPDX-License-Identifier: Apache-2.0
"""The one engine that a subject has at a time, and how it is made."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Mapping
from typing import Any

from vllm import LLM
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import cached_tokenizer_from_config

from neuron_core.errors import ConfigError
from vllm_neuron.accuracy.refusals import start_refusals

__all__ = ["SubjectEngine"]

PROCESSOR = "vllm_neuron.accuracy.forcing:ForcedTokens"
SECTION = "neuron_config"


class SubjectEngine:
    """Engines over one model with the same options; asking for one of another kind ends the one before."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.model = model
        self._options = dict(options)
        self._llm: LLM | None = None
        self._key: Hashable = None
        self._config: VllmConfig | None = None

    def config(self) -> VllmConfig:
        """vLLM's configuration of it; raises ``SubjectError`` for a model or an option that cannot be."""
        if self._config is None:
            with start_refusals(self.model):
                self._config = EngineArgs(**{"model": self.model, **self._options}).create_engine_config()
        return self._config

    def tokenizer(self) -> Any:
        """Its tokenizer, or None; raises ``SubjectError``."""
        model = self.config().model_config
        with start_refusals(self.model):
            return None if model.skip_tokenizer_init else cached_tokenizer_from_config(model)

    def plain(self, settings: Mapping[str, Any]) -> LLM:
        """An engine with the options, and more ``neuron_config`` settings; it is kept, whatever they are."""
        return self._open("plain", {**self._options, "additional_config": self._additional(settings)})

    def forcing(self, settings: Mapping[str, Any], key: Hashable = None, **others: Any) -> LLM:
        """An engine that forces tokens, with more ``neuron_config`` settings and ``others`` of vLLM's.

        The one of the same ``key`` is kept.
        """
        processors = [*(self._options.get("logits_processors") or ()), PROCESSOR]
        options = {**self._options, **others, "additional_config": self._additional(settings)}
        return self._open(("forcing", key), {**options, "logits_processors": processors}, again=key is None)

    def close(self) -> None:
        """End the engine, if one runs."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()

    def _additional(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        additional = dict(self._options.get("additional_config") or {})
        section = dict(additional.get(SECTION) or {})
        for name in settings:
            if name in section:
                raise ConfigError(
                    f"{SECTION}.{name}", section[name], "is set by the tool itself; leave it out"
                )
        return {**additional, SECTION: {**section, **settings}}

    def _open(self, key: Hashable, options: Mapping[str, Any], *, again: bool = False) -> LLM:
        if self._llm is None or self._key != key or again:
            self.close()
            with start_refusals(self.model):
                self._llm = LLM(**{"model": self.model, **options})
            self._key = key
        return self._llm
