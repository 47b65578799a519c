# SPDX-License-Identifier: Apache-2.0
"""What the compile cache holds: entries for another chip, and compiles that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from neuron_core.devices.chips import CHIPS
from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.machine import Machine
from neuron_core.errors import CacheError

if TYPE_CHECKING:
    from neuron_core.graphs.cache import CacheEntry, Failure

__all__ = ["check_entries", "check_failures"]

_SHOWN_FAILURES = 5
_GIB = 1024**3


def check_entries(machine: Machine) -> list[Finding]:
    """How many entries there are, and how many of them are for another chip than this machine's."""
    entries = list(_entries(machine))
    if not entries:
        return []
    compilers = Counter(str(entry.manifest.get("compiler", "unknown")) for entry in entries)
    listed = ", ".join(f"{count} of {name}" for name, count in sorted(compilers.items()))
    findings = [Finding("cache entries", Status.OK, f"{len(entries)}: {listed}", details=dict(compilers))]
    if machine.chip is None:
        return findings
    chips = Counter(chip for entry in entries if (chip := _chip(entry)) is not None)
    others = {name: count for name, count in sorted(chips.items()) if name != machine.chip.name}
    if others:
        listed = ", ".join(f"{count} for {name}" for name, count in others.items())
        found = f"{listed}, and this machine has {machine.chip.name}: they are not loaded here"
        advice = "no switch is needed or wanted: graphs are compiled for this chip at the next start, or ahead of time"
        findings.append(Finding("cache entries", Status.INFO, found, advice, others))
    return findings


def check_failures(machine: Machine) -> list[Finding]:
    """The latest recorded compile failures, each with its log, what compiled it, and what to do."""
    from neuron_core.graphs.cache.root import CacheRoot

    failures = sorted(CacheRoot(machine.environment.cache_dir, 0.0).failures, key=lambda each: each.created_s)
    findings = [_failure(each, machine) for each in failures[-_SHOWN_FAILURES:]]
    if len(failures) > _SHOWN_FAILURES:
        found = f"{len(failures) - _SHOWN_FAILURES} older compile failures are recorded too"
        findings.insert(0, Finding("compile failures", Status.INFO, found))
    return findings


def _failure(failure: Failure, machine: Machine) -> Finding:
    facts = {name: value for name, value in failure.facts.items() if name != "components"}
    versions = ", ".join(f"{name} {value}" for name, value in sorted(facts.items()))
    first_line = (failure.error.splitlines() or ["no message"])[0]
    found = f"{failure.digest[:12]} failed on {failure.created}: {first_line}" + (
        f" ({versions})" if versions else ""
    )
    advice = f"log: {failure.log}; after a repair VLLM_NEURON_RETRY_FAILED=1 tries again"
    hint = _runtime_advice(failure.error, machine)
    details = {"key": failure.digest, "log": str(failure.log), "facts": facts, "error": failure.error}
    return Finding("compile failures", Status.WARN, found, f"{hint}{advice}", details)


def _runtime_advice(text: str, machine: Machine) -> str:
    """What a status of the Neuron runtime in a message means, with this chip's memory where that ran out."""
    from neuron_core.devices.nrt_status import nrt_status_in

    status = nrt_status_in(text)
    if status is None:
        return ""
    chip = machine.target_chip
    room = f" (a logical core of {chip.name} has {chip.logical_core_bytes / _GIB:.0f} GiB)" if chip else ""
    return f"status {status.code} ({status.name}): {status.advice}{room if status.code == 4 else ''}; "


def _entries(machine: Machine) -> Iterable[CacheEntry]:
    """The entries of the cache folder, read without touching anything in it."""
    from neuron_core.graphs.cache.entry import SENTINEL, read_entry

    for folder in sorted((machine.environment.cache_dir / "graphs").glob("*")):
        if (folder / SENTINEL).is_file():
            try:
                yield read_entry(folder)
            except CacheError:
                continue  # neuron cache verify names it


def _chip(entry: CacheEntry) -> str | None:
    """The chip an entry was compiled for, None for one of the CPU."""
    chip = entry.manifest.get("chip")
    return chip if isinstance(chip, str) and chip in CHIPS else None
