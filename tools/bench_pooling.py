# SPDX-License-Identifier: Apache-2.0
"""Embedding throughput against sentence-transformers: one process of each, asked in turn, vectors compared first."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench_sides import Side
from devtools.console import Failure, Step, tail

HERE = Path(__file__).resolve().parent
BATCH, TOKENS = 32, 128
MAX_TOKENS = 512
CHECKED_TEXTS = 200
MIN_COSINE = 0.9999
"""Least cosine of the two sides' vectors of one text; below it no ratio is printed."""

SPECIAL = 2
"""Tokens a text begins and ends with, `[CLS]` and `[SEP]`."""


def words_of(model: Path) -> list[str]:
    """Words of a BERT vocabulary that are one token each; raises `Failure` if the model has none."""
    vocabulary = model / "vocab.txt"
    if not vocabulary.is_file():
        raise Failure(f"--model {model}: no vocab.txt; give a BERT encoder such as all-MiniLM-L6-v2")
    words = vocabulary.read_text(encoding="utf-8").split("\n")
    return [word for word in words if word.isascii() and word.isalpha() and len(word) > 2]


def text_of(words: Sequence[str], tokens: int, rng: random.Random) -> str:
    """A text of that many tokens, the special ones included."""
    return " ".join(rng.choices(words, k=tokens - SPECIAL))


def long_model(model: Path, folder: Path) -> Path:
    """`model` with texts of up to 512 tokens allowed, for both sides: checkpoints are often cut to fewer."""
    shutil.copytree(model, folder)
    settings = folder / "sentence_bert_config.json"
    found = json.loads(settings.read_text()) if settings.is_file() else {}
    settings.write_text(json.dumps(found | {"max_seq_length": MAX_TOKENS}))
    return folder


@dataclass(frozen=True)
class Worker:
    """A side's process, ready for orders."""

    side: Side
    process: subprocess.Popen[str]
    log: Path
    version: str

    def ask(self, texts: list[str], out: Path | None = None) -> dict[str, float]:
        """Seconds and tokens of one order; raises `Failure` with the end of the log if the process ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"texts": texts, "out": str(out) if out else None}) + "\n")
            self.process.stdin.flush()
        found: dict[str, float] = answer(self.side, self.process, self.log)
        return found


def answer(side: Side, process: subprocess.Popen[str], log: Path) -> Any:
    """The next line a side's process says; raises `Failure` if it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Failure(f"{side.name}: bench_embed.py ended early:\n{tail(log.read_text().splitlines())}")
    return json.loads(line)


@contextlib.contextmanager
def working(
    side: Side, library: str, options: argparse.Namespace, model: Path, caches: Path
) -> Iterator[Worker]:
    """The process of one side, ended at the end."""
    arguments = {
        "library": library,
        "model": model,
        "dtype": options.dtype,
        "batch": BATCH,
        "threads": threads(),
        "engine-args": options.engine_args if library == "vllm" else "{}",
    }
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    log = caches / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [side.python, str(HERE / "bench_embed.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=side.environ(caches),
            cwd=caches,
        ) as process,
    ):
        with Step(f"{side.name}: starting {library}"):
            started = answer(side, process, log)
        yield Worker(side, process, log, started["version"])
        assert process.stdin is not None
        process.stdin.close()


def threads() -> int:
    """Of each side: one per processor."""
    return len(os.sched_getaffinity(0))


def cosines(first: Any, second: Any) -> Any:
    """`[texts]` float64 of the rows of two `[texts, dimensions]`."""
    first, second = (np.asarray(x, np.float64) for x in (first, second))
    return (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)


def check(workers: Sequence[Worker], words: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Embed 200 texts of 1 to 512 tokens in random batches on both sides; raises `Failure` if they differ."""
    rng = random.Random(0)
    sizes = [
        SPECIAL + 1,
        MAX_TOKENS,
        *(rng.randint(SPECIAL + 1, MAX_TOKENS) for _ in range(CHECKED_TEXTS - 2)),
    ]
    rng.shuffle(sizes)
    texts = [text_of(words, size, rng) for size in sizes]
    found: list[Any] = [[], []]
    begin = 0
    while begin < len(texts):
        batch = texts[begin : begin + rng.randint(1, BATCH)]
        for vectors, worker in zip(found, workers, strict=True):
            out = scratch / f"{worker.side.name}.npy"
            expect_tokens(worker, worker.ask(batch, out), sum(sizes[begin : begin + len(batch)]))
            vectors.extend(np.load(out))
        begin += len(batch)
    least = float(cosines(*found).min())
    require_same(least)
    return {"texts": len(texts), "least_cosine": least}


def require_same(least: float) -> None:
    """Raise `Failure` unless the least cosine of any text says that both sides compute the same model."""
    if not least >= MIN_COSINE:
        raise Failure(f"no ratio, because the outputs differ: a cosine is {least:.6f} (needed {MIN_COSINE})")


def expect_tokens(worker: Worker, found: dict[str, float], wanted: int) -> None:
    """Raise `Failure` unless a side counted as many tokens as the texts were made of."""
    if found["tokens"] != wanted:
        raise Failure(f"{worker.side.name}: {found['tokens']} tokens were counted of texts of {wanted}")


def pairs(workers: Sequence[Worker], words: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side for the same 32 texts of 128 tokens, pair by pair; who is first alternates.

    Texts of a pair are new, so that nothing is remembered of them.
    """
    spent: dict[str, list[float]] = {worker.side.name: [] for worker in workers}
    for index in range(-1, rounds):
        rng = random.Random(1000 + index)
        texts = [text_of(words, TOKENS, rng) for _ in range(BATCH)]
        for worker in workers if index % 2 else reversed(workers):
            found = worker.ask(texts)
            expect_tokens(worker, found, BATCH * TOKENS)
            if index >= 0:  # the first pair warms up
                spent[worker.side.name].append(found["seconds"])
    return spent


def compare(options: argparse.Namespace, mine: Side, other: Side, scratch: Path) -> dict[str, Any]:
    """Check the vectors, then time both sides in turn; returns every figure and the ratio of each pair."""
    places = {side.name: scratch / side.name for side in (mine, other)}
    for place in places.values():
        place.mkdir()
    model, words = long_model(options.model, scratch / "model"), words_of(options.model)
    with (
        working(mine, "vllm", options, model, places[mine.name]) as first,
        working(other, "sentence-transformers", options, model, places[other.name]) as second,
    ):
        checked = check((first, second), words, scratch)
        load = os.getloadavg()[0]
        with Step("embedding, pair by pair"):
            spent = pairs((first, second), words, options.pairs)
        versions = {"vllm": first.version, "sentence-transformers": second.version}
    ratios = [theirs / ours for ours, theirs in zip(spent[mine.name], spent[other.name], strict=True)]
    per_s = {name: BATCH / statistics.median(seconds) for name, seconds in spent.items()}
    return {
        "pooling": {
            "versions": versions,
            "threads": threads(),
            "load": load,
            "check": checked,
            "seconds": spent,
            "texts_s": per_s,
            "ratios": ratios,
        }
    }
