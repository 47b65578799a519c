# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: a draw depends on its request's seed and its place in the text, and on nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10 (Salmon et al., SC11) of ``counter [n, 4]`` under ``key [n, 2]`` -> ``[n, 4]`` uint32."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].astype(np.uint64), key[:, 1].astype(np.uint64)
    for step in range(10):
        round0 = (k0 + np.uint64(step * _WEYL[0] & 0xFFFFFFFF)) & _LOW
        round1 = (k1 + np.uint64(step * _WEYL[1] & 0xFFFFFFFF)) & _LOW
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ round0,
            second & _LOW,
            (first >> _HALF) ^ c3 ^ round1,
            first & _LOW,
        )
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(seeds: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.float32]:
    """One float32 in [0, 1) for each pair of a request's seed and the index of the token drawn, both ``[n]``."""
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0] = places
    key = np.stack((seeds & _LOW, seeds >> _HALF), axis=1).astype(np.uint32)
    return (philox4x32(counter, key)[:, 0] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def request_seed(request_id: str, engine_seed: int) -> int:
    """Seed in [0, 2**64) of a request that names none: the same on every rank, and for the same id and engine seed."""
    digest = hashlib.blake2b(f"{engine_seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
