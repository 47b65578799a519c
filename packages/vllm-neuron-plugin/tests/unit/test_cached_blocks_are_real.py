# SPDX-License-Identifier: Apache-2.0
"""Case A4: a block enters the prefix cache once all its tokens are known, never under placeholder ids."""

from __future__ import annotations

import pytest

BLOCK = 16
SAMPLED = 7  # by the harness, always


def cached_blocks(harness) -> set[bytes]:
    """Hashes of the blocks that another request could find."""
    pool = harness.scheduler.kv_cache_manager.block_pool
    return {key for block in pool.blocks for key in [block.block_hash] if key is not None}


def hashes_of(harness, tokens: list[int]) -> list[bytes]:
    """What vLLM's hasher makes of a text that is known from the start, one hash per whole block."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("known", tokens, SamplingParams(max_tokens=1), None, block_hasher=harness._hasher)
    return list(request.block_hashes)


@pytest.mark.parametrize("depth", [1, 2])
def test_a4_a_generated_block_is_cached_under_its_real_tokens(make_scheduler, depth):
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id as with_group

    harness = make_scheduler(enable_prefix_caching=True, depth=depth)
    prompt = [*range(20, 20 + 3 * BLOCK)]
    request = harness.add("a", prompt, max_tokens=BLOCK + 4)
    text = prompt + [SAMPLED] * BLOCK
    known = [with_group(key, 0) for key in hashes_of(harness, text)]
    assert len(known) == 4
    while not request.is_finished():
        num_real = request.num_tokens
        harness.step()
        cached = cached_blocks(harness)
        assert cached == set(known[: len(cached)])
        assert 3 <= len(cached) <= num_real // BLOCK
    harness.finish()
    assert cached_blocks(harness) == set(known)
