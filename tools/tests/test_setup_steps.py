# SPDX-License-Identifier: Apache-2.0
"""Steps show progress and explain their failures; places are found, locked and written whole."""

import argparse
import fcntl
import sys
import threading
import time
import zipfile

import pytest

import dev
from devtools import commands, console, places, project, vllm_build
from devtools.console import Failure, Step


def test_a_long_step_says_what_it_is_doing(monkeypatch, capsys):
    monkeypatch.setattr(console, "QUIET_S", 0.1)
    with Step("counting") as step:
        step.run([sys.executable, "-u", "-c", "import time\nprint('one')\ntime.sleep(0.6)\nprint('two')"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("counting … 0 s  ")
    assert lines[-1].startswith("counting: done in 0.")


def test_a_short_step_says_nothing(capsys):
    with Step("counting") as step:
        assert step.run(["echo", "one"]) == "one\n"
    assert capsys.readouterr().out == ""


def test_a_failed_command_is_shown_with_the_end_of_its_output():
    code = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with (
        pytest.raises(Failure, match=r"(?s)counting failed.*exit code 3.*line 99") as caught,
        Step("counting") as step,
    ):
        step.run([sys.executable, "-c", code])
    assert "line 10\n" not in str(caught.value)


def test_a_second_set_up_waits_for_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(console, "QUIET_S", 0.1)
    with (tmp_path / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (handle, fcntl.LOCK_UN)).start()
        start = time.monotonic()
        with places.exclusive(tmp_path):
            assert time.monotonic() - start > 0.4
    assert "waiting for another set-up to end" in capsys.readouterr().out


def test_a_damaged_stamp_is_no_stamp(tmp_path):
    path = tmp_path / "stamp"
    places.write_json(path, {"a": [1, 2]})
    assert places.read_json(path) == {"a": [1, 2]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["stamp"]
    path.write_text('{"a": [1')
    assert places.read_json(path) == {}


def test_tools_write_bytecode_and_never_download_through_uv(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere")
    env = places.clean_environ()
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert "VIRTUAL_ENV" not in env
    assert (env["UV_OFFLINE"], env["UV_PYTHON_DOWNLOADS"]) == ("1", "never")


def test_another_python_is_told_which_one_to_install(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 13, 1, "final", 0))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Failure, match=r"CPython 3\.11; this is 3\.13\.1 .*apt install python3\.11"):
        places.python_for_lock()


def test_another_machine_is_refused_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr(commands.platform, "machine", lambda: "aarch64")
    with pytest.raises(Failure, match="linux aarch64"):
        commands.check_host()


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Failure, match=r"g\+\+ is missing"):
        commands.check_host()


def test_the_wheelhouse_link_is_replaced_in_one_step(tmp_path):
    link = tmp_path / "wheelhouse"
    for name in ("first", "second", "second"):
        project.link(link, tmp_path / name)
        assert link.readlink() == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wheelhouse"]


def test_a_real_folder_is_the_wheelhouse_of_a_machine_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr(project, "LINK", tmp_path / "wheelhouse")
    assert project.wheelhouse_dir().parent == places.cache_dir()
    (tmp_path / "wheelhouse").mkdir()
    assert project.wheelhouse_dir() == tmp_path / "wheelhouse"


@pytest.mark.parametrize(
    ("requires", "problem"), [("", None), ("Requires-Dist: torch==2.13.0\n", "requires torch")]
)
def test_a_vllm_that_requires_its_own_torch_is_refused(tmp_path, requires, problem):
    wheel = tmp_path / vllm_build.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"vllm-{vllm_build.VERSION}.dist-info/METADATA", f"Name: vllm\n{requires}")
    if problem is None:
        vllm_build.check(wheel)
        return
    with pytest.raises(Failure, match=problem):
        vllm_build.check(wheel)


def test_a_build_that_gave_another_wheel_names_it(tmp_path):
    (tmp_path / "vllm-0.32.0+cu130-cp311-cp311-linux_x86_64.whl").touch()
    with pytest.raises(Failure, match=r"cu130.*instead of vllm-0\.32\.0-cp311"):
        vllm_build.check(tmp_path / vllm_build.WHEEL)


def test_every_word_after_nox_is_for_nox(monkeypatch):
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(commands, "run", lambda arguments: seen.append(arguments) or 0)
    assert dev.main(["nox", "-s", "tests", "--", "-k", "name", "--help"]) == 0
    assert seen[0].arguments == ["-s", "tests", "--", "-k", "name", "--help"]


def test_a_failure_is_an_exit_code_and_a_message(monkeypatch, capsys):
    def fail(arguments: argparse.Namespace) -> int:
        raise Failure("pip could not fetch it")

    monkeypatch.setattr(commands, "run", fail)
    assert dev.main(["sync"]) == 1
    assert "error: pip could not fetch it" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        dev.main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in ("demo", "test", "sync", "nox", "lock"))
