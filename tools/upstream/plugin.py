# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for vLLM's own tests: what they assume of a GPU machine, and a record of what each did.

Given to pytest as ``-p upstream.plugin``. The record is a file of JSON lines, written as the tests go, so that a
process that dies has said which test it died in.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

MESSAGE_CHARS = 400
FLOAT16 = ("half", "float16")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the record goes, and which tests are not to be run (again)."""
    group = parser.getgroup("upstream")
    group.addoption("--record", type=Path, required=True, help="file of JSON lines to add to")
    group.addoption("--leave-out", type=Path, help="file of node ids that are not run, one a line")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before vLLM's conftest imports it: gloo where it says nccl, and the patches every vLLM process gets."""
    if not (early_config.rootpath / "tests" / "conftest.py").exists():
        return  # not vLLM's checkout: it has nothing to be told
    import vllm.distributed
    from vllm.distributed import parallel_state
    from vllm.plugins import load_general_plugins

    original = parallel_state.init_distributed_environment

    @functools.wraps(original)
    def init_distributed_environment(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":  # its default for every platform that is not vLLM's own CPU
            kwargs["backend"] = "gloo"
        return original(*args, **kwargs)

    parallel_state.init_distributed_environment = init_distributed_environment
    vllm.distributed.init_distributed_environment = init_distributed_environment
    _read_float16_as_bfloat16()
    _clean_up_what_there_is()
    load_general_plugins()


def _read_float16_as_bfloat16() -> None:
    """Tests name float16 for small GPUs; this platform has bfloat16 and refuses float16."""
    from vllm.config import model

    original = model._get_and_verify_dtype

    @functools.wraps(original)
    def get_and_verify_dtype(model_id: str, config: Any, dtype: Any, **kwargs: Any) -> Any:
        return original(model_id, config, "bfloat16" if dtype in FLOAT16 else dtype, **kwargs)

    model._get_and_verify_dtype = get_and_verify_dtype


def pytest_configure(config: pytest.Config) -> None:
    """Start recording."""
    config.pluginmanager.register(_Recorder(config.getoption("--record")), "upstream-record")


def _clean_up_what_there_is() -> None:
    """After each test vLLM's fixture tears groups down and collects garbage: a second where there are no groups."""
    import vllm.distributed
    from vllm import envs
    from vllm.distributed import parallel_state

    original = parallel_state.cleanup_dist_env_and_memory

    @functools.wraps(original)
    def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
        if shutdown_ray or parallel_state._WORLD is not None:
            original(shutdown_ray)
        else:
            envs.disable_envs_cache()
            gc.collect()  # without what pytest_collection_finish froze

    parallel_state.cleanup_dist_env_and_memory = cleanup_dist_env_and_memory
    vllm.distributed.cleanup_dist_env_and_memory = cleanup_dist_env_and_memory


def pytest_collection_finish() -> None:
    """What the imports made stays: it is not looked at after each test."""
    gc.freeze()


def pytest_collection() -> None:
    """The same for servers, which are processes of their own, by their command line."""
    try:
        utils = importlib.import_module("tests.utils")
    except ModuleNotFoundError:
        return
    original = utils.RemoteVLLMServer.__init__

    @functools.wraps(original)
    def init(self: Any, model: str, vllm_serve_args: list[str], *args: Any, **kwargs: Any) -> None:
        words = [str(word) for word in vllm_serve_args]
        for at, word in enumerate(words[:-1]):
            if word == "--dtype" and words[at + 1] in FLOAT16:
                words[at + 1] = "bfloat16"
        original(self, model, words, *args, **kwargs)

    utils.RemoteVLLMServer.__init__ = init


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the caller names: what ran in an earlier process, and all but a slice."""
    listing = config.getoption("--leave-out")
    if listing is not None:
        left_out = set(listing.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in left_out]


class _Recorder:
    """Adds a line for each start and each result."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def _write(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(id=report.nodeid, outcome="failed", message=_message(report))
        elif report.skipped:
            self._write(id=report.nodeid, outcome="skipped", message=_message(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(id=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "wasxfail"):  # vLLM's own mark: it is their statement, not ours
            outcome = "skipped" if report.when == "call" or report.skipped else None
        elif report.when == "call" or not report.passed:
            outcome = report.outcome
        else:
            outcome = None
        if outcome is not None:
            message = "" if outcome == "passed" else _message(report)
            self._write(id=report.nodeid, outcome=outcome, message=message, seconds=round(report.duration, 3))


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The last line of what went wrong that says something, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:MESSAGE_CHARS]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)[:MESSAGE_CHARS]
    lines = [line for line in str(report.longrepr or "").splitlines() if line.strip()]
    return (lines[-1] if lines else "")[-MESSAGE_CHARS:]
