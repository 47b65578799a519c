# SPDX-License-Identifier: Apache-2.0
"""BERT encoders, such as those of sentence-transformers, and classifiers made of them."""

from neuron_models.bert.classifier import BertForSequenceClassification
from neuron_models.bert.model import BertModel

__all__ = ["BertForSequenceClassification", "BertModel"]
