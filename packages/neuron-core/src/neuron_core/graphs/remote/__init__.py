# SPDX-License-Identifier: Apache-2.0
"""A remote store of compiled graphs, and the rule for whom to trust with native code."""

from neuron_core.graphs.remote.address import Address, redact
from neuron_core.graphs.remote.envelope import request_document
from neuron_core.graphs.remote.publish import PushReport
from neuron_core.graphs.remote.store import RemoteCounters, RemoteStore
from neuron_core.graphs.remote.trust import Signer, TrustPolicy, key_id, write_private_key

__all__ = [
    "Address",
    "PushReport",
    "RemoteCounters",
    "RemoteStore",
    "Signer",
    "TrustPolicy",
    "key_id",
    "redact",
    "request_document",
    "write_private_key",
]
