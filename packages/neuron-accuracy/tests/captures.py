# SPDX-License-Identifier: Apache-2.0
"""Captures that tests make up: whole tensors by request, cut into steps, batches, padding and ranks as a test wants."""

import itertools

import numpy as np
import torch

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.layout import Rows, Sharding, TensorLayout
from neuron_accuracy.subjects.info import SubjectInfo

REQUESTS = {"a": [5, 6, 7, 8, 9, 10, 11, 12] * 3, "b": [5, 6, 1, 2, 3] * 4, "c": [9]}
FEATURES = 24
EVERYTHING = CaptureSpec(("**",), tensors=("*",))


def info(**changes):
    values = {
        "kind": "made",
        "model": "m",
        "revision": "r",
        "dtype": "float32",
        "vocab_size": 100,
        "tokenizer": "t",
    }
    return SubjectInfo(**{**values, **changes})


def whole_steps(requests):
    """One prefill of each request whole."""
    return [[(name, 0, len(tokens))] for name, tokens in requests.items()]


def split(whole, layout, ranks):
    """What each of ``ranks`` holds of a whole tensor: by numpy, apart from the code under test."""
    array = whole.double().numpy()
    if layout.slices and layout.sharding is Sharding.SHARDED:
        ends = np.cumsum([part.size for part in layout.slices])[:-1]
        slices = np.split(array, ends, axis=-1)
        held = []
        for rank in range(ranks):
            pieces = [
                np.split(piece, ranks // part.replicas, axis=-1)[rank // part.replicas]
                for piece, part in zip(slices, layout.slices, strict=True)
            ]
            held.append(np.concatenate(pieces, axis=-1))
    elif layout.sharding is Sharding.REPLICATED:
        held = [array] * ranks
    elif layout.sharding is Sharding.SHARDED:
        held = np.split(array, ranks, axis=layout.dim)
    elif layout.sharding is Sharding.INTERLEAVED:
        held = [
            np.take(array, range(r, array.shape[layout.dim], ranks), axis=layout.dim) for r in range(ranks)
        ]
    else:
        rng = np.random.default_rng(0)
        # Whole numbers, so that their sum is exact.
        held = [rng.integers(-50, 50, array.shape).astype(float) for _ in range(ranks - 1)]
        held.append(array - sum(held))
    return [torch.from_numpy(np.ascontiguousarray(part)).to(whole.dtype) for part in held]


def write(
    folder,
    requests,
    tensors,
    steps=None,
    *,
    ranks=1,
    dp=0,
    layouts=None,
    names=None,
    padding=0,
    spec=EVERYTHING,
    edit=None,
    **changes,
):
    """Write a capture and open it.

    ``requests`` are token ids by name, ``tensors`` whole ``[tokens, …]`` tensors by ``module:tensor`` and request, and
    ``steps`` lists of ``(request, begin, end)``. Padding rows hold garbage. ``edit(step, rank, tensors)`` may change
    what a rank writes.
    """
    layouts = layouts or {}
    run = RunRecord(info(**changes), ranks, layouts, names or {})
    writers = [CaptureWriter(folder, spec, run, rank=rank, dp=dp) for rank in range(ranks)]
    for number, chunks in enumerate(steps or whole_steps(requests)):
        lengths = [end - begin for _, begin, end in chunks]
        begins = [0, *itertools.accumulate(lengths)][:-1]
        total = sum(lengths) + padding
        total += -total % ranks
        rows = tuple(
            StepRow(name, at, row, tuple(range(begin, end)), tuple(requests[name][begin:end]))
            for row, ((name, begin, end), at) in enumerate(zip(chunks, begins, strict=True))
        )
        phase = "decode" if max(lengths) == 1 else "prefill"
        step = StepRecord(number, f"{phase}_s{total}", phase, total, len(chunks) + padding, rows)
        wholes = {
            key: _rows(by_request, chunks, layouts.get(key, TensorLayout()).rows, step)
            for key, by_request in tensors.items()
        }
        for rank, writer in enumerate(writers):
            held = {
                tuple(key.split(":")): split(value, layouts.get(key, TensorLayout()), ranks)[rank]
                for key, value in wholes.items()
            }
            writer.write_step(step, edit(step, rank, held) if edit else held)
    return Capture(folder)


def _rows(by_request, chunks, kind, step):
    if kind is Rows.NONE:
        return next(iter(by_request.values()))
    if kind is Rows.REQUESTS:
        parts, count = [by_request[name][end - 1 : end] for name, _, end in chunks], step.num_seqs
    else:
        parts, count = [by_request[name][begin:end] for name, begin, end in chunks], step.num_tokens
    spare = count - sum(len(part) for part in parts)
    return torch.cat([*parts, torch.full((spare, *parts[0].shape[1:]), 99).to(parts[0].dtype)])


def made(*names, features=FEATURES, requests=None, seed=0):
    """Random whole tensors of these names."""
    generator = torch.Generator().manual_seed(seed)
    lengths = {key: len(tokens) for key, tokens in (requests or REQUESTS).items()}
    return {
        name: {key: torch.randn(length, features, generator=generator) for key, length in lengths.items()}
        for name in names
    }


def changed(tensors, name, change, requests=None):
    """The tensors with one of them changed in place, for the requests given."""
    copied = {key: {of: value.clone() for of, value in held.items()} for key, held in tensors.items()}
    for of in requests or copied[name]:
        change(copied[name][of])
    return copied


def pair(tmp_path, tensors, wrong, **options):
    """Two captures of ``REQUESTS``: the test, and the reference."""
    reference = write(tmp_path / "r", REQUESTS, tensors, **options)
    return write(tmp_path / "t", REQUESTS, wrong, **options), reference
