# SPDX-License-Identifier: Apache-2.0
"""Results of vLLM's tests held against the expectations; the results come from a real pytest on a small folder."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from devtools import vllm_build
from devtools.console import Failure
from upstream import expectations, folders, hub, report, source, verdict
from upstream.process import Run

TESTS = """
import os, pytest

@pytest.mark.parametrize("n", [1, 2])
def test_good(n):
    assert n

def test_bad():
    assert 2 + 2 == 5

def test_teardown(request):
    request.addfinalizer(lambda: 1 / 0)

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass

def test_dies():
    os._exit(9)

def test_after():
    pass
"""
FILE = "tests/room/test_it.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the tests above do, run as vLLM's are; one of them ends its process."""
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "tests" / "room").mkdir(parents=True)
    (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (checkout / FILE).write_text(TESTS)
    (checkout / "tests" / "room" / "test_import.py").write_text("import no_such_package\n")
    env = {**os.environ, "PYTHONPATH": str(Path(source.__file__).parents[1])}
    run = Run(checkout, env, tmp_path_factory.mktemp("scratch"))
    return run.folder("room", ["tests/room"], timeout_s=60)


def expect(text: str, tmp_path: Path) -> list[expectations.Expectation]:
    path = tmp_path / "expectations.toml"
    path.write_text(text)
    return expectations.read(path)


def listing(*tests: str, kind: str = "model", extra: str = "") -> str:
    return f'[[expect]]\nkind = "{kind}"\nreason = "because"\ntests = {json.dumps(tests)}\n{extra}\n'


ALL_BAD = (
    f"{FILE}::test_bad",
    f"{FILE}::test_teardown",
    f"{FILE}::test_dies",
    "tests/room/test_import.py",
)


def judged(results, listed) -> verdict.Verdict:
    return verdict.judge("room", results, listed, paths=["tests/room"], whole=True)


def test_every_test_has_a_result_though_one_ended_its_process(results):
    outcomes = {node_id.removeprefix(f"{FILE}::"): result.outcome for node_id, result in results.items()}
    assert outcomes == {
        "test_good[1]": "passed",
        "test_good[2]": "passed",
        "test_bad": "failed",
        "test_teardown": "failed",
        "test_skipped": "skipped",
        "test_dies": "failed",
        "test_after": "passed",
        "tests/room/test_import.py": "failed",
    }
    assert results[f"{FILE}::test_bad"].message.startswith("assert (2 + 2) == 5")
    assert results[f"{FILE}::test_dies"].message == "the process ended in this test (9)"
    assert "no_such_package" in results["tests/room/test_import.py"].message


def test_a_failure_that_is_not_listed_fails(results, tmp_path):
    found = judged(results, expect(listing(*ALL_BAD[1:]), tmp_path))
    assert list(found.failed) == [f"{FILE}::test_bad"]
    assert not found.is_good


def test_all_failures_listed_is_good(results, tmp_path):
    found = judged(results, expect(listing(*ALL_BAD), tmp_path))
    assert found.is_good
    assert (len(found.passed), len(found.listed), len(found.skipped), found.can_run) == (3, 4, 1, 3)


def test_a_listed_test_that_passes_fails_unless_it_is_flaky(results, tmp_path):
    more = f"{FILE}::test_good[*]"
    found = judged(results, expect(listing(*ALL_BAD, more), tmp_path))
    assert found.needless == [f"{FILE}::test_good[1]", f"{FILE}::test_good[2]"]
    assert not found.is_good
    flaky = listing(*ALL_BAD) + listing(more, extra="flaky = true")
    assert judged(results, expect(flaky, tmp_path)).is_good


def test_a_pattern_without_a_test_fails_only_where_its_folder_ran_whole(results, tmp_path):
    listed = expect(listing(*ALL_BAD, f"{FILE}::test_gone", "tests/other/test_x.py::test_y"), tmp_path)
    assert judged(results, listed).stale == [f"{FILE}::test_gone"]
    part = verdict.judge("room", results, listed, paths=["tests/room"], whole=False)
    assert part.stale == [] and part.is_good


def test_what_needs_something_that_is_not_here_does_not_count_as_able_to_run(results, tmp_path):
    absent = judged(results, expect(listing(*ALL_BAD), tmp_path))
    assert (absent.can_run, verdict.share([absent])) == (3, 1.0)
    broken = judged(results, expect(listing(*ALL_BAD, kind="upstream"), tmp_path))
    assert (broken.can_run, verdict.share([broken])) == (3 + 4, 3 / 7)
    assert verdict.share([absent, broken]) == (3 + 3) / (3 + 7)
    text = io.StringIO()
    report.show([absent, broken], Console(file=text, width=160))
    assert "60.0% of the tests that can run passed; at least 97% should" in text.getvalue()


def test_brackets_of_a_node_id_mean_themselves(tmp_path):
    (found,) = expect(listing("tests/a.py::test[x-*]"), tmp_path)
    assert found.matches("tests/a.py::test[x-\n1]")
    assert not found.matches("tests/a.py::testx")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[expect]\n", "is not TOML"),
        ("[other]\n", "unknown other"),
        (listing("a::b", kind="mood"), r"entry 1: kind='mood'; use one of model, "),
        ('[[expect]]\nkind = "model"\nreason = " "\ntests = ["a"]\n', r"entry 1: reason=' '"),
        ('[[expect]]\nkind = "model"\nreason = "r"\ntests = []\n', r"entry 1: tests=\[\]"),
        (listing("a", extra="flaky = 1"), r"entry 1: flaky=1; use true or false"),
        (listing("a", extra="until = 3"), r"entry 1: unknown until"),
        (listing("a") + listing("a"), "a is listed twice"),
    ],
)
def test_a_malformed_expectation_is_named(text, said, tmp_path):
    with pytest.raises(Failure, match=said):
        expect(text, tmp_path)


def test_the_report_names_each_thing_to_do(results, tmp_path):
    listed = expect(listing(*ALL_BAD[1:], f"{FILE}::test_after", f"{FILE}::test_gone"), tmp_path)
    found = judged(results, listed)
    text = io.StringIO()
    report.show([found], Console(file=text, width=160))
    for said in (
        f"failed, not listed: {FILE}::test_bad",
        f"listed, but passed: {FILE}::test_after",
        f"listed, but matches no test: {FILE}::test_gone",
    ):
        assert said in text.getvalue()
    report.write([found], tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())["room"]
    assert (written["passed"], len(written["failed"]), len(written["listed"])) == (3, 1, 3)


def test_the_committed_tables_can_be_read_and_agree():
    assert hub.read_table()
    known = [path for folder in folders.read().values() for path in folder.paths]
    for pattern in (word for each in expectations.read() for word in each.patterns):
        assert any(pattern.startswith(f"{path}/") for path in known), pattern
    for folder in folders.read().values():
        for path in folder.fast:
            assert any(path.startswith(f"{each}/") for each in folder.paths), path


def test_an_unknown_folder_is_refused_with_those_there_are():
    with pytest.raises(Failure, match="no folder 'kernels'; there are core, "):
        folders.choose(folders.read(), ["kernels"])


def test_a_name_that_is_under_two_models_is_refused(tmp_path):
    path = tmp_path / "hub.toml"
    path.write_text('tiny = ["a/b"]\nplain = ["a/b"]\n')
    with pytest.raises(Failure, match="a/b is under tiny and under plain"):
        hub.read_table(path)


def test_what_pip_fetches_is_only_kept_if_it_is_the_pinned_file(tmp_path, monkeypatch):
    def damaged(scratch: Path) -> Path:
        path = scratch / vllm_build.pin().file
        path.write_bytes(b"not it")
        return path

    monkeypatch.setattr(source, "fetch", damaged)
    with pytest.raises(Failure, match=r"vllm-.*\.tar\.gz, as pip fetched it, has 6 bytes instead of"):
        source.ensure(tmp_path)
    assert list(tmp_path.iterdir()) == []
