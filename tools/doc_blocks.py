# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the documentation: finding them, and checking shell commands without running them.

A comment on the line before a block says that it needs more than Python: `<!-- block: model -->` for one that
reads a real model, `<!-- block: server -->` for one that starts a server or talks to it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

import bench
import dev
from devtools.places import ROOT
from neuron_core.cli.main import neuron
from vllm_neuron.cli.main import vllm_neuron

LANGUAGES = ("python", "bash", "json", "text", "toml", "yaml")
MARKS = ("model", "server")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<source>.*?)^(?P=indent)```$", re.M | re.S)
_MARK = re.compile(r"<!-- block: (\w+) -->\s*$")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._/-]+?)(\[(?P<extras>[\w,-]+)\])?(?P<limits>[=<>~!].*)?")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `line` is the number of its first line of code."""

    page: Path
    line: int
    language: str
    mark: str | None
    source: str

    @property
    def place(self) -> str:
        """`page:line`, as an editor opens it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page that shows code to a reader: at the root, in the packages, and in `docs/`."""
    roots = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    return [*roots, *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/**/*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order; raises `ValueError` for a language or a mark nobody knows."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("source")) + 1
        marked = _MARK.search(text, 0, match.start())
        block = Block(page, line, match["language"], marked and marked[1], textwrap.dedent(match["source"]))
        if block.language not in LANGUAGES or block.mark not in (None, *MARKS):
            raise ValueError(f"{block.place}: a block of language {block.language!r} and mark {block.mark!r}")
        found.append(block)
    if text.count("```") != 2 * len(found):
        raise ValueError(f"{page.relative_to(ROOT)}: a fence that is not closed, or not a line of its own")
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a bash block as words: comments dropped, continued lines joined, assignments kept."""
    for line in block.source.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check(words: list[str]) -> None:
    """Raise `ValueError` for a command that names something this repository does not have."""
    words = words[next((i for i, word in enumerate(words) if not _ASSIGNMENT.match(word)), 0) :]
    checker = _CHECKERS.get(words[0])
    if checker is None:
        raise ValueError(f"{words[0]!r} is not a command the documentation may show; known: {[*_CHECKERS]}")
    checker(words[1:])


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise ValueError(f"no module {words[1]}")
    elif words[0] == "tools/dev.py":
        if words[1:2] == ["nox"]:
            _check_nox(words[2:])
        else:
            _parse(dev.parser(), words[1:])
    elif not (ROOT / words[0]).is_file():
        raise ValueError(f"no file {words[0]}")


def _check_nox(words: list[str]) -> None:
    own, _, passed = "\0".join(words).partition("\0--\0")
    options = own.split("\0")
    sessions = options[options.index("-s") + 1 :] if "-s" in options else []
    known = _nox_sessions()
    unknown = {name.partition("(")[0] for name in sessions} - known
    if unknown:
        raise ValueError(f"no nox session {sorted(unknown)}; there are {sorted(known)}")
    if "bench" in sessions:
        _parse(bench.parser(), passed.split("\0"))


def _nox_sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if any("session" in ast.unparse(d) for d in node.decorator_list)}


def _check_pip(words: list[str]) -> None:
    if words[:1] != ["install"]:
        raise ValueError(f"pip {words[:1]} is not an installation")
    requirements = [word for word in words[1:] if not word.startswith("-")]
    extras_of = {path.parent.name: _extras(path) for path in ROOT.glob("packages/*/pyproject.toml")}
    for word in requirements:
        match = _REQUIREMENT.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not a requirement")
        name = match["name"].removeprefix("./packages/")
        if name != match["name"] and name not in extras_of:
            raise ValueError(f"no folder packages/{name}")
        missing = set((match["extras"] or "").split(",")) - {""} - extras_of.get(name, set())
        if name in extras_of and missing:
            raise ValueError(f"{name} has no extra {sorted(missing)}")


def _extras(path: Path) -> set[str]:
    return set(tomllib.loads(path.read_text())["project"].get("optional-dependencies", {}))


def _check_vllm(words: list[str]) -> None:
    if words[0] not in ("serve", "bench", "chat", "complete", "collect-env"):
        raise ValueError(f"vllm has no command {words[0]}")


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words)
    except SystemExit as end:
        raise ValueError(f"{words}: {said.getvalue().strip()}") from end


def _accept(words: list[str]) -> None:
    pass


def _check_neuron(words: list[str]) -> None:
    _check_click(neuron, words)


def _check_vllm_neuron(words: list[str]) -> None:
    _check_click(vllm_neuron, words)


def _check_accuracy(words: list[str]) -> None:
    from neuron_accuracy.cli.main import cli

    _check_click(cli, words)


def _check_click(group: click.Group, words: list[str]) -> None:
    command: click.Command = group
    context = click.Context(group, info_name=group.name)
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name, found, words = command.resolve_command(context, words)
            assert found is not None
            command, context = (
                found,
                click.Context(found, info_name=name, parent=context, **found.context_settings),
            )
        command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        raise ValueError(error.format_message()) from error


_CHECKERS: dict[str, Callable[[list[str]], None]] = {
    "python": _check_python,
    "python3": _check_python,
    "nox": _check_nox,
    "pip": _check_pip,
    "vllm": _check_vllm,
    "neuron": _check_neuron,
    "vllm-neuron": _check_vllm_neuron,
    "neuron-accuracy": _check_accuracy,
    "git": _accept,
    "cd": _accept,
    "source": _accept,
    "curl": _accept,
}
