# SPDX-License-Identifier: Apache-2.0
"""Findings of a logit validation: what fails, what is excused, and where to look first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from neuron_accuracy.findings import Finding, Level, Severity
from neuron_accuracy.logits.examine import Examined, Series
from neuron_accuracy.logits.limits import Limits
from neuron_accuracy.logits.noise import BC_LIMIT, LINF_GATE, SIGMA_LIMIT, TOKEN_RATIO, Noise

__all__ = ["findings_of", "hint"]


def findings_of(examined: Sequence[Examined], limits: Limits, total: Noise | None) -> list[Finding]:
    """Faults by prompt, those at the first token before others, then notes. ``total`` is the noise of all prompts in a
    three-way comparison.
    """
    found: list[Finding] = []
    for index, item in enumerate(examined):
        found += _not_finite(index, item)
        found += _beyond(index, item, limits, total)
        found += _parting(index, item)
        found += _noisy_tokens(index, item)
    if total is not None and any(item.forced.bad or item.own.bad for item in examined):
        found.append(_noise(total))
    return sorted(found, key=_urgency)


def hint(token: int) -> str:
    """Where to look for a fault that shows at this generated token first."""
    if token == 0:
        return "the first token after the prompt is wrong already: look at prefill"
    return f"prefill is right and token {token} the first that is wrong: look at decode and the KV cache"


def _urgency(finding: Finding) -> tuple[bool, bool, float]:
    fault = finding.severity is Severity.FAULT
    return not fault, finding.kind != "not finite", finding.figures.get("token", 0.0)


def _not_finite(index: int, item: Examined) -> Iterator[Finding]:
    for side, rows in item.not_finite.items():
        if rows:
            detail = (
                f"{len(rows)} of {len(item.tokens)} tokens have NaN or infinite scores on the {side}'s side"
            )
            if side == "test":
                detail = f"{detail}; {hint(rows[0])}"
            where = f"prompt {index}, token {rows[0]}"
            yield Finding(Level.PROMPT, "not finite", where, detail, figures={"token": rows[0]})


def _beyond(index: int, item: Examined, limits: Limits, total: Noise | None) -> Iterator[Finding]:
    bad = sorted({*item.forced.bad, *item.own.bad})
    if not bad or (total is not None and _excused(item, total)):
        return
    figures: dict[str, float] = {"token": bad[0]}
    said = []
    series, row = _first(item, bad[0])
    for k, values in series.measures.errors.items():
        error = figures[f"error_{limits.names[k]}"] = float(values[row])
        said.append(f"{limits.names[k]}: {error:.3g} (limit {limits.relative[k]:.3g})")
    detail = f"{len(bad)} of {len(item.tokens)} tokens beyond limits, {'; '.join(said)}; {hint(bad[0])}"
    if total is not None:
        figures |= {"sigma_ratio": item.noise.sigma_ratio, "linf_ratio": item.noise.linf_ratio}
        detail += (
            f"; errors are {item.noise.sigma_ratio:.3g} times those of the dtype, "
            f"the greatest {item.noise.linf_ratio:.3g} times"
        )
    elif not item.forced.bad:
        detail += "; forced along the same tokens it is right: only its own generation is wrong"
    yield Finding(Level.PROMPT, "diverges", f"prompt {index}, token {bad[0]}", detail, figures=figures)


def _first(item: Examined, token: int) -> tuple[Series, int]:
    series = item.forced if token in item.forced.bad else item.own
    return series, series.rows.index(token)


def _excused(item: Examined, total: Noise) -> bool:
    if not total.alike or item.noise.beyond_gates:
        return False
    return not item.own.bad or item.own.greatest <= LINF_GATE * item.noise.base_worst


def _parting(index: int, item: Examined) -> Iterator[Finding]:
    parting = item.parting
    if parting is None:
        return
    kind, severity = ("tie", Severity.NOTE) if parting.tie else ("greedy divergence", Severity.FAULT)
    detail = (
        f"its own generation has token {parting.test_token} where the reference has {parting.reference_token}, "
        f"{parting.margin:.3g} apart, {'within' if parting.tie else 'beyond'} the {parting.allowed:.3g} that "
        "errors within limits can make"
    )
    where = f"prompt {index}, token {parting.index}"
    figures = {"token": float(parting.index), "margin": parting.margin, "allowed": parting.allowed}
    yield Finding(Level.PROMPT, kind, where, detail, severity, figures)


def _noisy_tokens(index: int, item: Examined) -> Iterator[Finding]:
    noisy = [
        (row, linf)
        for row, linf, l2 in zip(item.forced.rows, item.token_linf, item.token_l2, strict=False)
        if max(linf, l2) > TOKEN_RATIO
    ]
    if noisy:
        row, linf = noisy[0]
        detail = (
            f"{len(noisy)} of {len(item.forced.rows)} tokens have errors more than {TOKEN_RATIO} times those of the "
            f"dtype, the first {linf:.3g} times; that alone fails nothing"
        )
        where = f"prompt {index}, token {row}"
        yield Finding(
            Level.PROMPT,
            "noisier than the dtype",
            where,
            detail,
            Severity.NOTE,
            {"token": row, "linf_ratio": linf},
        )


def _noise(total: Noise) -> Finding:
    said = "are" if total.alike else "are not"
    detail = (
        f"over all prompts the errors {said} those of the dtype: sigma ratio {total.sigma_ratio:.3g} "
        f"(limit {SIGMA_LIMIT:g}), Bhattacharyya coefficient {total.bhattacharyya:.4f} (at least {BC_LIMIT:g})"
    )
    figures = {"sigma_ratio": total.sigma_ratio, "bhattacharyya": total.bhattacharyya}
    kind = "within the dtype's noise" if total.alike else "beyond the dtype's noise"
    return Finding(Level.PROMPT, kind, "all prompts", detail, Severity.NOTE, figures)
