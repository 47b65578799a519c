# SPDX-License-Identifier: Apache-2.0
"""The requirements files name one file a line, and pip and we read the same out of them."""

import hashlib

import pytest

from devtools import pins, places
from devtools.console import Failure

COMMITTED = sorted(places.REQUIREMENTS.glob("*.txt"))


def test_a_written_file_reads_back(tmp_path, make_wheel):
    written = [make_wheel("b_thing", "2.0"), make_wheel("a", "1.0+cpu")]
    path = tmp_path / "pins.txt"
    path.write_text(pins.render(written))
    assert pins.read(path) == sorted(written, key=lambda pin: pin.requirement)
    assert [pin.requirement for pin in pins.read(path)] == ["a==1.0+cpu", "b-thing==2.0"]


def test_the_hash_is_that_of_the_file(index, make_wheel):
    pin = make_wheel("a")
    assert pin.sha256 == hashlib.sha256((index / pin.file).read_bytes()).hexdigest()


def test_a_source_distribution_is_pinned_by_its_version(tmp_path):
    path = tmp_path / "vllm-0.32.0.tar.gz"
    path.write_bytes(b"source")
    assert pins.pin_file(path).requirement == "vllm==0.32.0"


@pytest.mark.parametrize("line", ["torch", "torch==2.13.0", "torch==2.13.0 --hash=sha256:12"])
def test_a_line_without_its_hash_is_refused_by_number(tmp_path, line):
    path = tmp_path / "pins.txt"
    path.write_text(f"# comment\n{line}\n")
    with pytest.raises(Failure, match=r"pins\.txt line 2"):
        pins.read(path)


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_every_committed_file_is_pinned_and_hashed(path):
    found = pins.read(path)
    assert found
    assert path.read_text() == pins.render(found)


def test_torch_is_the_cpu_build():
    found = [
        pin
        for pin in pins.read(places.REQUIREMENTS / "wheelhouse.txt")
        if pin.requirement.startswith("torch==")
    ]
    assert [pin.requirement for pin in found] == ["torch==2.13.0+cpu"]
