# SPDX-License-Identifier: Apache-2.0
"""Taps: what passes through modules inside a program's parts becomes outputs of its graphs, or comes from outside.

A tapped program is another program, with graphs of its own in the cache; one that is not tapped does not know of it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import stateless

from neuron_core.errors import CompileError
from neuron_core.graphs.program import KV_PREFIX, Part, Program, TensorSpec
from neuron_core.graphs.signature import structural_signature, tensors_of

__all__ = ["Tap", "TappedProgram", "Taps"]

Place = tuple[str, str]
"""Path of a module in a part's module, empty for itself, and the name of a tensor of its call."""


@dataclass(frozen=True, order=True)
class Tap:
    """A tensor of a module's call: ``output.0``, …, ``input.0``, …; of its next call in a program ``output.0@1``."""

    module: str
    """Qualified name in the model; of a module that a part made for itself, the part's name and the path in it."""
    tensor: str

    @property
    def value(self) -> str:
        """Its name among the values of a tapped program."""
        return f"tap.{self.module}:{self.tensor}"

    @property
    def put(self) -> str:
        """The program input that takes its place: of its shape and dtype."""
        return f"put.{self.module}:{self.tensor}"

    @property
    def put_rows(self) -> str:
        """The program input that says in which rows: int32 ``[rows]``, 0 keeps what the module gave."""
        return f"put_rows.{self.module}:{self.tensor}"


@dataclass(frozen=True)
class TappedProgram:
    """A program whose outputs are those it had and one per tap, and whose inputs those it had and two per put."""

    program: Program
    taps: tuple[Tap, ...]
    puts: Mapping[Tap, TensorSpec]

    @property
    def put_specs(self) -> dict[str, TensorSpec]:
        """Every input that the puts add."""
        specs = {tap.put: spec for tap, spec in self.puts.items()}
        rows = {
            tap.put_rows: TensorSpec.contiguous(spec.shape[:1], torch.int32)
            for tap, spec in self.puts.items()
        }
        return {**specs, **rows}

    def nothing_put(self) -> dict[str, Tensor]:
        """Values of those inputs that replace no row."""
        return {name: spec.empty("cpu").zero_() for name, spec in self.put_specs.items()}


class Taps:
    """Chooses, by qualified name under ``root``, what is tapped, and what may be put.

    ``wants(module, tensor)`` and ``puts(module, tensor)`` are asked for each tensor of each module that a part calls.
    """

    def __init__(
        self,
        root: nn.Module,
        wants: Callable[[str, str], bool],
        puts: Callable[[str, str], bool] = lambda module, tensor: False,
    ) -> None:
        self._wants = wants
        self._puts = puts
        self._names = {id(module): name for name, module in root.named_modules()}
        self._listed: dict[Any, tuple[dict[Place, TensorSpec], tuple[TensorSpec, ...]]] = {}

    def apply(
        self,
        program: Program,
        specs: Mapping[str, TensorSpec | tuple[tuple[int, ...], torch.dtype]],
        device: torch.device | str = "cpu",
    ) -> TappedProgram:
        """``program``, tapped; ``specs`` has its inputs as `GraphBuilder.build` takes them.

        A program without a chosen tensor comes back as it is. Raises ``CompileError`` for a part that does not run on
        fake tensors.
        """
        values = {
            name: spec if isinstance(spec, TensorSpec) else TensorSpec.contiguous(*spec)
            for name, spec in specs.items()
        }
        parts: list[Part] = []
        taps: list[Tap] = []
        puts: dict[Tap, TensorSpec] = {}
        calls: Counter[str] = Counter()
        for part in program.parts:
            places, outputs = self._places(part, tuple(values[name] for name in part.inputs), device)
            values.update(zip(part.outputs, outputs, strict=True))
            named = self._named(part, places, calls)
            taken = [place for place, tap in named.items() if self._wants(tap.module, tap.tensor)]
            replaced = [place for place, tap in named.items() if self._puts(tap.module, tap.tensor)]
            parts.append(_tapped_part(part, named, taken, replaced))
            taps += [named[place] for place in taken]
            puts.update({named[place]: _row_major(places[place]) for place in replaced})
        outputs_of_all = (*program.outputs, *dict.fromkeys(tap.value for tap in taps))
        return TappedProgram(Program(tuple(parts), outputs_of_all), tuple(taps), puts)

    def _places(
        self, part: Part, specs: tuple[TensorSpec, ...], device: torch.device | str
    ) -> tuple[dict[Place, TensorSpec], tuple[TensorSpec, ...]]:
        """Every tensor of every module call of a part, in order, and the specs of its outputs."""
        signature = structural_signature(part.module)
        key = (signature or id(part.module), part.static, specs)
        if key not in self._listed:
            self._listed[key] = _run_fake(part, specs, device)
        return self._listed[key]

    def _named(self, part: Part, places: Iterable[Place], calls: Counter[str]) -> dict[Place, Tap]:
        """The tap of each place; ``calls`` has each module's in the parts before, and then in this one too."""
        named: dict[Place, Tap] = {}
        here: dict[str, int] = {}
        for path, tensor in places:
            kind, _, again = tensor.partition("@")
            name = self._names.get(id(part.module.get_submodule(path)))
            module = name if name is not None else ".".join(filter(None, (part.name, path)))
            call = int(again or 0)
            here[module] = max(here.get(module, 0), call + 1)
            call += calls[module]
            named[path, tensor] = Tap(module, f"{kind}@{call}" if call else kind)
        calls.update(here)
        return named


class _TappedModule(nn.Module):
    """``inner``, whose result is followed by tensors of the calls inside it; some of those may come from outside."""

    def __init__(self, inner: nn.Module, taken: tuple[Place, ...], replaced: tuple[Place, ...]) -> None:
        super().__init__()
        self.inner = inner
        self.taken = taken
        self.replaced = replaced

    def forward(self, *inputs: Tensor, **static: Any) -> tuple[Tensor, ...]:
        """The inputs of ``inner``, then a tensor and its rows for each of ``replaced``."""
        own = len(inputs) - 2 * len(self.replaced)
        fed = inputs[own:]
        puts = {place: (fed[2 * i], fed[2 * i + 1]) for i, place in enumerate(self.replaced)}
        with _listening(self.inner, puts, frozenset(self.taken)) as seen:
            result = self.inner(*inputs[:own], **static)
        outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        return (*outputs, *(seen[place] for place in self.taken))


@contextmanager
def _listening(
    module: nn.Module, puts: Mapping[Place, tuple[Tensor, Tensor]], taken: Collection[Place] = ()
) -> Iterator[dict[Place, Tensor]]:
    """What passes through ``module`` and those inside it while this is open, in the order of the calls' ends.

    Of ``taken`` they are copies made when the call ends: what a module gave may be a view, or one of the part's own
    inputs or outputs, and what called the module may write into it.
    """
    seen: dict[Place, Tensor] = {}
    calls: dict[str, int] = {}

    def see(place: Place, tensor: Tensor) -> None:
        seen[place] = tensor.clone(memory_format=torch.contiguous_format) if place in taken else tensor

    def listen(path: str, child: nn.Module) -> Any:
        places = {name: index for index, name in enumerate(inspect.signature(child.forward).parameters)}

        def heard(_: nn.Module, args: Any, kwargs: Mapping[str, Any], result: Any) -> Any:
            number = calls.get(path, 0)
            calls[path] = number + 1
            again = f"@{number}" if number else ""
            given: dict[Any, Any] = dict(enumerate(args))
            given.update((places.get(name, name), item) for name, item in kwargs.items())
            for index, value in given.items():
                for name, tensor in _named(f"input.{index}", value):
                    see((path, name + again), tensor)
            result = _replaced(result, path, again, puts)
            for name, tensor in _outputs(result):
                see((path, name + again), tensor)
            return result

        return child.register_forward_hook(heard, with_kwargs=True)

    handles = [listen(path, child) for path, child in module.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _outputs(result: Any) -> Iterator[tuple[str, Tensor]]:
    yield from _named("output.0" if isinstance(result, Tensor) else "output", result)


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's argument or result, nested ones by their place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _named(f"{name}.{index}", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{name}.{key}", item)


def _replaced(result: Any, path: str, again: str, puts: Mapping[Place, tuple[Tensor, Tensor]]) -> Any:
    """``result`` with what is put into it; only tensors, and tuples or lists of them, are looked into."""

    def put_into(name: str, tensor: Any) -> Any:
        value, rows = puts.get((path, name + again), (None, None))
        if value is None or rows is None:
            return tensor
        return torch.where(rows.ne(0).view(-1, *[1] * (tensor.dim() - 1)), value, tensor)

    if isinstance(result, tuple | list):
        return type(result)(put_into(f"output.{index}", item) for index, item in enumerate(result))
    return put_into("output.0", result)


def _run_fake(
    part: Part, specs: tuple[TensorSpec, ...], device: torch.device | str
) -> tuple[dict[Place, TensorSpec], tuple[TensorSpec, ...]]:
    tensors = tensors_of(part.module)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    with mode:
        weights = {name: TensorSpec.of(tensor).empty(device) for name, tensor in tensors.items()}
        inputs = [spec.empty(device) for spec in specs]
    try:
        with (
            torch.no_grad(),
            mode,
            stateless._reparametrize_module(part.module, weights, tie_weights=True),
            _listening(part.module, {}) as seen,
        ):
            outputs = part.run(inputs)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(f"part {part.name!r} cannot be tapped: {type(error).__name__}: {error}") from error
    caches = {
        id(tensor) for name, tensor in zip(part.inputs, inputs, strict=True) if name.startswith(KV_PREFIX)
    }
    places = {place: TensorSpec.of(tensor) for place, tensor in seen.items() if id(tensor) not in caches}
    return places, tuple(TensorSpec.of(tensor) for tensor in outputs)


def _tapped_part(part: Part, named: Mapping[Place, Tap], taken: list[Place], replaced: list[Place]) -> Part:
    if not taken and not replaced:
        return part
    for path, tensor in replaced:
        if tensor.startswith("input."):
            raise CompileError(
                f"{named[path, tensor].value}: an input cannot be put; put the output it comes from"
            )
    module = _TappedModule(part.module, tuple(taken), tuple(replaced))
    fed = [name for place in replaced for name in (named[place].put, named[place].put_rows)]
    outputs = (*part.outputs, *(named[place].value for place in taken))
    return Part(part.name, module, (*part.inputs, *fed), outputs, part.static, part.same_as, part.overlaps)


def _row_major(spec: TensorSpec) -> TensorSpec:
    return TensorSpec.contiguous(spec.shape, spec.dtype)
