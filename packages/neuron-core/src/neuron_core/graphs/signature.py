# SPDX-License-Identifier: Apache-2.0
"""The structural signature of a module: what must be equal for two parts to share one graph."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
from typing import Any

import torch
from torch import nn

from neuron_core.graphs.program import TensorSpec

__all__ = ["module_classes", "structural_signature", "tensors_of"]

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class _Opaque(Exception):
    """An attribute whose value cannot be compared by content."""


def structural_signature(module: nn.Module) -> str | None:
    """SHA-256 over classes, plain attributes and tensor specs of a module tree.

    None when some attribute cannot be compared by content (anything but numbers, strings, booleans, None,
    dtypes, devices, enums, module-level functions, frozen dataclasses, and tuples, lists and dicts of those)
    or a forward hook is registered: such a module shares its graph with no other.
    """
    lines: list[str] = []
    try:
        for path, child in module.named_modules():
            lines.append(f"{path}: {_describe_module(child)}")
    except _Opaque:
        return None
    for name, tensor in tensors_of(module).items():
        lines.append(f"{name}= {TensorSpec.of(tensor)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, by name; a tied tensor appears once, under its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def module_classes(module: nn.Module) -> tuple[type, ...]:
    """The classes found in a module tree, in a stable order."""
    found = {type(child) for child in module.modules()}
    return tuple(sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__)))


def _describe_module(module: nn.Module) -> str:
    attributes = vars(module)
    if any(attributes[hooks] for hooks in _HOOKS):
        raise _Opaque
    plain = {name: value for name, value in attributes.items() if name not in _INTERNAL}
    described = ", ".join(f"{name}={_describe(plain[name])}" for name in sorted(plain))
    aliases = ",".join(f"{name}:{_tensor_alias(module, name)}" for name in module._parameters)
    return f"{type(module).__module__}.{type(module).__qualname__}({described})[{aliases}]"


def _tensor_alias(module: nn.Module, name: str) -> str:
    return "none" if module._parameters[name] is None else "tensor"


def _describe(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str | bytes | complex):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.layout):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({','.join(_describe(item) for item in value)})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_describe(key)}:{_describe(item)}" for key, item in value.items()) + "}"
    if dataclasses.is_dataclass(value) and _is_frozen(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return type(value).__qualname__ + "(" + ",".join(f"{n}={_describe(v)}" for n, v in fields) + ")"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType) and _is_module_level(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise _Opaque


def _is_frozen(value: Any) -> bool:
    return bool(value.__dataclass_params__.frozen)


def _is_module_level(function: types.FunctionType | types.BuiltinFunctionType) -> bool:
    return "<" not in function.__qualname__ and getattr(function, "__closure__", None) is None
