# SPDX-License-Identifier: Apache-2.0
"""From hidden states to embeddings or classes: vLLM's own pooler, on the host.

It selects or averages a text's tokens and applies a checkpoint's dense layers or head; an embedding is cut to
``dimensions`` and normalised, logits are calibrated and become probabilities. In float32, each text by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.pooler.seqwise.poolers import pooler_for_classify, pooler_for_embed
from vllm.pooling_params import PoolingParams
from vllm.transformers_utils.config import try_get_dense_modules
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from neuron_core.errors import ConfigError
from neuron_core.protocols import StaticModel
from neuron_models.classification import Classifier
from vllm_neuron.runner.inputs import Batch
from vllm_neuron.runner.requests import RequestTable


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of one step as they stood when it was submitted, in row order."""

    request_ids: tuple[str, ...]
    params: tuple[PoolingParams, ...]
    num_prompt_tokens: NDArray[np.int64]
    num_scheduled: NDArray[np.int64]
    """Tokens of each that the step computes."""
    reach: NDArray[np.int64]
    """Tokens of each that are computed after the step; a text is finished if that is all."""

    @classmethod
    def of(cls, table: RequestTable, batch: Batch) -> Texts:
        """Those of ``batch``. Raises ``ValueError`` for a request that is not to be pooled."""
        rows = [request.row for request in batch.requests]
        counts = np.asarray(batch.num_scheduled, np.int64)
        params = tuple(request.pooling for request in batch.requests if request.pooling is not None)
        if len(params) != len(rows):
            raise ValueError("a step of a pooling model holds a request without pooling parameters")
        return cls(
            tuple(request.request_id for request in batch.requests),
            params,
            np.fromiter((request.num_prompt_tokens for request in batch.requests), np.int64, len(rows)),
            counts,
            table.num_computed[rows] + counts,
        )


class TextPooler:
    """The pooler that the model and its configuration ask for; raises ``ConfigError`` if it cannot be made whole."""

    def __init__(self, vllm_config: VllmConfig, model: StaticModel) -> None:
        pooler_config = vllm_config.model_config.pooler_config
        with set_current_vllm_config(vllm_config):
            if isinstance(model, Classifier):
                self._pooler = pooler_for_classify(pooler_config, classifier=model.classify)
                return
            self._pooler = pooler_for_embed(pooler_config)
        self._require_dense_layers(vllm_config)

    def _require_dense_layers(self, vllm_config: VllmConfig) -> None:
        model_config = vllm_config.model_config
        wanted = try_get_dense_modules(model_config.model, revision=model_config.revision) or []
        layers = self._pooler.modules()
        if sum(isinstance(layer, nn.Linear) for layer in layers) != len(wanted):
            # vLLM logs this and goes on without the layers.
            folders = [module["folder"] for module in wanted]
            raise ConfigError("--model", folders, "dense layers of these folders could not be read; add them")

    @torch.no_grad()
    def __call__(self, hidden: Tensor, texts: Texts) -> list[Tensor | None]:
        """The embedding or classes of each text, float32; None for one of which the step computes a part, not the last.

        ``hidden [T, hidden]`` holds the tokens of all texts one after another, then padding.
        """
        metadata = PoolingMetadata(
            prompt_lens=torch.from_numpy(texts.num_prompt_tokens),
            prompt_token_ids=None,
            prompt_token_ids_cpu=None,
            pooling_params=list(texts.params),
            pooling_states=[PoolingStates() for _ in texts.params],
        )
        host = hidden[: int(texts.num_scheduled.sum())].cpu()
        metadata.build_pooling_cursor(texts.num_scheduled, torch.from_numpy(texts.reach), host.device)
        rows = self._pooler(host, metadata)
        finished = metadata.get_pooling_cursor().get_finished_mask()
        return [row if done else None for row, done in zip(rows, finished, strict=True)]
