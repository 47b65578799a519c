# SPDX-License-Identifier: Apache-2.0
"""Logit validation: a test and a reference forced along the same tokens, two-way or three-way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity
from neuron_accuracy.logits.examine import Examined, described, examine
from neuron_accuracy.logits.golden import GoldenCache, GoldenKey
from neuron_accuracy.logits.limits import FLOAT32, HALF, Limits
from neuron_accuracy.logits.noise import Noise
from neuron_accuracy.logits.same import check_same_tokens, label
from neuron_accuracy.logits.verdict import findings_of
from neuron_accuracy.subjects.protocol import Generation, Sampling, Scores, Subject

__all__ = ["DEFAULT_TOP", "LEAST_TOP", "validate_logits"]

DEFAULT_TOP = 20
"""Log-probabilities asked of a server for each token: what vLLM gives unless started with more."""
LEAST_TOP = 5
"""Below it there is not even the first limit to hold."""

_CHUNK_BYTES = 256 * 2**20


def validate_logits(
    test: Subject,
    reference: Subject,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    baseline: Subject | None = None,
    limits: Limits | None = None,
    top: int = DEFAULT_TOP,
    golden: GoldenCache | None = None,
    texts: Sequence[str | None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Whether ``test`` says of each token what ``reference`` says.

    The truth (``baseline`` if given, else ``reference``) generates ``num_tokens`` greedy tokens after each prompt, and
    all are forced along them, so that every token is scored after the same tokens. The test also generates by itself,
    and that generation's scores are held against the truth's as long as the tokens agree.

    Two-way, per token: over the k likeliest by the truth, max |test − truth| ≤ atol + limit(k) · scale, where scale is
    the greatest |logit| of the truth's row. The published limits name no normalisation for logits; this is the one that
    their module tests use, by the greatest magnitude. ``limits`` are :data:`HALF`, or :data:`FLOAT32` if both are
    float32.
    Three-way (``baseline`` in float32, ``reference`` in the target dtype): passes too if over all prompts the ratio of
    standard deviations of errors is ≤ 1 or their Bhattacharyya coefficient ≥ 0.99, see ``noise``.

    ``top`` is for subjects that give the likeliest tokens only; with them values are log-probabilities (see ``pairs``).
    ``golden`` keeps what reference and baseline say. ``progress`` is called with the number of prompts that are done.
    Raises ``AccuracyError`` if the subjects cannot be compared.
    """
    _check(prompts, num_tokens, top)
    truth = reference if baseline is None else baseline
    notes = check_same_tokens(test, truth, prompts, "reference" if baseline is None else "baseline")
    if baseline is not None:
        notes += [
            note
            for note in check_same_tokens(reference, baseline, prompts, "baseline")
            if note.kind != "tokenizer not known"
        ]
    run = _Run(test, reference, baseline, num_tokens, top, golden)
    limits = limits or run.limits
    examined: list[Examined] = []
    for part in run.chunks(prompts):
        examined += run.examine(part, limits)
        if progress is not None:
            progress(len(examined))
    for entry in () if golden is None else golden.damaged:
        detail = f"{entry}; it was made again"
        notes.append(
            Finding(Level.INPUT, "golden damaged", golden.url if golden else "", detail, Severity.NOTE)
        )
    return _outcome(run, examined, limits, notes, texts or [None] * len(prompts))


@dataclass(frozen=True, eq=False)
class _Run:
    test: Subject
    reference: Subject
    baseline: Subject | None
    num_tokens: int
    top: int
    golden: GoldenCache | None

    @property
    def truth(self) -> Subject:
        return self.reference if self.baseline is None else self.baseline

    @property
    def limits(self) -> Limits:
        dtypes = {self.test.info().dtype, self.truth.info().dtype}
        return FLOAT32 if dtypes == {"float32"} else HALF

    def chunks(self, prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Prompts whose rows fit in memory side by side."""
        row_bytes = 4 * max(self.truth.info().vocab_size, self.top)
        size = max(1, _CHUNK_BYTES // (row_bytes * self.num_tokens))
        for begin in range(0, len(prompts), size):
            yield prompts[begin : begin + size]

    def examine(self, prompts: Sequence[Sequence[int]], limits: Limits) -> list[Examined]:
        truths = self._kept(self.truth, prompts, None)
        tokens = [item.tokens for item in truths]
        references: Sequence[Scores | None] = [None] * len(prompts)
        if self.baseline is not None:
            references = [item.scores for item in self._kept(self.reference, prompts, tokens)]
        top = self._top(self.test)
        forced = self.test.force(prompts, tokens, top)
        own = self.test.generate(prompts, self.num_tokens, [Sampling()] * len(prompts), top)
        sides = zip(truths, forced, own, references, strict=True)
        return [examine(truth, scores, made, limits, ours) for truth, scores, made, ours in sides]

    def _kept(
        self, subject: Subject, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]] | None
    ) -> list[Generation]:
        top = self._top(subject)

        def make() -> list[Generation]:
            along = tokens
            if along is None:
                greedy = [Sampling()] * len(prompts)
                along = [made.tokens for made in subject.generate(prompts, self.num_tokens, greedy, top or 1)]
            scores = subject.force(prompts, along, top)
            return [
                Generation(tuple(prompt), tuple(item), score)
                for prompt, item, score in zip(prompts, along, scores, strict=True)
            ]

        if self.golden is None:
            return make()
        return self.golden.get(GoldenKey(subject.info(), prompts, self.num_tokens, top, tokens), make)

    def _top(self, subject: Subject) -> int:
        abilities = subject.info().abilities
        if not abilities & {"logits", "logprobs"}:
            raise AccuracyError(f"{label(subject.info())} gives no logits and no log-probabilities")
        return 0 if "logits" in abilities else self.top


def _check(prompts: Sequence[Sequence[int]], num_tokens: int, top: int) -> None:
    if not prompts:
        raise AccuracyError("no prompts; one works")
    if empty := [index for index, prompt in enumerate(prompts) if not prompt]:
        raise AccuracyError(f"prompt {empty[0]} has no tokens; one works")
    if num_tokens < 1:
        raise AccuracyError(f"num_tokens={num_tokens}: must be at least 1; 16 works")
    if top < LEAST_TOP:
        raise AccuracyError(f"top={top}: must be at least {LEAST_TOP}; {DEFAULT_TOP} works")


def _outcome(
    run: _Run, examined: list[Examined], limits: Limits, notes: list[Finding], texts: Sequence[str | None]
) -> Outcome:
    total = sum((item.noise for item in examined), Noise())
    three_way = run.baseline is not None
    findings = [*findings_of(examined, limits, total if three_way else None), *notes]
    faulty = {finding.where for finding in findings if finding.severity is Severity.FAULT}
    rows = []
    for index, (item, text) in enumerate(zip(examined, texts, strict=True)):
        passed = not any(where.split(",")[0] == f"prompt {index}" for where in faulty)
        rows.append({"passed": passed, **described(item, index, text, limits)})
    data = {
        "mode": "three-way" if three_way else "two-way",
        "num_tokens": run.num_tokens,
        "limits": {limits.names[k]: limit for k, limit in limits.relative.items()},
        "atol": limits.atol,
        "values": "logits" if all(item.forced.whole for item in examined) else "logprobs",
        "baseline": None if run.baseline is None else label(run.baseline.info()),
        "sigma_ratio": total.sigma_ratio if three_way else None,
        "bhattacharyya": total.bhattacharyya if three_way else None,
        "golden": None if run.golden is None else {"hits": run.golden.hits, "misses": run.golden.misses},
        "prompts": rows,
    }
    title = f"Logits, {data['mode']}"
    return Outcome("logits", title, label(run.test.info()), label(run.reference.info()), findings, data)
