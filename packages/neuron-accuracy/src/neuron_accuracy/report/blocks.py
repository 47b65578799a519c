# SPDX-License-Identifier: Apache-2.0
"""What any JSON data is drawn as: facts, tables, charts, and groups of these. Nothing is left out.

* a mapping with a rectangle of numbers in ``values`` is a heat map; ``rows`` and ``columns`` (``name``, ``labels``),
  ``title`` and ``limit`` are drawn with it, and ``scale: linear`` keeps it off a logarithmic one;
* a mapping with ``lines`` (``name``, ``values``) is a line chart over ``x`` (``name``, ``values``), with ``y`` and
  ``limit``;
* a mapping of equally long lists of numbers is line charts over its first list, and its columns are their tables;
* a mapping of mappings with the same few keys is a table;
* a list of mappings is a table; what of them does not fit into a cell is drawn below, a group for each;
* other scalars are facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neuron_accuracy.report.elements import Block, Chart, Facts, Group, Line, Table
from neuron_accuracy.report.numbers import Cell, cell, is_number, label, titled

__all__ = ["blocks_of"]

_INLINE = 8
"""Scalars of a list that are written into one cell; longer lists are drawn."""
_COLUMNS = 16
"""Scalars of a mapping in a record that become columns; of larger ones each record has a group."""
_CHARTED = 4
"""Fewest rows of which a chart shows more than the table."""
_ERRORS = ("rel_l2", "relative_l2", "input_rel_l2")
MOST_LINES = 6
"""Lines of a chart; as many colours, dashes and markers as there are."""
_NAMES = ("title", "name", "request", "prompt", "task", "module", "text")


def blocks_of(title: str, data: Any) -> list[Block]:
    """Draw any JSON-ready value under a title."""
    if isinstance(data, Mapping):
        return _mapping(title, data)
    if isinstance(data, list | tuple):
        return _list(title, list(data))
    return [Facts("", [(title or "value", cell(data))])]


def _mapping(title: str, data: Mapping[str, Any]) -> list[Block]:
    if not data:
        return [Facts("", [(title, Cell("none"))])] if title else []
    named = isinstance(data.get("title"), str)
    title = data["title"] if named else title
    data = {key: value for key, value in data.items() if key != "title" or not named}
    if _is_heat_map(data):
        return [_heat_map(title, data)]
    if _is_lines(data):
        return [_lines(title, data)]
    if (columns := _columns(data)) is not None:
        return _column_charts(title, columns)
    if (table := _same_keys(title, data)) is not None:
        return [table]
    facts = [(label(key), cell(value)) for key, value in data.items() if _fits(value)]
    if facts and len(facts) == len(data) and not named:
        return [Facts(title, facts)]
    inside: list[Block] = [Facts("", facts)] if facts else []
    for key, value in data.items():
        if not _fits(value):
            inside += blocks_of(titled(key), value)
    return [Group(title, inside)] if title else inside


def _list(title: str, data: list[Any]) -> list[Block]:
    if not data:
        return [Facts("", [(title, Cell("none"))])]
    if all(isinstance(item, Mapping) for item in data):
        return _records(title, data)
    if _is_rectangle(data):
        return [_heat_map(title, {"values": data})]
    if all(map(is_number, data)) and not _are_ids(title, data):
        return _column_charts(title, {"number": [*range(len(data))], title or "value": data})
    if all(map(_is_scalar, data)):
        return [Facts("", [(title, cell(data))])]
    inside: list[Block] = []
    for number, item in enumerate(data):
        inside += blocks_of(f"{title} {number}", item)
    return [Group(title, inside)]


def _records(title: str, data: list[Mapping[str, Any]]) -> list[Block]:
    """A table of what fits into cells, then what does not."""
    if all(_is_heat_map(item) or _is_lines(item) for item in data):
        return [block for number, item in enumerate(data) for block in blocks_of(f"{title} {number}", item)]
    data = _flattened(data)
    keys = list(dict.fromkeys(key for item in data for key in item))
    flat = [key for key in keys if all(_fits(item.get(key)) for item in data)]
    rest = [key for key in keys if key not in flat]
    groups = []
    for number, item in enumerate(data):
        inside = _mapping("", {key: item[key] for key in rest if key in item})
        if inside:
            groups.append(Group(_name_of(item, title, number), inside))
    blocks: list[Block] = []
    if flat and not (len(groups) == len(data) and all(_is_named(item, flat) for item in data)):
        rows = [[cell(item[key]) if key in item else Cell("") for key in flat] for item in data]
        blocks += _in_order(title, data)
        blocks.append(Table("" if rest or blocks else title, [label(key) for key in flat], rows))
    blocks += groups
    return [Group(title, blocks)] if title and (rest or len(blocks) > 1) else blocks


def _flattened(data: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Small mappings of scalars become columns of their own."""
    keys = dict.fromkeys(key for item in data for key, value in item.items() if isinstance(value, Mapping))
    small = {key for key in keys if all(_is_small(item.get(key)) for item in data)}
    found: list[Mapping[str, Any]] = []
    for item in data:
        wide: dict[str, Any] = {}
        for key, value in item.items():
            wide |= _leaves(key, value) if key in small else {key: value}
        found.append(wide)
    return found


def _is_small(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return value is None
    leaves = _leaves("", value).values()
    return 0 < len(leaves) <= _COLUMNS and all(map(_is_scalar, leaves))


def _leaves(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _leaves(f"{name}: {key}" if name else str(key), item)
    return found


def _in_order(title: str, data: list[Mapping[str, Any]]) -> list[Block]:
    """A chart of where the errors of named rows begin, such as a model's modules in the order they ran."""
    first = next(iter(data[0]), "")
    names = [item.get(first) for item in data]
    errors = [key for key in _ERRORS if any(isinstance(item.get(key), float) for item in data)]
    if len(data) < _CHARTED or not errors or not all(isinstance(name, str) for name in names):
        return []
    columns = {key: [item.get(key) for item in data] for key in errors}
    lines = [Line(label(key), [*map(_drawn, held)]) for key, held in columns.items()]
    rows = [
        [cell(name), *(cell(held[place]) for held in columns.values())] for place, name in enumerate(names)
    ]
    table = Table(title, [label(first), *map(label, errors)], rows)
    return [Chart(f"{title}: where errors begin", label(first), label(errors[0]), names, table, lines=lines)]


def _is_named(item: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Whether all that a table would say of it is its name, which its group has as its heading."""
    return len(keys) == 1 and keys[0] in _NAMES and isinstance(item.get(keys[0]), str)


def _name_of(item: Mapping[str, Any], title: str, number: int) -> str:
    for key in _NAMES:
        value = item.get(key)
        if value is not None and _is_scalar(value):
            said = str(value)
            return said if isinstance(value, str) else f"{label(key)} {said}"
    return f"{title} {number}".strip()


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _are_ids(title: str, data: list[Any]) -> bool:
    """Whether integers are names rather than sizes."""
    return bool({"ids", "tokens", "ranks"} & set(title.lower().split())) and not any(
        isinstance(x, float) for x in data
    )


def _fits(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _INLINE and all(map(_is_scalar, value))
    return _is_scalar(value)


def _is_rectangle(value: Any) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    widths = {len(row) if isinstance(row, list | tuple) else 0 for row in value}
    return (
        len(widths) == 1
        and widths != {0}
        and all(item is None or is_number(item) for row in value for item in row)
    )


def _is_heat_map(data: Mapping[str, Any]) -> bool:
    if not _is_rectangle(data.get("values")):
        return False
    shape = {"rows": len(data["values"]), "columns": len(data["values"][0])}
    return all(name not in data or _is_axis(data[name], "labels", count) for name, count in shape.items())


def _is_axis(value: Any, key: str, count: int) -> bool:
    if not isinstance(value, Mapping) or set(value) - {"name", key}:
        return False
    held = value.get(key)
    return isinstance(held, list | tuple) and len(held) == count and all(map(_is_scalar, held))


def _is_lines(data: Mapping[str, Any]) -> bool:
    lines, x = data.get("lines"), data.get("x")
    if not isinstance(lines, list | tuple) or not lines or not isinstance(x, Mapping):
        return False
    for line in lines:
        if not isinstance(line, Mapping) or set(line) != {"name", "values"}:
            return False
        held = line["values"]
        if not isinstance(held, list | tuple) or not all(item is None or is_number(item) for item in held):
            return False
    count = len(lines[0]["values"])
    return _is_axis(x, "values", count) and all(len(line["values"]) == count for line in lines)


def _columns(data: Mapping[str, Any], prefix: str = "") -> dict[str, list[Any]] | None:
    """Equally long lists of scalars, nested mappings flattened; empty lists, which say that there is none, left in."""
    found: dict[str, list[Any]] = {}
    for key, value in data.items():
        name = f"{prefix}{label(key)}"
        if isinstance(value, Mapping):
            inner = _columns(value, f"{name}: ")
            if inner is None:
                return None
            found |= inner
        elif isinstance(value, list | tuple) and all(item is None or is_number(item) for item in value):
            found[name] = list(value)
        else:
            return None
    lengths = {len(column) for column in found.values() if column}
    direct = any(isinstance(value, list | tuple) for value in data.values())
    return found if len(lengths) == 1 and (prefix or (direct and lengths.pop() > 1)) else None


def _heat_map(title: str, data: Mapping[str, Any]) -> Chart:
    values = data["values"]
    rows, columns = data.get("rows", {}), data.get("columns", {})
    ys = rows.get("labels", [*range(len(values))])
    xs = columns.get("labels", [*range(len(values[0]))])
    y, x = label(rows.get("name", "row")), label(columns.get("name", "column"))
    table = Table(
        title,
        [f"{y} \\ {x}", *map(str, xs)],
        [[cell(name), *map(cell, row)] for name, row in zip(ys, values, strict=True)],
    )
    cells = [[_drawn(item) for item in row] for row in values]
    linear = data.get("scale") == "linear"
    known = ("values", "rows", "columns", "limit", *(("scale",) if linear else ()))
    return Chart(
        title,
        x,
        y,
        xs,
        table,
        ys=ys,
        cells=cells,
        limit=_limit(data),
        linear=linear,
        others=_others(data, known),
    )


def _lines(title: str, data: Mapping[str, Any]) -> Chart:
    x, y = data["x"], data.get("y", {})
    names = [str(line["name"]) for line in data["lines"]]
    columns = zip(x["values"], *(line["values"] for line in data["lines"]), strict=True)
    x_name = label(x.get("name", "number"))
    table = Table(title, [x_name, *names], [[*map(cell, row)] for row in columns])
    lines = [
        Line(name, [*map(_drawn, line["values"])]) for name, line in zip(names, data["lines"], strict=True)
    ]
    y_name = label(y["name"]) if isinstance(y, Mapping) and set(y) == {"name"} else ""
    known = ("lines", "x", "limit", *(("y",) if y_name or not y else ()))
    return Chart(
        title,
        x_name,
        y_name,
        x["values"],
        table,
        lines=lines,
        limit=_limit(data),
        others=_others(data, known),
    )


def _column_charts(title: str, columns: Mapping[str, list[Any]]) -> list[Block]:
    """The first column counts if it holds rising integers, otherwise rows are numbered.

    Columns of a nested mapping have a chart of their own, and no chart more lines than can be told apart.
    """
    count = max(map(len, columns.values()))
    full = {name: held or [None] * count for name, held in columns.items()}
    first = next(iter(full))
    rising = all(isinstance(item, int) for item in full[first]) and full[first] == sorted(set(full[first]))
    if not rising or len(full) == 1:
        first, full = "number", {"number": [*range(count)], **full}
    families: dict[str, list[str]] = {}
    for name in full:
        if name != first:
            families.setdefault(name.rpartition(": ")[0], []).append(name)
    charts: list[Block] = []
    for family, names in families.items():
        for begin in range(0, len(names), MOST_LINES):
            heading = ": ".join(part for part in (title, family) if part)
            charts.append(_column_chart(heading, first, full, names[begin : begin + MOST_LINES]))
    return charts


def _column_chart(title: str, first: str, columns: Mapping[str, list[Any]], names: Sequence[str]) -> Chart:
    lines = [Line(name.rpartition(": ")[2], [*map(_drawn, columns[name])]) for name in names]
    rows = zip(columns[first], *(columns[name] for name in names), strict=True)
    table = Table(title, [first, *names], [[*map(cell, row)] for row in rows])
    return Chart(title, first, "", columns[first], table, lines=lines)


def _same_keys(title: str, data: Mapping[str, Any]) -> Table | None:
    rows = list(data.values())
    if len(rows) < 2 or not all(_is_small(row) and row is not None for row in rows):
        return None
    keys = [_leaves("", row) for row in rows]
    if any(list(row) != list(keys[0]) for row in keys):
        return None
    cells = [[cell(name), *map(cell, row.values())] for name, row in zip(data, keys, strict=True)]
    return Table(title, ["", *map(label, keys[0])], cells)


def _drawn(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        return None
    return float(value)


def _limit(data: Mapping[str, Any]) -> float | None:
    return _drawn(data.get("limit"))


def _others(data: Mapping[str, Any], known: Sequence[str]) -> list[tuple[str, Cell]]:
    found = [(label(key), _any_cell(value)) for key, value in data.items() if key not in known]
    if (limit := data.get("limit")) is not None:
        found.append(("limit", _any_cell(limit)))
    return found


def _any_cell(value: Any) -> Cell:
    return cell(value) if _fits(value) else Cell(str(value))
