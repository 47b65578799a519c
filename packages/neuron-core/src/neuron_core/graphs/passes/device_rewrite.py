# SPDX-License-Identifier: Apache-2.0
"""Moves every device named in a graph to the target device."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_aggregate

from neuron_core.graphs.capture import CapturedGraph

__all__ = ["DeviceRewrite"]


class DeviceRewrite:
    """Replaces each ``device`` argument that is not the target; a string stays a string, an object an object.

    Fake values of nodes keep the device they were captured on: only arguments are part of a graph.
    """

    name = "device_rewrite"

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Rewrite factory calls and conversions."""
        for node in graph.module.graph.nodes:
            if node.op != "call_function":
                continue
            node.args = map_aggregate(node.args, self._rewrite)
            node.kwargs = {key: self._rewrite_keyword(key, value) for key, value in node.kwargs.items()}
        return graph

    def _rewrite(self, value: Any) -> Any:
        return self.target if isinstance(value, torch.device) and value != self.target else value

    def _rewrite_keyword(self, key: str, value: Any) -> Any:
        if key == "device" and isinstance(value, str):
            return str(self.target)
        return map_aggregate(value, self._rewrite)
