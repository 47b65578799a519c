# SPDX-License-Identifier: Apache-2.0
"""Bad words as tokens: which of them a model can draw, and where they would leave it none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

__all__ = ["dead_end", "settle_bad_words"]

LONGEST = 32
"""Tokens to a dead end that is looked for; longer ones would take a front end's time."""


def settle_bad_words(params: SamplingParams, vocab_size: int) -> None:
    """Take the words out of ``params`` that hold a token of the tokenizer alone, as the model never draws them.

    Raises ``VLLMValidationError`` if the others can leave no token to draw.
    """
    words = [word for word in params.bad_words_token_ids or () if max(word) < vocab_size]
    params._bad_words_token_ids = words
    allowed = set(params.allowed_token_ids) if params.allowed_token_ids else range(vocab_size)
    stops = {params.eos_token_id, *(params.stop_token_ids or ())}
    # A grammar may never come to a longer one.
    steps = 1 if params.structured_outputs is not None else params.max_tokens
    drawn = dead_end(words, allowed, stops, min(steps or 1, LONGEST))
    if drawn is not None:
        after = f"after tokens {list(drawn)}, " if drawn else ""
        tokens = f"allowed_token_ids, {sorted(allowed)[:8]}," if params.allowed_token_ids else "the model"
        reason = (
            f"{after}every token of {tokens} would end a bad word, so none could be drawn; leave a word out"
        )
        raise VLLMValidationError(reason, parameter="bad_words", value=(params.bad_words or [])[:8])


def dead_end(
    words: Sequence[Sequence[int]], allowed: Collection[int], stops: Collection[int | None], steps: int
) -> tuple[int, ...] | None:
    """The fewest tokens that can be drawn in under ``steps`` and after which ``words`` ban all of ``allowed``.

    None if there are none. None of ``stops`` is drawn on the way, as nothing is drawn after it.
    """
    ends: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for *before, end in words:
        ends[tuple(before)].add(end)
    if not set().union(*ends.values()).issuperset(allowed):
        return None

    def banned(drawn: tuple[int, ...]) -> set[int]:
        return set().union(*(ends.get(drawn[start:], ()) for start in range(len(drawn) + 1)))

    # What else has begun when all are banned is an end of the longest that has: to draw the longest is enough.
    for drawn in sorted(ends, key=len):
        if len(drawn) >= steps:
            break
        on_the_way = all(
            token in allowed and token not in stops and token not in banned(drawn[:place])
            for place, token in enumerate(drawn)
        )
        if on_the_way and banned(drawn).issuperset(allowed):
            return drawn
    return None
