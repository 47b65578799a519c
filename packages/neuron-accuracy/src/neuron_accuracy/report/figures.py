# SPDX-License-Identifier: Apache-2.0
"""Charts as plotly figures, JSON-ready. What text and lines look like is the style sheet's, for light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from neuron_accuracy.report.elements import Chart

__all__ = ["figure", "summary"]

# Okabe and Ito's colours, which people tell apart whatever they see of red and green; on white and on black alike.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up")
_MARKED_POINTS = 80
"""Lines with more points have no markers."""
_DECADES = 2.0
"""Positive numbers that span more are drawn on a logarithmic scale."""
_TICKS, _NAME = 16, 24
"""Most ticks of an axis, and most characters of a name at one."""
_ROW_PX, _MIN_PX, _MAX_PX = 18, 240, 760


def figure(chart: Chart) -> dict[str, Any]:
    """The ``data`` and ``layout`` that Plotly draws."""
    import plotly.graph_objects as go

    made = go.Figure()
    if chart.cells:
        _heat_map(made, go, chart)
    else:
        _lines(made, go, chart)
    made.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 64, "r": 16, "t": 16, "b": 56},
        font={"size": 13},
        hoverlabel={"bgcolor": "#1b1f24", "bordercolor": "#1b1f24", "font": {"color": "#ffffff"}},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    )
    found: dict[str, Any] = json.loads(made.to_json())
    found["layout"].pop("template", None)
    return found


def summary(chart: Chart) -> str:
    """What the chart shows in a sentence, for who does not see it."""
    numbers = [
        x for row in (chart.cells or [line.values for line in chart.lines]) for x in row if x is not None
    ]
    kind = "Heat map" if chart.cells else "Line chart"
    over = (
        f"{chart.y} by {chart.x}" if chart.cells else f"{', '.join(x.name for x in chart.lines)} by {chart.x}"
    )
    if not numbers:
        return f"{kind}: {chart.title}; {over}; no numbers."
    text = f"{kind}: {chart.title}; {over}; from {min(numbers):.4g} to {max(numbers):.4g}"
    if chart.limit is not None:
        text += f", {sum(x > chart.limit for x in numbers)} of {len(numbers)} above the limit of {chart.limit:.4g}"
    return text + "."


def _heat_map(made: Any, go: Any, chart: Chart) -> None:
    numbers = [x for row in chart.cells for x in row if x is not None and math.isfinite(x)]
    logarithmic = not chart.linear and _spans_decades(numbers)
    floor = math.log10(min((x for x in numbers if x > 0), default=1.0)) if logarithmic else 0.0
    drawn = [[_scaled(x, floor) if logarithmic else x for x in row] for row in chart.cells]
    marks = [
        ["✕" if chart.limit is not None and x is not None and x > chart.limit else "" for x in row]
        for row in chart.cells
    ]
    shown = [["" if x is None else f"{x:.4g}" for x in row] for row in chart.cells]
    bar: dict[str, Any] = {"thickness": 12, "outlinewidth": 0}
    if logarithmic:
        low, high = math.floor(floor), math.ceil(math.log10(max(numbers)))
        steps = range(low, high + 1, max(1, (high - low) // 6))
        bar |= {"tickvals": [*steps], "ticktext": [f"1e{step}" for step in steps]}
    made.add_trace(
        go.Heatmap(
            z=drawn,
            x=[*map(str, chart.xs)],
            y=[*map(str, chart.ys)],
            text=marks,
            texttemplate="%{text}",
            customdata=shown,
            hovertemplate=f"{_plain(chart.y)} %{{y}}, {_plain(chart.x)} %{{x}}: %{{customdata}}<extra></extra>",
            colorscale="Cividis",
            xgap=1,
            ygap=1,
            colorbar=bar,
            hoverongaps=False,
        )
    )
    made.update_xaxes(title=_plain(chart.x), type="category", nticks=24)
    made.update_yaxes(title=_plain(chart.y), type="category", autorange="reversed", nticks=24)
    made.update_layout(height=min(_MAX_PX, max(_MIN_PX, 90 + _ROW_PX * len(chart.ys))))


def _lines(made: Any, go: Any, chart: Chart) -> None:
    marked = len(chart.xs) <= _MARKED_POINTS
    numbers = [x for line in chart.lines for x in line.values if x is not None and math.isfinite(x)]
    limit = chart.limit
    logarithmic = _spans_decades(numbers + ([limit] if limit else []))
    edge = min((x for x in numbers if x > 0), default=1.0) / 3
    drawn = [line for line in chart.lines if any(x is not None for x in line.values)]
    for number, line in enumerate(drawn):
        made.add_trace(
            go.Scatter(
                x=[*chart.xs],
                y=[edge if logarithmic and x == 0 else x for x in line.values],
                customdata=["" if x is None else f"{x:.4g}" for x in line.values],
                name=_plain(line.name),
                mode="lines+markers" if marked else "lines",
                line={"color": _pick(_COLOURS, number), "dash": _pick(_DASHES, number), "width": 2},
                marker={"symbol": _pick(_MARKERS, number), "size": 7},
                hovertemplate=f"%{{x}}: %{{customdata}}<extra>{_plain(line.name)}</extra>",
            )
        )
    if limit is not None and (limit > 0 or not logarithmic):
        made.add_hline(
            y=limit,
            line={"dash": "5px 4px", "width": 1.5, "color": "#808080"},
            annotation={"text": f"limit {limit:.3g}", "xanchor": "right"},
        )
        # Shapes stand at numbers, annotations at their logarithms.
        made.layout.annotations[0].y = math.log10(limit) if logarithmic else limit
    unit = chart.y or (drawn[0].name if len(drawn) == 1 else "")
    title = ", ".join([unit] * bool(unit) + ["0 is the lower edge"] * (logarithmic and 0 in numbers))
    made.update_xaxes(title=_plain(chart.x), zeroline=False, automargin=True, **_ticks(chart.xs))
    made.update_yaxes(
        title={"text": _plain(title), "standoff": 12}, zeroline=False, exponentformat="e", automargin=True
    )
    if logarithmic:
        made.update_yaxes(type="log", dtick=_decades_a_tick(numbers))
    made.update_layout(height=320, showlegend=len(drawn) > 1)


def _ticks(xs: Sequence[Any]) -> dict[str, Any]:
    """Names are shown by their ends, as many as there is room for."""
    if not any(isinstance(x, str) for x in xs):
        return {"nticks": _TICKS}
    shown = range(0, len(xs), max(1, len(xs) // _TICKS))
    text = [_plain(name if len(name) <= _NAME else "…" + name[1 - _NAME :]) for name in map(str, xs)]
    return {"type": "category", "tickvals": [*shown], "ticktext": [text[place] for place in shown]}


def _decades_a_tick(numbers: Sequence[float]) -> int:
    positive = [x for x in numbers if x > 0]
    return max(1, round(math.log10(max(positive) / min(positive)) / 6))


def _spans_decades(numbers: Sequence[float]) -> bool:
    positive = [x for x in numbers if x > 0]
    if not positive or min(numbers) < 0:
        return False
    return math.log10(max(positive) / min(positive)) > _DECADES


def _scaled(value: float | None, floor: float) -> float | None:
    return None if value is None else math.log10(value) if value > 0 else floor - 1


def _pick(choices: Sequence[str], number: int) -> str:
    return choices[number % len(choices)]


def _plain(text: str) -> str:
    """Plotly reads a subset of HTML, and ``%{…}`` in templates: neither is meant here."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("%{", "% {")
