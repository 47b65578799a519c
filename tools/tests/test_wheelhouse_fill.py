# SPDX-License-Identifier: Apache-2.0
"""The wheelhouse ends up with exactly the pinned files, whatever happened before or meanwhile."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from devtools import wheelhouse
from devtools.console import Failure
from devtools.pins import Pin

BROKEN_PIP: list[str | Path] = ["false"]


def held(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name != wheelhouse.STAMP}


def script(path: Path, text: str) -> list[str | Path]:
    path.write_text(text)
    return [sys.executable, path]


def test_fetches_every_pinned_file_and_then_needs_no_pip(tmp_path, make_wheel, pip, capsys):
    pins = [make_wheel(f"thing{i}") for i in range(15)]
    target = tmp_path / "wheelhouse"
    wheelhouse.fill(target, pins, pip)
    assert held(target) == {pin.file for pin in pins}
    assert all(pin.problem(target / pin.file) is None for pin in pins)
    start = time.perf_counter()
    wheelhouse.fill(target, pins, BROKEN_PIP)
    assert time.perf_counter() - start < 0.5


def test_a_file_with_another_hash_is_named_and_not_kept(tmp_path, make_wheel, pip):
    good, bad = make_wheel("good"), make_wheel("bad")
    pinned = dataclasses.replace(bad, sha256="0" * 64)
    target = tmp_path / "wheelhouse"
    with pytest.raises(Failure, match=r"bad-1\.0-py3-none-any\.whl.*another SHA-256") as caught:
        wheelhouse.fill(target, [good, pinned], pip)
    assert "good-1.0" not in str(caught.value).split("pip said")[0]
    assert bad.file not in held(target)
    assert not wheelhouse.is_complete(target, [good, pinned])


def test_a_file_that_pip_left_truncated_is_named(tmp_path, make_wheel):
    pin = make_wheel("cut")
    pip = script(
        tmp_path / "pip.py",
        f"import sys, pathlib\n"
        f"target = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]) / {pin.file!r}\n"
        f"target.write_bytes(b'PK')\n",
    )
    with pytest.raises(Failure, match=rf"{pin.file}.*2 bytes instead of {pin.size_bytes}"):
        wheelhouse.fill(tmp_path / "wheelhouse", [pin], pip)
    assert held(tmp_path / "wheelhouse") == set()


def test_a_truncated_file_is_named_and_fetched_again(tmp_path, make_wheel, pip, capsys):
    pins = [make_wheel("one"), make_wheel("two")]
    target = tmp_path / "wheelhouse"
    wheelhouse.fill(target, pins, pip)
    (target / pins[0].file).write_bytes(b"PK")
    wheelhouse.fill(target, pins, pip)
    said = capsys.readouterr().out
    assert f"{pins[0].file} has 2 bytes instead of" in said
    assert pins[1].file not in said
    assert all(pin.problem(target / pin.file) is None for pin in pins)


def test_a_changed_byte_is_found_by_hash(tmp_path, make_wheel, pip, capsys):
    pin = make_wheel("one")
    target = tmp_path / "wheelhouse"
    wheelhouse.fill(target, [pin], pip)
    path = target / pin.file
    before = path.stat()
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    wheelhouse.fill(target, [pin], BROKEN_PIP)  # neither size nor time tells
    wheelhouse.fill(target, [pin], pip, verify=True)
    assert f"{pin.file} has SHA-256" in capsys.readouterr().out
    assert pin.problem(path) is None


def test_a_killed_run_is_repeated_safely(tmp_path, make_wheel, pip):
    pins = [make_wheel("one"), make_wheel("two")]
    target = tmp_path / "wheelhouse"
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, pathlib, time\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        f"(folder / {pins[0].file!r}).write_bytes(b'PK')\n"
        "time.sleep(5)\n"
    )
    code = f"""
import sys
from pathlib import Path
from devtools import pins, wheelhouse
listing = pins.read(Path({str(tmp_path / "pins.txt")!r}))
wheelhouse.fill(Path({str(target)!r}), listing, [sys.executable, {str(slow)!r}])
"""
    (tmp_path / "pins.txt").write_text("".join(f"{pin.line}\n" for pin in pins))
    env = {**os.environ, "PYTHONPATH": str(Path(wheelhouse.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)
    deadline = time.monotonic() + 20
    while not list(target.glob(".partial-*/*.whl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not wheelhouse.is_complete(target, pins)
    assert list(target.glob(".partial-*"))
    wheelhouse.fill(target, pins, pip)
    assert held(target) == {pin.file for pin in pins}


def test_what_a_failed_run_fetched_is_kept(tmp_path, make_wheel, pip, index):
    pins = [make_wheel("one"), make_wheel("two")]
    target = tmp_path / "wheelhouse"
    (index / pins[1].file).rename(tmp_path / "aside")
    with pytest.raises(Failure, match=pins[1].file):
        wheelhouse.fill(target, pins, pip)
    wheelhouse.fill(target, pins[:1], pip)
    asked = tmp_path / "asked"
    (tmp_path / "aside").rename(index / pins[1].file)
    recording = script(
        tmp_path / "pip.py",
        "import pathlib, subprocess, sys\n"
        "listing = pathlib.Path(sys.argv[sys.argv.index('--requirement') + 1])\n"
        f"pathlib.Path({str(asked)!r}).write_text(listing.read_text())\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'pip', *sys.argv[1:]]).returncode)\n",
    )
    wheelhouse.fill(target, pins, recording)
    assert "two==1.0" in asked.read_text()
    assert "one==1.0" not in asked.read_text()


def test_files_of_an_older_wheelhouse_are_linked_not_fetched(tmp_path, make_wheel, pip):
    pins = [make_wheel("one"), make_wheel("two")]
    older = tmp_path / "older"
    wheelhouse.fill(older, pins, pip)
    (older / pins[1].file).write_bytes(b"PK")
    target = tmp_path / "wheelhouse"
    wheelhouse.fill(target, pins, pip, seeds=[older])
    assert (target / pins[0].file).samefile(older / pins[0].file)
    assert pins[1].problem(target / pins[1].file) is None


@pytest.mark.parametrize("offered", [None, "2.13.0"], ids=["no torch", "only the CUDA build"])
def test_without_the_cpu_build_of_torch_the_pip_settings_are_named(tmp_path, make_wheel, pip, index, offered):
    pin = make_wheel("torch", "2.13.0+cpu")
    (index / pin.file).unlink()
    if offered:
        make_wheel("torch", offered)
    target = tmp_path / "wheelhouse"
    with pytest.raises(Failure) as caught:
        wheelhouse.fill(target, [pin, make_wheel("other")], pip)
    said = str(caught.value)
    for word in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", pin.file, "CUDA"):
        assert word in said
    assert not list(target.glob("torch*"))


def test_large_files_travel_alone_and_torch_first():
    sizes = {"torch==2.13.0+cpu": 5, "big==1": 30_000_000, "bigger==1": 40_000_000}
    sizes |= {f"small{i}==1": i for i in range(20)}
    pins = [Pin(requirement, "0" * 64, f"{requirement}.whl", size) for requirement, size in sizes.items()]
    batches = wheelhouse.batches(pins)
    assert [[pin.requirement for pin in batch] for batch in batches[:3]] == [
        ["torch==2.13.0+cpu"],
        ["bigger==1"],
        ["big==1"],
    ]
    assert [len(batch) for batch in batches[3:]] == [12, 8]
