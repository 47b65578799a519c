# SPDX-License-Identifier: Apache-2.0
"""Moves every device named in a graph to the target device."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from neuron_core.graphs.capture import CapturedGraph

__all__ = ["DeviceRewrite"]


class DeviceRewrite:
    """Replaces each device that is not the target, in factory calls, conversions and custom operators.

    A device may be a keyword or positional; a string stays a string, an object an object. A factory that names
    no device is given the target, since its default is not the target's. ``pin_memory`` is dropped with a move
    away from the CPU. Fake values of nodes keep the device they were captured on: only arguments are part of a
    graph.
    """

    name = "device_rewrite"

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def run(self, graph: CapturedGraph) -> CapturedGraph:
        """Rewrite arguments in place."""
        for node in graph.module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                self._rewrite_node(node)
        return graph

    def _rewrite_node(self, node: fx.Node) -> None:
        schema = getattr(node.target, "_schema", None)
        named = _device_arguments(schema)
        positions = [argument.name for argument in schema.arguments] if schema is not None else []
        node.args = tuple(
            self._moved(value, position < len(positions) and positions[position] in named)
            for position, value in enumerate(node.args)
        )
        node.kwargs = {
            name: self._moved(value, name == "device" or name in named) for name, value in node.kwargs.items()
        }
        if node.op == "call_method":
            self._rewrite_method(node)
        elif schema is not None:
            self._complete_factory(node, schema)

    def _moved(self, value: Any, is_device: bool) -> Any:
        if is_device and isinstance(value, str):
            return str(self.target)
        return map_aggregate(value, self._replaced)

    def _replaced(self, value: Any) -> Any:
        return self.target if isinstance(value, torch.device) and value != self.target else value

    def _rewrite_method(self, node: fx.Node) -> None:
        """``tensor.to("cpu")`` and ``tensor.cpu()`` of graphs traced above the operators."""
        if node.target in ("cpu", "cuda"):
            node.target, node.args = "to", (node.args[0], self.target)
        elif node.target == "to" and len(node.args) > 1 and isinstance(node.args[1], str):
            node.args = (node.args[0], str(self.target), *node.args[2:])

    def _complete_factory(self, node: fx.Node, schema: Any) -> None:
        by_name = {argument.name: str(argument.type) for argument in schema.arguments}
        given = dict(zip(by_name, node.args, strict=False)) | dict(node.kwargs)
        takes_tensors = any("Tensor" in kind for kind in by_name.values())
        if "Device" in by_name.get("device", "") and given.get("device") is None and not takes_tensors:
            node.kwargs = {**node.kwargs, "device": self.target}
        if given.get("pin_memory") and self.target.type != "cpu" and "pin_memory" in node.kwargs:
            node.kwargs = {**node.kwargs, "pin_memory": False}


def _device_arguments(schema: Any) -> set[str]:
    """Names of the arguments that are devices: of that type, or strings called ``device``."""
    arguments = schema.arguments if schema is not None else ()
    return {a.name for a in arguments if "Device" in str(a.type) or a.name == "device"}
