# SPDX-License-Identifier: Apache-2.0
"""What a capture may lack because its filters left it out, and not because the run lost it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import StepRecord
from neuron_accuracy.capture.spec import PHASES, CaptureSpec
from neuron_accuracy.compare.traces import Trace
from neuron_accuracy.compare.views import View

__all__ = ["Filters", "lost_modules", "may_lack_request"]


def may_lack_request(spec: CaptureSpec, request: str, same_ids: bool) -> bool:
    """Whether a capture with this spec may have left out a request that the other run calls ``request``.

    ``same_ids`` says that both runs call theirs alike, so that the patterns can be asked.
    """
    if not spec.requests or any(set(pattern) == {"*"} for pattern in spec.requests):
        return False
    return not (same_ids and spec.wants_request(request))


def lost_modules(views: Iterable[View], capture: Capture, other: Capture) -> list[str]:
    """The modules among ``views``, which ``other`` has none of, that it should have: a run of the same kind, which was
    asked for them too, and has steps of a phase in which this one ran them.
    """
    if other is capture or other.run.info.kind != capture.run.info.kind:
        return []
    ran = {step.phase for dp in other.replicas for step in other.steps(dp)}
    asked = {
        view.module: None
        for view in views
        if other.spec.wants_module(view.module) and other.spec.wants_tensor(view.tensor)
    }
    return [module for module in asked if module not in other.modules() and _runs_in(ran, module, capture)]


def _runs_in(phases: set[str], module: str, capture: Capture) -> bool:
    return any(
        step.phase in phases and module in capture.modules_of(step, dp)
        for dp in capture.replicas
        for step in capture.steps(dp)
    )


class Filters:
    """The phases and steps that one capture was asked for, and what they may have left out of one of its requests.

    A run may compute a position in another phase and step than the other run did: a prompt and its answer in one
    prefill, or token by token. So what is known is asked first: the run's own rows before and behind the position.
    """

    def __init__(self, capture: Capture, trace: Trace, other: Capture, other_trace: Trace) -> None:
        self._spec = capture.spec
        self._capture, self._trace = capture, trace
        self._other, self._other_trace = other, other_trace
        self._computed = sorted(trace.places)
        self._beside: dict[tuple[int, int], list[int]] = defaultdict(list)
        for position, place in other_trace.places.items():
            self._beside[place.dp, place.step].append(position)

    def may_lack(self, position: int) -> bool:
        """Whether a position that the other run has may have been left out."""
        return self._phase_left_out(position) or self._step_left_out(position)

    def _phase_left_out(self, position: int) -> bool:
        asked = set(self._spec.phases)
        if not asked or asked >= set(PHASES):
            return False
        # What runs again after a preemption is prefilled, whatever phase it was in before.
        if self._trace.restarted or self._other_trace.restarted:
            return True
        return not self._phases(position) <= asked

    def _phases(self, position: int) -> set[str]:
        """Phases in which the run may have computed the position."""
        before, behind = self._own_steps(position)
        if behind is not None and behind.phase == "prefill":
            return {"prefill"}
        if before is not None and before.phase == "decode":
            return {"decode"}
        place = self._other_trace.places.get(position)
        if place is None:
            return set(PHASES)
        if any(item in self._trace.places for item in self._beside[place.dp, place.step]):
            # The other run computed more in one step than this one did.
            return set(PHASES)
        return {self._other.steps(place.dp)[place.step].phase}

    def _step_left_out(self, position: int) -> bool:
        asked = set(self._spec.steps)
        if not asked:
            return False
        if self._trace.restarted:
            return True
        before, behind = self._own_steps(position)
        first = 0 if before is None else before.number
        if behind is not None:
            last = behind.number
        elif self._ended_before(max(asked)):
            last = max(asked)
        else:
            return True
        return not asked.issuperset(range(first, last + 1))

    def _own_steps(self, position: int) -> tuple[StepRecord | None, StepRecord | None]:
        """Those that computed the nearest position before, and the nearest behind."""
        at = bisect_left(self._computed, position)
        found = []
        for index in (at - 1, at):
            inside = 0 <= index < len(self._computed)
            place = self._trace.places[self._computed[index]] if inside else None
            found.append(None if place is None else self._capture.steps(place.dp)[place.step])
        return found[0], found[1]

    def _ended_before(self, number: int) -> bool:
        """Whether the run had no such step: it is asked for and not there, though nothing else could leave it out."""
        steps = self._capture.steps(self._trace.key[0])
        return not self._spec.phases and not self._spec.requests and steps[-1].number < number
