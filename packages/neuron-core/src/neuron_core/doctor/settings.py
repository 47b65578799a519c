# SPDX-License-Identifier: Apache-2.0
"""Environment variables: wrong values, names that do nothing, and runtime switches that are traps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neuron_core.doctor.check import Finding, Status
from neuron_core.environ import Environment, unknown_names
from neuron_core.errors import ConfigError

__all__ = ["check_settings", "read_settings"]

_FALSE = ("", "0", "false")


def read_settings(variables: Mapping[str, str]) -> tuple[Environment, list[ConfigError]]:
    """The checked settings and every error in them; a variable with an error counts as unset."""
    errors: list[ConfigError] = []
    left = dict(variables)
    while True:
        try:
            return Environment.read(left), errors
        except ConfigError as error:
            errors.append(error)
            if left.pop(error.setting, None) is None:
                raise  # not about one variable: nothing to leave out


def check_settings(variables: Mapping[str, str], errors: Iterable[ConfigError]) -> list[Finding]:
    """One finding per variable that is wrong, dead, misspelt or dangerous; one that says so when there is none."""
    findings = [Finding("settings", Status.FAIL, str(error), "correct or unset it") for error in errors]
    findings += [
        Finding("settings", Status.WARN, sentence, "unset it")
        for sentence in unknown_names(variables).values()
    ]
    if variables.get("NEURON_RT_ALLOW_LEGACY_NEFF", "").strip().lower() not in _FALSE:
        found = "NEURON_RT_ALLOW_LEGACY_NEFF is set: the runtime runs artifacts of an older chip"
        advice = "unset it: graphs are compiled per chip here, and an entry of another chip is never loaded"
        findings.append(Finding("settings", Status.WARN, found, advice))
    if variables.get("NEURON_RT_VISIBLE_CORES", "").strip():
        found = "NEURON_RT_VISIBLE_CORES is set: it is refused when worker processes start, each sets its own"
        findings.append(Finding("settings", Status.WARN, found, "list cores in NEURON_VISIBLE_DEVICES"))
    if variables.get("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "").strip():
        found = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS does nothing since SDK 2.32"
        findings.append(Finding("settings", Status.WARN, found, "unset it"))
    if findings:
        return findings
    return [Finding("settings", Status.OK, "every variable that is set is known and valid")]
