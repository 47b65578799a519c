# SPDX-License-Identifier: Apache-2.0
"""Whether the installed versions belong to one release of the Neuron SDK."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from neuron_core.doctor.check import Finding, Status
from neuron_core.doctor.compatibility import SDK_RELEASES, common_releases, numbers, releases_of, torch_of

__all__ = ["check_versions"]

SYSTEM = ("runtime", "driver")
"""Packages of the operating system. A mixture with them may still work: AWS keeps the driver compatible backwards."""


def check_versions(neuron: Mapping[str, str], torch: str, python: str, wanted: bool) -> list[Finding]:
    """Compare versions of Neuron components, by the names of ``compatibility.COMPONENTS``, with the SDK's releases.

    Wheels of different releases fail to import or crash later; that fails the check where Neuron is ``wanted``.
    """
    if not neuron:
        found = f"torch {torch}, Python {python}; no Neuron component to compare with"
        return [Finding("versions", Status.INFO, found)]
    bad = Status.FAIL if wanted else Status.WARN
    findings = _stack_and_torch(neuron, torch, bad)
    unknown = [name for name, version in neuron.items() if releases_of(name, version) is None]
    if unknown:
        shown = ", ".join(f"{name} {neuron[name]}" for name in unknown)
        newest = SDK_RELEASES[-1].name
        advice = (
            f"compare with AWS's release notes; this version knows SDK {SDK_RELEASES[0].name} to {newest}"
        )
        findings.append(Finding("versions", Status.WARN, f"of no SDK release known here: {shown}", advice))
    everything = {**neuron, "torch": torch, "python": python}
    wheels = {name: version for name, version in everything.items() if name not in SYSTEM}
    if common := common_releases(everything):
        listed = ", ".join(f"{name} {version}" for name, version in everything.items())
        details = {"releases": list(common), "versions": everything}
        return [
            *findings,
            Finding("versions", Status.OK, f"SDK {' or '.join(common)}: {listed}", details=details),
        ]
    status = bad if not common_releases(wheels) else Status.WARN
    return [*findings, _mixture(everything, status)]


def _stack_and_torch(neuron: Mapping[str, str], torch: str, bad: Status) -> list[Finding]:
    """The version of torch that the stack's own version begins with is the only one it loads into."""
    findings = []
    for name in ("libtorch-neuronx-lite", "torch-neuronx"):
        built_for = torch_of(neuron.get(name, ""))
        have = ".".join(map(str, numbers(torch)[:2]))
        if built_for is not None and built_for != have:
            found = f"{name} {neuron[name]} is for torch {built_for}, and torch {torch} is installed"
            findings.append(
                Finding("versions", bad, found, f"install torch {built_for} or the stack for {have}")
            )
    return findings


def _mixture(versions: Mapping[str, str], status: Status) -> Finding:
    releases = {name: releases_of(name, version) for name, version in versions.items()}
    shown = "; ".join(
        f"{name} {version} ({_range(releases[name])})" for name, version in versions.items() if releases[name]
    )
    votes = Counter(each for name, found in releases.items() for each in found or ())
    order = [release.name for release in SDK_RELEASES]
    best = max(votes, key=lambda name: (votes[name], order.index(name)), default=order[-1])
    target = next(release for release in SDK_RELEASES if release.name == best)
    off = [name for name, found in releases.items() if found and best not in found]
    stack = (
        f", libtorch-neuronx-lite build {target.libtorch_neuronx_lite}"
        if target.libtorch_neuronx_lite
        else ""
    )
    advice = (
        f"install one release; for SDK {best} change {', '.join(off)} (it has neuronx-cc {target.neuronx_cc}{stack}, "
        f"nki {target.nki}, runtime {target.runtime}, driver {target.driver}, torch {' or '.join(target.torch)}, "
        f"Python {' or '.join(target.python)})"
    )
    details = {
        "versions": dict(versions),
        "releases": {name: list(found or ()) for name, found in releases.items()},
    }
    return Finding("versions", status, f"of different SDK releases: {shown}", advice, details)


def _range(names: tuple[str, ...] | None) -> str:
    names = names or ()
    return f"SDK {names[0]}" if len(names) == 1 else f"SDK {names[0]} to {names[-1]}"
