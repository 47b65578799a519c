# SPDX-License-Identifier: Apache-2.0
"""Which source an op is made of, so that editing one op changes the keys of the graphs that call it and of no others.

An op's source is its definition in ``library.py`` and, in ``cpu/``, the binding of its name, each with every
definition they reach. Reaching is decided by name and errs on the side of too much: any identifier that some
definition bears counts as a use of it. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from neuron_core.errors import CompileError

__all__ = ["OpSources", "op_digest"]

FOLDER = Path(__file__).parent
BINDINGS = "bindings.cpp"
_TOKEN = re.compile(r'[A-Za-z_]\w*|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|\d[\w.]*|\S')
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*")', re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*$")
_TYPES = ("struct", "class", "enum", "union", "using")
_NOT_NAMES = ("alignas", "decltype", "__attribute__", "noexcept", "static_assert")


@dataclass(frozen=True)
class Definition:
    """A top-level definition: the names it bears, the identifiers it uses, and its text without comments."""

    names: frozenset[str]
    uses: frozenset[str]
    text: str


@functools.cache
def op_digest(name: str) -> str:
    """SHA-256 over the source of an op such as ``neuron::kv_write_``; ``CompileError`` for one that is not ours."""
    from neuron_core.graphs.capture import TRACING

    with TRACING:  # parses, and so do compile threads: see the inductor compiler
        return _own_sources().digest(name.partition("::")[2])


class OpSources:
    """The definitions of a folder of ops: Python in ``library.py`` and ``reference.py``, C++ in ``cpu/``."""

    def __init__(
        self, ops: Mapping[str, Definition], python: list[Definition], cpp: list[Definition]
    ) -> None:
        self._ops = ops
        self._python = python
        self._cpp = cpp

    @classmethod
    def read(cls, folder: Path) -> OpSources:
        """Parse the sources under ``folder``."""
        ops: dict[str, Definition] = {}
        python: list[Definition] = []
        for file in ("library.py", "reference.py"):
            for statement in ast.parse((folder / file).read_text()).body:
                schema = _schema(statement)
                if schema is None:
                    python.append(_python_definition(statement))
                else:
                    ops[schema] = _python_definition(statement)
        files = sorted((folder / "cpu").glob("*.[ch]*"))
        cpp = [part for file in files for part in _cpp_definitions(file.name, file.read_text())]
        return cls(ops, python, cpp)

    def digest(self, name: str) -> str:
        """SHA-256 over everything that ``name`` reaches."""
        if name not in self._ops:
            raise CompileError(f"neuron::{name} is not defined in {FOLDER / 'library.py'}")
        entry = {name, f"{BINDINGS}:{name}"}
        reached = [
            self._ops[name],
            *_closure(self._ops[name].uses, self._python),
            *_closure(entry, self._cpp),
        ]
        digest = hashlib.sha256()
        for text in sorted(definition.text for definition in reached):
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()


@functools.cache
def _own_sources() -> OpSources:
    """Parsed once: a warm start asks for the digest of every op."""
    return OpSources.read(FOLDER)


def _closure(names: Iterable[str], definitions: list[Definition]) -> list[Definition]:
    """Definitions reached from ``names``; those without a name are part of every one."""
    wanted = set(names)
    reached = [definition for definition in definitions if not definition.names]
    left = [definition for definition in definitions if definition.names]
    while True:
        found = [definition for definition in left if definition.names & wanted]
        if not found:
            return reached
        reached += found
        left = [definition for definition in left if not definition.names & wanted]
        wanted.update(*(definition.uses for definition in found))


def _schema(statement: ast.stmt) -> str | None:
    """The op that ``_define("name(...) -> ...", ...)`` defines."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    if ast.unparse(call.func) != "_define" or not isinstance(call.args[0], ast.Constant):
        return None
    return str(call.args[0].value).split("(", 1)[0]


def _python_definition(statement: ast.stmt) -> Definition:
    names: set[str] = set()
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        names = {statement.name}
        if ast.get_docstring(statement) is not None:
            statement.body = statement.body[1:] or [ast.Pass()]
    elif isinstance(statement, ast.Assign):
        names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        names = {alias.asname or alias.name for alias in statement.names}
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return Definition(frozenset({""}), frozenset(), "")  # a docstring
    uses = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    uses |= {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    return Definition(frozenset(names), frozenset(uses - names), ast.unparse(statement))


def _cpp_definitions(file: str, source: str) -> list[Definition]:
    """Split at the end of each declaration outside braces.

    Namespaces are looked through; a name of an unnamed one is ``file:name`` and reached from its file alone.
    """
    plain = _COMMENT.sub(lambda found: found.group(1) or " ", source)
    directives = [match.group().strip() for match in _DIRECTIVE.finditer(plain)]
    branches = " ".join(text for text in directives if not text.startswith(("#include", "#pragma once")))
    definitions = [Definition(frozenset({f"{file}:#"}), frozenset(), branches)]
    tokens: list[str] = []
    opened: list[bool] = []  # of each namespace around: is it unnamed
    depth = 0
    for token in _TOKEN.findall(_DIRECTIVE.sub("", plain)):
        if token == "{" and depth == 0 and "namespace" in tokens:
            opened.append(tokens[-1] == "namespace")
            tokens = []
        elif token == "}" and depth == 0:
            opened.pop()
        else:
            depth += (token in "{([") - (token in "})]")
            tokens.append(token)
            if depth == 0 and token in (";", "}"):
                if len(tokens) > 1:
                    definitions.append(_cpp_definition(tokens, file, any(opened)))
                tokens = []
    return definitions


def _cpp_definition(tokens: list[str], file: str, local: bool) -> Definition:
    identifiers = {token for token in tokens if _NAME.match(token)}
    name = _cpp_name(tokens)
    uses = (identifiers - {name}) | {f"{file}:{token}" for token in (*identifiers, "#")}
    names = set() if name is None else {f"{file}:{name}" if local else name}
    return Definition(frozenset(names), frozenset(uses), " ".join(tokens))


def _cpp_name(tokens: list[str]) -> str | None:
    """The type, function or variable that a declaration introduces; None counts as used by all."""
    if tokens[0] == "typedef":
        return None
    start = _after_template(tokens)
    for place in range(start, len(tokens) - 1):
        token, following = tokens[place], tokens[place + 1]
        if token in _TYPES:
            return following
        if _NAME.match(token) and token not in _NOT_NAMES and following in ("(", "=", "[", "{", ";"):
            return token
    return None


def _after_template(tokens: list[str]) -> int:
    if tokens[0] != "template":
        return 0
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token == "<") - (token == ">")
        if place and depth == 0:
            return place + 1
    return 0
