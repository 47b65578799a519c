# SPDX-License-Identifier: Apache-2.0
"""A series that nothing records is a promise to whoever builds an alert on it."""

from __future__ import annotations

import inspect
from pathlib import Path

import vllm_neuron
from neuron_core.metrics import NeuronMetrics


def test_the_plugin_calls_every_recording_method() -> None:
    source = "".join(path.read_text() for path in Path(vllm_neuron.__file__).parent.rglob("*.py"))
    methods = [name for name, _ in inspect.getmembers(NeuronMetrics, inspect.isfunction) if name[0] != "_"]
    recording = set(methods) - {"register"}
    assert recording
    assert not {name for name in recording if f".{name}(" not in source}
