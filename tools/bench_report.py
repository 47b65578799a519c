# SPDX-License-Identifier: Apache-2.0
"""What `bench.py` found, as tables for people, beside the project's goals."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = dict[str, float]


@dataclass(frozen=True)
class Goal:
    """What a ratio of a figure, ours over the peer's, should be."""

    limit: float
    at_least: bool

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"

    def is_met(self, ratio: float) -> bool:
        """Whether `ratio` is on the right side of the limit."""
        return ratio >= self.limit if self.at_least else ratio <= self.limit


GOALS = {
    "output_tok_s_b1": Goal(2.2, at_least=True),
    "output_tok_s_b4": Goal(1.2, at_least=True),
    "output_tok_s_b16": Goal(1.15, at_least=True),
    "ttft_s": Goal(0.75, at_least=False),
    "warm_start_s": Goal(0.12, at_least=False),
    "cold_start_s": Goal(0.8, at_least=False),
    "serve_requests_s": Goal(1.2, at_least=True),
    "serve_tpot_p99_ms": Goal(1.0, at_least=False),
}
"""The project's own limits of ratios to the peer; a missed one is shown, and fails nothing."""

SAMPLER_GOAL = Goal(1.2, at_least=False)
OWN_SERVE_GOALS = {"prefix_hit_ttft_ratio": Goal(0.3, at_least=False)}
"""Limits of figures that our side alone has; they are ratios already."""

GAP_GOALS = {"cpu": Goal(0.4, at_least=False), "latency": Goal(0.1, at_least=False)}
"""What asynchronous scheduling should leave of the device's wait, by device."""

POOLING_GOAL = Goal(1.0, at_least=True)
CAPTURE_MEMORY_GOAL = Goal(3072.0, at_least=False)


def medians(runs: list[Figures]) -> Figures:
    """The median of each figure over runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def span(ratios: list[float]) -> str:
    """Least and greatest, where there are several."""
    return f"{min(ratios):.2f} – {max(ratios):.2f}" if len(ratios) > 1 else ""


def peer_table(found: dict[str, Any]) -> Table:
    """Ratios with the figures they are made of."""
    ours, theirs = medians(found["runs"]["ours"]), medians(found["runs"]["peer"])
    table = Table(title="this plugin over vLLM's CPU backend")
    for column in ("figure", "ours", "peer", "ratio", "over rounds", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name, ratios in found["ratios"].items():
        ratio, goal = statistics.median(ratios), GOALS.get(name)
        verdict = "" if goal is None else "met" if goal.is_met(ratio) else "missed"
        both = (f"{ours[name]:g}", f"{theirs[name]:g}")
        table.add_row(name, *both, f"{ratio:.2f} ×", span(ratios), str(goal or ""), verdict)
    for name, goal in OWN_SERVE_GOALS.items():
        if name in ours:
            verdict = "met" if goal.is_met(ours[name]) else "missed"
            table.add_row(name, f"{ours[name]:g}", "", "", "", str(goal), verdict)
    return table


def own_table(found: dict[str, Any]) -> Table:
    """Our figures, quiet and busy."""
    quiet, busy = medians(found["runs"]["ours"]), medians(found["runs"]["ours busy"])
    table = Table(title="this plugin on the CPU device")
    for column in ("figure", "quiet", "busy neighbour", "busy / quiet", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name, value in quiet.items():
        kept = found["busy_over_quiet"].get(name)
        beside = f"{busy[name]:g}" if name in busy else ""
        goal = SAMPLER_GOAL if name.startswith("sampler_cost") else None
        verdict = "" if goal is None else "met" if goal.is_met(value) else "missed"
        ratio = f"{statistics.median(kept):.2f} ×" if kept else ""
        table.add_row(name, f"{value:g}", beside, ratio, str(goal or ""), verdict)
    return table


def capture_table(found: dict[str, Any]) -> Table:
    """What capturing a large model took."""
    table = Table(title="Llama 3.1 70B on eight ranks, captured without weights")
    for column in ("figure", "value", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name, value in medians(found["runs"]["ours"]).items():
        goal = CAPTURE_MEMORY_GOAL if name.endswith("peak_mib") else None
        verdict = "" if goal is None else "met" if goal.is_met(value) else "missed"
        table.add_row(name, f"{value:g}", str(goal or ""), verdict)
    return table


def gap_table(found: dict[str, Any]) -> Table:
    """What asynchronous scheduling changes, on each device."""
    table = Table(title="asynchronous over plain scheduling")
    for column in ("figure", "plain", "asynchronous", "ratio", "over rounds", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for title, ratios in found["async_over_sync"].items():
        device, _, name = title.partition(" ")
        ratio = statistics.median(ratios)
        goal = GAP_GOALS[device] if name.startswith("host_gap") else None
        verdict = "" if goal is None else "met" if goal.is_met(ratio) else "missed"
        values = [f"{medians(found['runs'][f'{device} {mode}'])[name]:.3g}" for mode in ("sync", "async")]
        table.add_row(title, *values, f"{ratio:.2f} ×", span(ratios), str(goal or ""), verdict)
    return table


def pooling_table(found: dict[str, Any]) -> Table:
    """Texts a second of both sides and the ratio of the pairs' times."""
    table = Table(title="32 texts of 128 tokens, this plugin over sentence-transformers")
    for column in ("figure", "ours", "peer", "ratio", "over pairs", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    ratio = statistics.median(found["ratios"])
    values = [f"{found['texts_s'][name]:.1f}" for name in ("ours", "peer")]
    verdict = "met" if POOLING_GOAL.is_met(ratio) else "missed"
    cells = (*values, f"{ratio:.2f} ×", span(found["ratios"]), str(POOLING_GOAL), verdict)
    table.add_row("texts_s", *cells)
    return table


def serve_table(found: dict[str, Any]) -> Table:
    """Our server under load, without a peer."""
    table = Table(title="this plugin's server on the CPU device, 16 clients")
    for column in ("figure", "value", "goal", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name, value in medians(found["runs"]["ours"]).items():
        goal = OWN_SERVE_GOALS.get(name)
        verdict = "" if goal is None else "met" if goal.is_met(value) else "missed"
        table.add_row(name, f"{value:g}", str(goal or ""), verdict)
    return table


def show(found: dict[str, Any], console: Console) -> None:
    """Print the machine, what was checked, and the table."""
    machine = found["machine"]
    console.print(
        f"{machine['processors']} × {machine['processor']}, load before {machine['load_before']:.2f}"
    )
    if "pooling" in found:
        about = found["pooling"]
        console.print(
            f"{about['versions']}, {about['threads']} threads each, {found['options']['dtype']}, "
            f"load while timing {about['load']:.2f}"
        )
        checked = about["check"]
        console.print(
            f"outputs checked: {checked['texts']} texts, least cosine {checked['least_cosine']:.6f}"
        )
        console.print(pooling_table(about))
        return
    if "async_over_sync" in found:
        console.print("outputs checked: all texts of all runs identical")
        console.print(gap_table(found))
        return
    if "ours busy" not in found["runs"] and "check" not in found:
        is_served = "serve_requests_s" in found["runs"]["ours"][0]
        console.print(serve_table(found) if is_served else capture_table(found))
        return
    if "check" not in found:
        console.print(own_table(found))
        return
    check = found["check"]
    console.print(f"outputs checked: {check['identical_texts']} of {check['texts']} texts identical")
    for name, agreement in check["agreement"].items():
        console.print(
            f"  {name}: {agreement['top1']:.2%} likeliest, {agreement['logprob_gap']:.3f} nats apart"
        )
    console.print(peer_table(found))
