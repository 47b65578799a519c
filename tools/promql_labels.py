# SPDX-License-Identifier: Apache-2.0
"""What a PromQL expression reads, checked against the series that are exported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

TARGET = frozenset({"job", "instance"})
"""The labels that Prometheus adds to what it scrapes."""

_GRAFANA = {"$__rate_interval": "5m", "$__range": "1h"}
_OF_COUNTERS = ("rate", "irate", "increase")
_OF_GAUGES = ("delta", "deriv", "changes", "predict_linear")
_SETS = ("and", "or", "unless")


@dataclass(frozen=True)
class Series:
    """What one name is exported as: whether it only rises, its labels, and their values where they are known."""

    rises: bool
    labels: frozenset[str]
    values: dict[str, set[str]] = field(default_factory=dict)


def series_of(page: str) -> dict[str, Series]:
    """The series of a text that `/metrics` answered, by name."""
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            rises = family.type in ("counter", "histogram")
            known = found.setdefault(sample.name, Series(rises, frozenset(sample.labels)))
            for label, value in sample.labels.items():
                known.values.setdefault(label, set()).add(value)
    return found


def parsed(text: str) -> Any:
    """The tree of an expression, Grafana's own variables replaced as Grafana does; raises `ValueError`."""
    for name, value in _GRAFANA.items():
        text = text.replace(name, value)
    return promql.parse(text)


def names_in(text: str) -> set[str]:
    """The names of the series an expression reads."""
    found: set[str] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, promql.VectorSelector) and expr.name:
            found.add(expr.name)
        elif type(expr).__name__ == "MatrixSelector":  # missing from the package's annotations
            visit(expr.vector_selector)

    promql.walk(parsed(text), visit)
    return found


class Checker:
    """Finds the labels of an expression's result; `ValueError` for what can give no result, or a wrong one."""

    def __init__(self, series: dict[str, Series]) -> None:
        self._series = series

    def labels(self, expr: Any) -> frozenset[str] | None:
        """The labels a result may have; None for a scalar."""
        match type(expr).__name__:
            case "NumberLiteral":
                return None
            case "ParenExpr":
                return self.labels(expr.expr)
            case "VectorSelector":
                return self._selected(expr)
            case "MatrixSelector":
                return self._selected(expr.vector_selector)
            case "Call":
                return self._called(expr)
            case "AggregateExpr":
                return self._aggregated(expr)
            case "BinaryExpr":
                return self._combined(expr)
        raise ValueError(f"{expr}: {type(expr).__name__} is not known to this check")

    def _selected(self, expr: Any) -> frozenset[str]:
        known = self._series.get(expr.name)
        if known is None:
            raise ValueError(f"nothing exports {expr.name}")
        for matcher in expr.matchers.matchers:
            if matcher.name not in known.labels | TARGET:
                raise ValueError(f"{expr.name} has no label {matcher.name}, but {sorted(known.labels)}")
            values = known.values.get(matcher.name)
            if matcher.op == promql.MatchOp.Equal and values and matcher.value not in values:
                raise ValueError(f"{expr.name} has no {matcher.name} {matcher.value}, but {sorted(values)}")
        return known.labels | TARGET

    def _called(self, expr: Any) -> frozenset[str]:
        name = expr.func.name
        (labels,) = (found for arg in expr.args if (found := self.labels(arg)) is not None)
        for arg in expr.args:
            if type(arg).__name__ == "MatrixSelector":
                self._check_kind(name, arg.vector_selector.name)
        if name == "histogram_quantile":
            if "le" not in labels:
                raise ValueError(f"{expr}: histogram_quantile of something without le")
            return labels - {"le"}
        return labels

    def _check_kind(self, function: str, name: str) -> None:
        rises = self._series[name].rises
        if function in (_OF_GAUGES if rises else _OF_COUNTERS):
            raise ValueError(f"{function} of {name}, which is {'' if rises else 'not '}a counter")

    def _aggregated(self, expr: Any) -> frozenset[str]:
        inner, modifier = self.labels(expr.expr), expr.modifier
        if modifier is None or inner is None:
            return frozenset()
        missing = set(modifier.labels) - inner
        if missing:
            raise ValueError(f"{expr}: no label {sorted(missing)} in {sorted(inner)}")
        by = modifier.type == promql.AggModifierType.By
        return frozenset(modifier.labels) if by else inner - set(modifier.labels)

    def _combined(self, expr: Any) -> frozenset[str] | None:
        left, right = self.labels(expr.lhs), self.labels(expr.rhs)
        if left is None or right is None:
            return right if left is None else left
        matching = expr.modifier.matching if expr.modifier else None
        if matching is None:
            if left != right:
                raise ValueError(f"{expr}: the sides never match: {sorted(left)} and {sorted(right)}")
            return left
        if matching.type != promql.LabelModifierType.Include or expr.modifier.group_labels is not None:
            raise ValueError(f"{expr}: ignoring and group are not known to this check")
        missing = set(matching.labels) - (left & right)
        if missing:
            raise ValueError(f"{expr}: on {sorted(missing)}, which one side does not have")
        return left if str(expr.op) in _SETS else frozenset(matching.labels)
