# SPDX-License-Identifier: Apache-2.0
"""Builds all C++ kernels of one graph as a single extension module, with a shared precompiled header."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from neuron_core.errors import CompileError
from neuron_core.graphs.compilers.loader import KERNELS_FILE
from neuron_core.graphs.compilers.wrapper import Kernel
from neuron_core.graphs.key import text_digest

__all__ = ["KERNELS_SOURCE", "build_kernels"]

KERNELS_SOURCE = "kernels.cpp"

_HEADER = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/inductor/cpp_prefix.h>
"""

_PROLOGUE = """\
static void* (*tensor_data_ptr)(PyObject*);
template <typename T> static inline T parse(PyObject* value) {
    return static_cast<T>(tensor_data_ptr(value));
}
template <> inline int64_t parse<int64_t>(PyObject* value) { return PyLong_AsSsize_t(value); }
template <> inline float parse<float>(PyObject* value) { return static_cast<float>(PyFloat_AsDouble(value)); }
template <> inline double parse<double>(PyObject* value) { return PyFloat_AsDouble(value); }
"""

_BINDING = """
static PyObject* py_{name}(PyObject*, PyObject* const* args, Py_ssize_t count) {{
    if (count != {count}) {{ PyErr_SetString(PyExc_TypeError, "{name} takes {count} arguments"); return
    nullptr; }} try {{ {name}({parsed}); }} catch (std::exception const& e) {{
    PyErr_SetString(PyExc_RuntimeError, e.what()); return nullptr; }} if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}}
"""

_EPILOGUE = """
static PyObject* py_bind(PyObject*, PyObject* address) {{
    tensor_data_ptr = reinterpret_cast<void* (*)(PyObject*)>(PyLong_AsVoidPtr(address));
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}}
static PyMethodDef methods[] = {{
    {{"bind", py_bind, METH_O, ""}},
{methods}
    {{nullptr, nullptr, 0, nullptr}}}};
// Multi-phase initialisation: Python keeps single-phase modules by path, which would outlive a rebuilt entry.
static PyModuleDef_Slot slots[] = {{{{0, nullptr}}}};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "kernels", nullptr, 0, methods, slots}};
PyMODINIT_FUNC PyInit_kernels() {{ return PyModuleDef_Init(&definition); }}
"""

_header_lock = threading.Lock()

_KILLED = re.compile(r"signal terminated program")
"""How the driver says that a signal (the system short of memory, a server stopped while starting) ended its child."""


class InterruptedCompileError(CompileError):
    """A signal ended the compiler: what it compiled may be sound, so the next start tries again."""

    recordable = False


def build_kernels(kernels: Sequence[Kernel], staging: Path, toolchain_dir: Path) -> None:
    """Write ``kernels.cpp`` and build ``kernels.so``; raises ``CompileError`` with g++'s output."""
    source = staging / KERNELS_SOURCE
    source.write_text(_translation_unit(kernels))
    with _header_lock:  # picking the vector instructions and the header happen once
        command = _command(toolchain_dir)
        header = _precompiled_header(command, toolchain_dir)
    _run(
        [*command[0], "-include", str(header), source.name, *command[1], "-o", KERNELS_FILE, *command[2]],
        staging,
    )


def _translation_unit(kernels: Sequence[Kernel]) -> str:
    parts = [_HEADER, _PROLOGUE]
    for kernel in kernels:
        parsed = ", ".join(
            f"parse<{argument.replace('const ', '')}>(args[{index}])"
            for index, argument in enumerate(kernel.argument_types)
        )
        # Inductor calls every kernel ``kernel``; each translation unit had one.
        parts.append(f"\n#define kernel {kernel.name}{kernel.source}#undef kernel\n")
        parts.append(_BINDING.format(name=kernel.name, count=len(kernel.argument_types), parsed=parsed))
    methods = "\n".join(
        f'    {{"{kernel.name}", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(py_{kernel.name})), '
        'METH_FASTCALL, ""},'
        for kernel in kernels
    )
    parts.append(_EPILOGUE.format(methods=methods))
    return "".join(parts)


def _command(toolchain_dir: Path) -> tuple[list[str], list[str], list[str]]:
    """Compiler and flags before the sources, include flags, and link flags, as Inductor would use them."""
    from torch._inductor import config
    from torch._inductor.cpp_builder import CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    from neuron_core.graphs.compilers.lowering import SETTINGS, toolchain

    with config.patch(SETTINGS), toolchain(toolchain_dir):
        options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", shared=True)
    compiler = shlex.split(options.get_compiler())
    definitions = [word for item in options.get_definitions() for word in shlex.split(f"-D{item.strip()}")]
    flags = [word for item in options.get_cflags() for word in shlex.split(f"-{item}")]
    flags.remove("-g1") if "-g1" in flags else None  # line tables cost a third of the compile time
    passthrough = [word for item in options.get_passthrough_args() for word in shlex.split(item)]
    includes = [f"-I{folder}" for folder in options.get_include_dirs()]
    link = [word for item in options.get_ldflags() for word in shlex.split(f"-{item}")]
    link += [f"-L{folder}" for folder in options.get_libraries_dirs()]
    link += [f"-l{library}" for library in options.get_libraries()]
    return [*compiler, *definitions, *flags], [*includes, *passthrough], link


def _precompiled_header(command: tuple[list[str], list[str], list[str]], toolchain_dir: Path) -> Path:
    """The header whose ``.gch`` g++ picks up; built once per set of flags."""
    version = _run([command[0][0], "--version"], toolchain_dir)
    folder = toolchain_dir / f"header-{text_digest(' '.join([version, *command[0], *command[1]]))[:16]}"
    header = folder / "kernels.h"
    if not Path(f"{header}.gch").exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{uuid.uuid4().hex}.h"
        temporary.write_text(_HEADER)
        built = f"{temporary}.gch"
        _run([*command[0], *command[1], "-x", "c++-header", str(temporary), "-o", built], toolchain_dir)
        os.replace(temporary, header)
        os.replace(built, f"{header}.gch")
    return header


def _run(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise CompileError(
            f"the C++ compiler {command[0]!r} is not installed (set CXX to one that is)"
        ) from error
    if done.returncode:
        shown = "\n".join(done.stderr.splitlines()[:30])
        message = f"{command[0]} ended with status {done.returncode}:\n{shown}"
        if done.returncode < 0 or _KILLED.search(done.stderr):
            raise InterruptedCompileError(message)
        raise CompileError(message)
    return done.stdout
