# SPDX-License-Identifier: Apache-2.0
"""Writes ``arithmetic.jsonl`` beside it: ``python -m neuron_accuracy.tasks.data.arithmetic_items``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

__all__ = ["COUNT", "SEED", "items", "main"]

SEED = 20
COUNT = 60


def items(seed: int = SEED, count: int = COUNT) -> Iterator[dict[str, str]]:
    """Sums, differences and products of small numbers, none negative, no question twice."""
    source = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        sign, a, b = source.choice("+-*"), source.randint(2, 12), source.randint(2, 12)
        if sign == "-":
            a += b
        question = f"{a} {sign} {b}"
        if question not in seen:
            seen.add(question)
            value = a + b if sign == "+" else a - b if sign == "-" else a * b
            yield {"question": question, "answer": str(value)}


def main() -> None:
    """Write the file."""
    path = Path(__file__).parent / "arithmetic.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items()))


if __name__ == "__main__":
    main()
