# SPDX-License-Identifier: Apache-2.0
"""BERT encoders, such as those of sentence-transformers."""

from neuron_models.bert.model import BertModel

__all__ = ["BertModel"]
