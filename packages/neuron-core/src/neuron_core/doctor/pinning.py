# SPDX-License-Identifier: Apache-2.0
"""Whether pip may go through many versions of the Neuron wheels, each of which is a huge download."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.wheels import WHEELS

__all__ = ["check_pinning", "open_requirements", "pinned_names"]

_NAMES = frozenset(wheel.distribution for wheel in WHEELS)


def open_requirements() -> dict[str, list[str]]:
    """Neuron wheels that an installed package requires without naming one version: wheel -> who says what."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        for requirement in _requirements(distribution.requires or ()):
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if name in _NAMES and applies and not _exact(requirement):
                found.setdefault(name, []).append(f"{distribution.name}: {requirement}")
    return found


def pinned_names(constraints: Path) -> frozenset[str]:
    """Packages that a pip constraints file pins to one version; raises ``OSError`` when it cannot be read."""
    lines = (
        line.partition("#")[0].partition(" --")[0].strip() for line in constraints.read_text().splitlines()
    )
    wanted = _requirements(line for line in lines if line and not line.startswith("-"))
    return frozenset(canonicalize_name(requirement.name) for requirement in wanted if _exact(requirement))


def check_pinning(variables: Mapping[str, str], installed: Mapping[str, str]) -> list[Finding]:
    """Whether what is installed of the Neuron wheels (name -> version) is pinned for the next ``pip install``.

    An open requirement makes pip download one compiler after the other until everything fits. A constraints file
    named by ``PIP_CONSTRAINT`` ends that, whatever packages require.
    """
    wanted = open_requirements()
    at_risk = sorted(wanted.keys() | installed.keys())
    if not at_risk:
        return []
    pinned: set[str] = set()
    for name in variables.get("PIP_CONSTRAINT", "").split():
        try:
            pinned |= pinned_names(Path(name).expanduser())
        except OSError as error:
            return [
                Finding("pinned wheels", Status.WARN, f"PIP_CONSTRAINT: {error}", "name an existing file")
            ]
    loose = [name for name in at_risk if name not in pinned]
    if not loose:
        return [Finding("pinned wheels", Status.OK, f"PIP_CONSTRAINT pins {', '.join(at_risk)}")]
    said = [text for name in loose for text in wanted.get(name, ())]
    found = f"not pinned: {', '.join(loose)}" + (f" (required by {'; '.join(said)})" if said else "")
    lines = ", ".join(f"{name}=={installed[name]}" for name in loose if name in installed)
    how = "put exact versions into a file and name it in PIP_CONSTRAINT, or pip may download many compilers"
    advice = f"{how}: {lines}" if lines else how
    status = Status.WARN if said else Status.INFO
    return [Finding("pinned wheels", status, found, advice, {"open": wanted})]


def _exact(requirement: Requirement) -> bool:
    return any(each.operator in ("==", "===") for each in requirement.specifier)


def _requirements(lines: Iterable[str]) -> Iterable[Requirement]:
    for line in lines:
        try:
            yield Requirement(line)
        except InvalidRequirement:
            continue  # another package's metadata, or a constraints line of another form
