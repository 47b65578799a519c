# SPDX-License-Identifier: Apache-2.0
"""One side of the embedding comparison: a process that embeds what it is told to, one order a line, and times it.

Run as a script (`bench.py --pooling` does, in both interpreters). An order is `{"texts": […], "out": path or null}`,
the answer a line of figures: seconds and tokens; vectors go to the file, one float32 row per text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Embed = Callable[[list[str]], Any]
Count = Callable[[list[str]], int]


def ours(options: argparse.Namespace) -> tuple[Embed, Count]:
    """The vLLM of this interpreter, started as a server of `--max-num-seqs` texts at once would be."""
    from vllm import LLM

    llm = LLM(
        options.model,
        runner="pooling",
        dtype=options.dtype,
        max_num_seqs=options.batch,
        **json.loads(options.engine_args),
    )

    def embed(texts: list[str]) -> Any:
        return np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])

    return embed, counting(llm.get_tokenizer())


def theirs(options: argparse.Namespace) -> tuple[Embed, Count]:
    """sentence-transformers on the CPU."""
    import torch
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    torch.set_num_threads(options.threads)
    settings = {"dtype": getattr(torch, options.dtype)}
    model = SentenceTransformer(options.model, device="cpu", model_kwargs=settings)

    def embed(texts: list[str]) -> Any:
        return model.encode(
            texts, batch_size=options.batch, show_progress_bar=False, normalize_embeddings=True
        )

    return embed, counting(model.tokenizer)


def counting(tokenizer: Any) -> Count:
    """Tokens of texts, the special ones included."""
    return lambda texts: sum(len(ids) for ids in tokenizer(texts)["input_ids"])


def version(library: str) -> str:
    """Of the installed distribution."""
    from importlib.metadata import version as of

    return of(library)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description="Embed what standard input orders.")
    top.add_argument("--library", required=True, choices=["vllm", "sentence-transformers"])
    top.add_argument("--model", required=True)
    top.add_argument("--dtype", required=True)
    top.add_argument("--batch", type=int, required=True)
    top.add_argument("--threads", type=int, required=True)
    top.add_argument("--engine-args", default="{}", help="JSON of further arguments of LLM(...)")
    return top


def main() -> None:
    """Start, say so, and obey until standard input ends."""
    options = parser().parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    embed, count = (ours if options.library == "vllm" else theirs)(options)
    print(json.dumps({"version": version(options.library)}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        begun = time.perf_counter()
        vectors = embed(order["texts"])
        seconds = time.perf_counter() - begun
        if order["out"]:
            np.save(order["out"], np.asarray(vectors, np.float32))
        print(json.dumps({"seconds": seconds, "tokens": count(order["texts"])}), file=answers)


if __name__ == "__main__":
    main()
