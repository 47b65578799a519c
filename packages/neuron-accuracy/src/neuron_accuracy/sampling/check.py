# SPDX-License-Identifier: Apache-2.0
"""The check of a sampler: greedy is the likeliest, limits hold, frequencies are those of the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome
from neuron_accuracy.logits.same import label
from neuron_accuracy.sampling.draws import LEAST_DRAWS, check_frequencies, flattest
from neuron_accuracy.sampling.standing import MASS_TOLERANCE, allowed_mass, inside, standing_of
from neuron_accuracy.subjects.protocol import Generation, Sampling, Scores, Subject
from neuron_accuracy.subjects.scores import likeliest

__all__ = ["FALSE_ALARM", "check_sampling"]

FALSE_ALARM = 1e-6
"""How often a right sampler may be called wrong, and a wrong one right, at most."""
_MOST_ROUNDS = 16


def check_sampling(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 16,
    top_p: float = 0.5,
    top_k: int = 5,
    min_p: float = 0.2,
    draws: int = 300,
    top: int = 20,
    seed: int = 0,
) -> Outcome:
    """Whether a subject draws tokens as it is told.

    At temperature 0 each token has to be the likeliest by the scores that come with it. At temperature 1, with each of
    ``top_p``, ``top_k`` and ``min_p`` alone, each has to lie within the limit, computed from its scores; draws go on
    until a sampler that ignores the limit would have been seen but for a chance of :data:`FALSE_ALARM`. Last, ``draws``
    first tokens after the prompt with the flattest distribution, each with a seed of its own, have to come as often as
    it says, at temperature 1 and 0.5 and under ``top_p``; the false alarm bound holds for any number of draws
    (``frequencies.false_alarm_bound``).

    Findings name the parameter: ``top_p ignored``, ``temperature ignored``, …. ``top`` is for subjects that list the
    likeliest only. Raises ``AccuracyError`` if the prompts leave no choice that could show anything, if there are fewer
    than ``draws.LEAST_DRAWS`` draws, or if scores are NaN, as those of a server that gives none when it draws.
    """
    if not prompts:
        raise AccuracyError("no prompts; one works")
    if num_tokens < 1:
        raise AccuracyError(f"num_tokens={num_tokens}: must be at least 1; 16 works")
    if draws < LEAST_DRAWS:
        raise AccuracyError(f"draws={draws}: must be at least {LEAST_DRAWS}; 300 works")
    abilities = subject.info().abilities
    run = _Run(subject, prompts, num_tokens, 0 if "logits" in abilities else top, seed)
    greedy = run.generate(Sampling())
    findings = _not_likeliest(greedy)
    limits: list[dict[str, Any]] = []
    cases = (
        ("top_p", top_p, Sampling(temperature=1.0, top_p=top_p)),
        ("top_k", top_k, Sampling(temperature=1.0, top_k=top_k)),
        ("min_p", min_p, Sampling(temperature=1.0, min_p=min_p)),
    )
    for name, value, case in cases:
        row = run.limit(name, case)
        limits.append({"value": value, **row})
        findings += _outside(row, value)
    counted, found = check_frequencies(
        subject, flattest(greedy), draws, top_p=top_p, false_alarm=FALSE_ALARM, seed=seed
    )
    findings += found
    if not findings:
        _check_power(limits, counted, draws)
    data = {"num_tokens": num_tokens, "prompts": len(prompts), "limits": limits, "frequencies": counted}
    return Outcome("sampling", "Sampling", label(subject.info()), "its own scores", findings, data)


def _check_power(limits: Sequence[dict[str, Any]], counted: Sequence[dict[str, Any]], draws: int) -> None:
    """Raise ``AccuracyError`` if some sampler would have passed whatever it did."""
    undecided = [row["name"] for row in limits if row["missed"] > FALSE_ALARM and not row["outside"]]
    certain = [row["name"] for row in counted if row["undecided"]]
    if undecided:
        raise AccuracyError(
            f"{', '.join(undecided)}: after {_MOST_ROUNDS} rounds a sampler that ignores it would still not have been "
            "seen; give prompts that leave more than one likely token"
        )
    if certain:
        raise AccuracyError(
            f"frequencies under {', '.join(certain)}: one outcome is all that {draws} first tokens can be expected to "
            "have, so that no sampler would be seen; prompts after which several tokens are likely work, or more draws"
        )


@dataclass
class _Run:
    subject: Subject
    prompts: Sequence[Sequence[int]]
    num_tokens: int
    top: int
    seed: int
    used: int = field(default=0)

    def generate(self, sampling: Sampling) -> list[Generation]:
        """One round; every request that draws has another seed."""
        how = [sampling] * len(self.prompts)
        if sampling.temperature > 0:
            first = self.seed + self.used
            self.used += len(self.prompts)
            how = [
                Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, first + index)
                for index in range(len(self.prompts))
            ]
        made = self.subject.generate(self.prompts, self.num_tokens, how, self.top)
        for index, item in enumerate(made):
            _check_numbers(item.scores, f"prompt {index} at temperature {sampling.temperature:g}")
        return made

    def limit(self, name: str, sampling: Sampling) -> dict[str, Any]:
        """Draws under one limit until it is known to be kept or not."""
        drawn = outside = 0
        expected = unseen = 0.0
        first: str | None = None
        for _ in range(_MOST_ROUNDS):
            for index, made in enumerate(self.generate(sampling)):
                for row, token in enumerate(made.tokens):
                    drawn += 1
                    mass = allowed_mass(made.scores, row, sampling, MASS_TOLERANCE)
                    expected += 1.0 - mass
                    unseen += math.log(max(mass, 1e-300))
                    if not inside(standing_of(made.scores, row, token), sampling, MASS_TOLERANCE):
                        outside += 1
                        first = first or f"prompt {index}, token {row}"
            if outside or unseen < math.log(FALSE_ALARM):
                break
        return {
            "name": name,
            "draws": drawn,
            "outside": outside,
            "expected_if_ignored": expected,
            "missed": math.exp(unseen),
            "first": first,
        }


def _check_numbers(scores: Scores, where: str) -> None:
    """Minus infinity is a probability of zero; of the other two nothing can be expected."""
    values = scores.top_logprobs if scores.logits is None else scores.logits
    if (values.isnan() | (values == math.inf)).any():
        raise AccuracyError(
            f"{where}: the scores are NaN or infinite, and draws are held against them; a subject that gives numbers "
            "with every token it draws works"
        )


def _not_likeliest(greedy: Sequence[Generation]) -> list[Finding]:
    wrong: list[tuple[int, int, float]] = []
    for index, made in enumerate(greedy):
        for row, token in enumerate(made.tokens):
            gap = standing_of(made.scores, row, token).below_top
            if not gap <= MASS_TOLERANCE:
                wrong.append((index, row, gap))
    if not wrong:
        return []
    index, row, gap = wrong[0]
    best = int(likeliest(greedy[index].scores, 1)[0][row, 0])
    drawn = sum(len(made.tokens) for made in greedy)
    detail = (
        f"{len(wrong)} of {drawn} tokens at temperature 0 are not the likeliest, the first is "
        f"{greedy[index].tokens[row]} and {best} the likeliest, {gap:.3g} nats above"
    )
    return [Finding(Level.SAMPLING, "temperature 0 ignored", f"prompt {index}, token {row}", detail)]


def _outside(row: dict[str, Any], value: float) -> list[Finding]:
    if not row["outside"]:
        return []
    kept = row["outside"] < 0.25 * row["expected_if_ignored"]
    detail = (
        f"{row['outside']} of {row['draws']} tokens drawn at temperature 1 with {row['name']}={value:g} lie outside; "
        f"without the limit {row['expected_if_ignored']:.1f} would"
    )
    kind = f"{row['name']} exceeded" if kept else f"{row['name']} ignored"
    return [Finding(Level.SAMPLING, kind, row["first"], detail, figures={"outside": float(row["outside"])})]
