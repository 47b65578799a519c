# SPDX-License-Identifier: Apache-2.0
"""Whether the remote cache answers and may be trusted."""

from __future__ import annotations

import time

from neuron_core.doctor.check import Finding, Status
from neuron_core.environ import Environment
from neuron_core.errors import ConfigError

__all__ = ["check_remote"]

_NO_ENTRY = "0" * 64


def check_remote(environment: Environment) -> list[Finding]:
    """Ask the remote cache for a record that does not exist, within its timeout, and look at who is trusted."""
    from neuron_core.graphs.configured import configured_remote

    try:
        store = configured_remote(environment)
    except ConfigError as error:
        return [Finding("remote cache", Status.FAIL, str(error), "correct or unset it")]
    if store is None:
        return [Finding("remote cache", Status.INFO, "none configured (VLLM_NEURON_REMOTE_CACHE)")]
    start = time.monotonic()
    store.fetch_request(_NO_ENTRY)
    seconds = time.monotonic() - start
    if store.off_reason is not None:
        advice = (
            "a server starts without it and compiles what it lacks; check address, network and credentials"
        )
        findings = [Finding("remote cache", Status.WARN, f"{store.address}: {store.off_reason}", advice)]
    else:
        findings = [Finding("remote cache", Status.OK, f"{store.address} answers in {seconds:.2f} s")]
    if store.trust.is_empty:
        found = "nothing is trusted, so every remote entry is refused"
        advice = "set VLLM_NEURON_TRUSTED_KEYS or VLLM_NEURON_TRUSTED_DIGESTS (neuron cache keygen, digests)"
        return [*findings, Finding("remote trust", Status.WARN, found, advice)]
    found = f"{len(store.trust.keys)} keys, {len(store.trust.digests)} digests"
    return [*findings, Finding("remote trust", Status.OK, found)]
