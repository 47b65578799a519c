# SPDX-License-Identifier: Apache-2.0
"""BERT with a classification head: classifiers, and cross-encoders that score a pair of texts."""

from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from neuron_core.errors import ConfigError
from neuron_core.graphs.buckets import Bucket
from neuron_core.graphs.program import Program
from neuron_models.bert.model import BertModel, Encoder
from neuron_models.classification import HeadLinear
from neuron_parallel import ParallelGroups, ParallelPlan


class BertPooler(nn.Module):
    """The dense layer between the pooled state and the classes; part of `BertModel` in a checkpoint."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = HeadLinear(hidden_size, hidden_size, bias=True)

    def forward(self, pooled: Tensor) -> Tensor:
        """``[texts, hidden]`` float32."""
        return torch.tanh(self.dense(pooled))


class BertForSequenceClassification(Encoder):
    """The encoder's program, and the head that the host computes."""

    derived_tensors: ClassVar[tuple[str, ...]] = ("embeddings.position_ids",)

    def __init__(self, config: PretrainedConfig, groups: ParallelGroups, dtype: torch.dtype) -> None:
        super().__init__(config, groups, dtype)
        self.bert = BertModel(config, groups, dtype)
        self.vocab_size, self.hidden_size = self.bert.vocab_size, self.bert.hidden_size
        self.bert.pooler = BertPooler(self.hidden_size)
        self.classifier = HeadLinear(self.hidden_size, config.num_labels, bias=True)

    @classmethod
    def check(cls, config: PretrainedConfig, plan: ParallelPlan) -> None:
        """As `BertModel.check`; texts come in pairs too, so that `ConfigError` is raised for fewer than two types."""
        BertModel.check(config, plan)
        if config.type_vocab_size < 2:
            hint = "tokens of the second text of a pair have type 1; a checkpoint of 2 types works"
            raise ConfigError("type_vocab_size", config.type_vocab_size, hint)

    def program(self, bucket: Bucket, variant: str) -> Program:
        """As `BertModel.program`: the head is no part of it."""
        return self.bert.program(bucket, variant)

    def classify(self, pooled: Tensor) -> Tensor:
        """``pooled [texts, hidden]`` -> logits ``[texts, labels]`` float32."""
        pooler = cast(BertPooler, self.bert.pooler)
        logits: Tensor = self.classifier(pooler(pooled))
        return logits
