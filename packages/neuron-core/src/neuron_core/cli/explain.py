# SPDX-License-Identifier: Apache-2.0
"""``neuron cache explain``: why two keys differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neuron_core.cli.difference import Difference, components_of, differences
from neuron_core.cli.local import cache_dir_option, chosen, open_cache, short
from neuron_core.cli.output import cell, console, json_option, new_table, print_json

if TYPE_CHECKING:
    from neuron_core.graphs.cache import CacheEntry

__all__ = ["explain"]

_DIFF_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
_SHOWN_FACT = 200


@click.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY_A [KEY_B]")
@cache_dir_option
@json_option
def explain(keys: tuple[str, ...], cache_dir: Path | None, as_json: bool) -> None:
    """Say in what two keys differ; with one key, show its components.

    A component is what a compiled graph depends on: the graph, its inputs, the compiler, the target, the sources
    of custom operators, versions. The beginning of a key is enough.

    \b
    Examples:
      neuron cache explain 9f2c 41ab
      neuron cache explain 9f2c
      neuron cache explain 9f2c 41ab --json
    """
    if len(keys) > 2:
        raise click.UsageError(f"explain takes one key or two, not {len(keys)}")
    cache = open_cache(cache_dir)
    entries = [chosen(cache, [key])[0] for key in keys]
    if len(entries) == 1:
        _show_one(entries[0], as_json)
    else:
        _show_two(entries[0], entries[1], as_json)


def _show_one(entry: CacheEntry, as_json: bool) -> None:
    components, facts = components_of(entry), entry.manifest.get("key_facts", {})
    if as_json:
        print_json({"key": entry.digest, "components": components, "facts": facts})
        return
    table = new_table("component", "hash", "what it says", fold=("what it says",))
    for name in sorted(components):
        table.add_row(cell(name), cell(short(components[name])), cell(_fact(facts.get(name))))
    click.echo(f"{entry.digest} {_place(entry)}")
    console().print(table)


def _show_two(first: CacheEntry, second: CacheEntry, as_json: bool) -> None:
    found = differences(first, second)
    names = sorted(components_of(first).keys() | components_of(second).keys())
    same = [name for name in names if name not in {each.component for each in found}]
    if as_json:
        keys = [first.digest, second.digest]
        print_json({"keys": keys, "equal": same, "differences": [each.to_json() for each in found]})
        return
    click.echo(f"first:  {first.digest} {_place(first)}")
    click.echo(f"second: {second.digest} {_place(second)}")
    if not found:
        click.echo("the same key: every component is equal")
        return
    for each in found:
        _print_difference(each)
    click.echo(f"\nequal: {', '.join(same) or 'nothing'}")


def _print_difference(each: Difference) -> None:
    click.echo(f"\n{click.style(each.component, fg='yellow', bold=True)} differs")
    for line in each.changes:
        click.echo(f"  {line}")
    for line in each.diff:
        click.secho(f"  {line}", fg=_DIFF_COLOURS.get(line[:1]))


def _place(entry: CacheEntry) -> str:
    where = " ".join(str(entry.manifest.get(name, "")) for name in ("compiler", "bucket", "part"))
    return f"({' '.join(where.split())})"


def _fact(fact: Any) -> str:
    if fact is None:
        return ""
    text = fact if isinstance(fact, str) else json.dumps(fact)
    return (
        text
        if len(text) <= _SHOWN_FACT
        else f"{text[:_SHOWN_FACT]}… ({len(text)} characters; --json shows all)"
    )
