# SPDX-License-Identifier: Apache-2.0
"""What a failed run of the vendor compiler means, in one line, with its own code kept visible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from neuron_core.devices.host import Host
from neuron_core.errors import CompileError

__all__ = ["ADVICE", "CompilerRun", "VendorCompileError", "advice_for", "compilers_running", "error_codes"]

GIB = 1024**3
TAIL_LINES = 15

_HBM = (
    "the program needs more device memory (HBM) than a core has: use a smaller KV cache, batch or context, or more "
    "tensor parallelism"
)
_INSTRUCTIONS = (
    "the program has more instructions than the chip takes: use a smaller bucket or more tensor parallelism"
)
_OPERATOR = (
    "the compiler does not know an operator of the graph; `neuronx-cc list-operators --framework XLA` lists those it "
    "knows"
)
_DTYPE = (
    "a dtype of the graph does not exist on this chip: complex numbers never do, FP8 forms differ per chip"
)
_DOWNCAST = (
    "the chip has no integer form of an operation: compute it in a float dtype, or name the operation in "
    "--implicit-integer-downcast"
)
_INTERNAL = (
    "a fault inside the compiler: try the newest SDK, then report it with the log and the captured graph"
)

ADVICE: dict[str, str] = {
    "NCC_EARG001": "the chip does not take this logical core size: trn1 and inf2 take 1, trn2 and trn3 1 or 2",
    **dict.fromkeys(("NCC_EOOM001", "NCC_EOOM002", "NCC_EVRF009", "NCC_EXSP001"), _HBM),
    **dict.fromkeys(("NCC_EBVF030", "NCC_EVRF007", "NCC_EXTP004"), _INSTRUCTIONS),
    "NCC_EMOD025": "a shape that is not fixed reached the compiler: capture with static shapes (dynamic=False)",
    **dict.fromkeys(("NCC_EUOC002", "NCC_EVRF001", "NCC_EHCA005", "NCC_EVRF015"), _OPERATOR),
    **dict.fromkeys(
        ("NCC_ESPP004", "NCC_ESPP047", "NCC_EVRF004", "NCC_EVRF005", "NCC_EVRF051", "NCC_EVRF052"), _DTYPE
    ),
    **dict.fromkeys(("NCC_EVRF035", "NCC_EVRF060", "NCC_EVRF061", "NCC_EVRF062", "NCC_EVRF063"), _DOWNCAST),
    "NCC_EVRF059": "a file of an NKI kernel is gone: capture the graph again on this machine",
    "NCC_EVRF065": "an NKI kernel was traced by an NKI that is too old: install the SDK's nki and capture again",
    "NCC_ITEN404": f"{_INTERNAL} (reported with prefix caching on trn1, and as too many strides; use trn2 or later)",
    "NCC_INLA001": f"{_INTERNAL} (reported for prefill on trn1, which this stack does not support; use trn2 or later)",
}
"""Advice by error code, after aws-neuron-sdk: compiler/error-codes/*.rst and users' reports."""

# New compilers print [NCC_IXCG863], older ones the same code as [XCG863].
_CODE = re.compile(r"\bNCC_[A-Z]{3,4}\d{3}\b|(?<=\[)[A-Z]{1,4}\d{3}(?=\])")
_ISA = re.compile(r"ISA check failed", re.IGNORECASE)
# A killed child is reported as [F137] with an exit status of the compiler's own; a shell prints Killed.
_KILLED = re.compile(r"\[F137\]|forcibly killed|^Killed$|signal 9\b|SIGKILL", re.MULTILINE)
_ABORTED = re.compile(r"\[F13[49]\]|terminated abnormally|^Aborted", re.MULTILINE)


class VendorCompileError(CompileError):
    """The vendor compiler failed. ``code`` is its first error code, "" without one; ``log`` what it printed.

    ``recordable`` is False where the machine and not the graph was the cause: killed, aborted, timed out.
    """

    def __init__(self, message: str, code: str = "", log: str = "", recordable: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.log = log
        self.recordable = recordable


@dataclass(frozen=True)
class CompilerRun:
    """One run of the compiler that did not give a NEFF.

    ``returncode`` is None when it was ended after ``timeout_s``; negative for a signal, as in ``subprocess``.
    ``log_path`` is where its log is kept, None when it is not. ``others`` is the number of compilers that ran beside
    it, ``fault`` what is wrong with its output.
    """

    label: str
    returncode: int | None
    output: str
    log_path: Path | None
    versions: str
    timeout_s: float
    others: int = 0
    fault: str = ""

    def error(self, host: Host | None = None) -> VendorCompileError:
        """The error to raise: code, what happened, what to do, the log's path, versions, and the end of the log."""
        codes = error_codes(self.output)
        what, recordable = self._verdict(codes, host or Host())
        shown = f" [{', '.join(codes)}]" if codes else ""
        log = f"; log: {self.log_path}" if self.log_path is not None else ""
        message = f"{self.label}: neuronx-cc failed{shown}: {what}{log} ({self.versions})"
        tail = "\n".join(self.output.strip().splitlines()[-TAIL_LINES:])
        return VendorCompileError(
            f"{message}\n{tail}" if tail else message, codes[0] if codes else "", self.output, recordable
        )

    def _verdict(self, codes: tuple[str, ...], host: Host) -> tuple[str, bool]:
        """What to tell, and whether the same graph would fail again."""
        if self.returncode is None:
            return (
                f"it did not end within {self.timeout_s:.0f} s; use a smaller bucket, or allow more time",
                False,
            )
        if self.returncode in (-9, 137) or _KILLED.search(self.output):
            return self._out_of_host_memory(host), False
        if self.returncode in (-6, 134) or _ABORTED.search(self.output):
            return "it aborted; often host memory ran out, otherwise report it with the log", False
        advice = advice_for(codes)
        if advice and not (advice == _INTERNAL and _ISA.search(self.output)):
            return advice, True
        if _ISA.search(self.output):
            return f"it made an instruction the chip does not have (ISA check failed): {_INTERNAL}", True
        if self.returncode < 0:
            return f"signal {-self.returncode} ended it", False
        if self.returncode == 0:
            return self.fault, False
        # Without a code the machine may be at fault, such as a library that is not installed.
        return f"exit status {self.returncode}; the end of its log follows", bool(codes)

    def _out_of_host_memory(self, host: Host) -> str:
        free, total = host.available_memory_bytes() / GIB, host.total_memory_bytes() / GIB
        beside = f"{self.others} other compiler{'' if self.others == 1 else 's'} ran beside it"
        return (
            f"it was killed, most likely because host memory (RAM, not HBM) ran out: {free:.1f} of {total:.1f} GiB "
            f"are free now and {beside}; compile with --jobs 1, or elsewhere on a machine with more RAM"
        )


def error_codes(output: str) -> tuple[str, ...]:
    """The error codes in a compiler's output, in order, each once."""
    return tuple(dict.fromkeys(_CODE.findall(output)))


def advice_for(codes: tuple[str, ...]) -> str:
    """Advice for the first code that has one, "" when none has; an internal code (``NCC_I…``) gets a general one."""
    for code in codes:
        if code in ADVICE:
            return ADVICE[code]
    known = {
        full.removeprefix("NCC_I"): advice for full, advice in ADVICE.items() if full.startswith("NCC_I")
    }
    for code in codes:
        if code in known:
            return known[code]
    return _INTERNAL if any(code.startswith("NCC_I") for code in codes) else ""


def compilers_running(name: str = "neuronx-cc") -> int:
    """How many processes of this machine run the compiler; a compiler's own children count as one with it."""
    running = {process.pid for process in _named(name)}
    count = 0
    for pid in running:
        try:
            count += psutil.Process(pid).ppid() not in running
        except psutil.NoSuchProcess:
            continue
    return count


def _named(name: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(Path(word).name == name for word in words[:3]):
            yield process
