# SPDX-License-Identifier: Apache-2.0
"""Ranges of files reach their parameters whole, several at a time, announced to the kernel, on every processor."""

import os
import struct
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from neuron_core.errors import CheckpointError
from neuron_models import filling
from neuron_models.checkpoint import Checkpoint
from neuron_models.filling import fill, pieces_of

SINGLE = "model.safetensors"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with one matrix per dtype, behind a byte tensor that leaves none of them aligned to its size."""
    folder = tmp_path_factory.mktemp("stored")
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): torch.randn(37, 23, generator=generator).to(dtype) for dtype in DTYPES}
    tensors["vector"] = torch.randn(50, generator=generator)
    save_file(tensors, folder / SINGLE)
    data = bytearray((folder / SINGLE).read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    header = bytes(data[8 : 8 + size]) + b" " * 3
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(data[8 + size :]))
    return Checkpoint(folder), load_file(folder / SINGLE)


@given(
    source=st.sampled_from(DTYPES),
    target=st.sampled_from(DTYPES),
    dim=st.integers(0, 1),
    bounds=st.tuples(st.integers(0, 37), st.integers(0, 37)),
    within=st.booleans(),
    piece_bytes=st.sampled_from([1, 100, 1 << 20]),
    serial=st.sampled_from([5, 1000]),
)
def test_any_slice_arrives_as_torch_slices_and_casts_it(
    stored, source, target, dim, bounds, within, piece_bytes, serial
):
    checkpoint, tensors = stored
    whole = tensors[str(source)]
    start, stop = sorted(min(bound, whole.shape[dim]) for bound in bounds)
    expected = whole.narrow(dim, start, stop - start).to(target)
    # As in a merged parameter: the target is a part of a larger tensor, contiguous or not.
    room = torch.full((expected.shape[0] + 2, expected.shape[1] + 3 * within), 7.0, dtype=target)
    region = room[1:-1, : expected.shape[1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "PIECE_BYTES", piece_bytes)
        patch.setattr(filling, "SERIAL_ELEMENTS", serial)
        fill(list(pieces_of(checkpoint.tensors[str(source)], dim, start, stop, region)), readers=2)
    assert torch.equal(region, expected)
    assert (room[0] == 7).all() and (room[-1] == 7).all() and (room[:, expected.shape[1] :] == 7).all()


def test_a_vector_arrives(stored):
    checkpoint, tensors = stored
    for dtype in DTYPES:
        target = torch.zeros(50, dtype=dtype)
        fill(list(pieces_of(checkpoint.tensors["vector"], 0, 0, 50, target)), readers=1)
        assert torch.equal(target, tensors["vector"].to(dtype))


@pytest.fixture
def wide(tmp_path, monkeypatch):
    """A checkpoint of two files of 64 KB each, read in pieces of 8 KB, and a function that fills from it."""
    monkeypatch.setattr(filling, "PIECE_BYTES", 8 << 10)
    tensors = {"a": torch.arange(16 << 10, dtype=torch.float32).view(256, 64), "b": torch.rand(256, 64)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    checkpoint = Checkpoint(tmp_path)

    def read(readers, dtype=torch.float32, progress=None):
        targets = {name: torch.empty(256, 64, dtype=dtype) for name in tensors}
        pieces = [
            piece
            for name, target in targets.items()
            for piece in pieces_of(checkpoint.tensors[name], 0, 0, 256, target)
        ]
        fill(pieces, readers, progress)
        for name, target in targets.items():
            assert torch.equal(target, tensors[name].to(dtype))

    return checkpoint, read


def test_reads_of_one_file_overlap(wide, monkeypatch):
    _, read = wide
    both = threading.Barrier(2)
    preadv = os.preadv

    def meet(*args):
        both.wait(timeout=20)  # passes only while another read is under way
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", meet)
    read(readers=2)


def test_a_reader_that_cannot_be_joined_would_be_noticed(wide, monkeypatch):
    # The barrier above is a test only if one reader alone does not pass it.
    _, read = wide
    both = threading.Barrier(2)
    monkeypatch.setattr(os, "preadv", lambda *args: both.wait(timeout=0.2))
    with pytest.raises(threading.BrokenBarrierError):
        read(readers=1)


def test_the_kernel_hears_of_every_range_before_it_is_read(wide, monkeypatch):
    checkpoint, read = wide
    monkeypatch.setattr(filling, "PREFETCH_PIECES", 3)
    announced, late = [], []
    fadvise, preadv = os.posix_fadvise, os.preadv

    def advise(file, offset, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        announced.append((os.readlink(f"/proc/self/fd/{file}"), offset, length))
        fadvise(file, offset, length, advice)

    def check(file, buffers, offset):
        name = os.readlink(f"/proc/self/fd/{file}")
        if not any(name == path and start <= offset < start + size for path, start, size in announced):
            late.append(offset)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "preadv", check)
    read(readers=1)
    assert not late
    for info in checkpoint.tensors.values():
        ranges = sorted((offset, size) for path, offset, size in announced if path == str(info.file))
        at = info.offset
        for offset, size in ranges:
            assert offset == at
            at += size
        assert at == info.file.stat().st_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_file_that_shrinks_after_it_was_checked_is_named(wide, dtype):
    checkpoint, read = wide
    file = checkpoint.tensors["b"].file
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: became shorter while it was read"):
        read(readers=2, dtype=dtype)


def test_progress_counts_the_stored_bytes_and_ends_with_all(wide):
    _, read = wide
    seen = []
    read(readers=2, dtype=torch.bfloat16, progress=lambda done, total: seen.append((done, total)))
    assert seen == [((i + 1) * (8 << 10), 128 << 10) for i in range(16)]


PINNED = """
import os, sys, threading
import torch
from neuron_models import filling
from neuron_models.checkpoint import Checkpoint
from neuron_core.devices.host import Host
allowed = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(allowed)})  # as a device binds the main thread
found = set()
preadv = os.preadv
def spy(*args):
    found.add(frozenset(os.sched_getaffinity(0)))
    return preadv(*args)
os.preadv = spy
info = Checkpoint(sys.argv[1]).tensors["torch.float32"]
filling.fill(list(filling.pieces_of(info, 0, 0, 37, torch.empty(37, 23))), 2)
assert found == {frozenset(allowed)}, found
assert os.sched_getaffinity(0) == {min(allowed)}
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_readers_are_not_bound_to_the_processor_of_the_main_thread(stored):
    folder = stored[0].folder
    done = subprocess.run([sys.executable, "-c", PINNED, folder], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_readers_are_shared_among_the_ranks_of_a_host(monkeypatch):
    monkeypatch.setattr("neuron_core.devices.host.Host.cpus", lambda self: list(range(12)))
    assert [filling.readers_for(ranks) for ranks in (1, 2, 4, 12, 64)] == [8, 6, 3, 1, 1]
