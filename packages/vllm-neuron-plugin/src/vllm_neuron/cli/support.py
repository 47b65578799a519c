# SPDX-License-Identifier: Apache-2.0
"""``vllm-neuron support``: which feature works with which models, as the tests prove it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import click

from neuron_core.cli.output import cell, console, json_option, new_table, print_json

__all__ = ["cell_text", "read_matrix", "support"]


def read_matrix() -> dict[str, Any]:
    """The matrix that ``tools/support_matrix.py`` made from the tests' markers and the tables of refusals."""
    data: dict[str, Any] = json.loads((files("vllm_neuron.cli") / "support.json").read_text())
    return data


def cell_text(tests: Sequence[dict[str, Any]]) -> str:
    """One cell: how many tests prove it, and whether they run by default or only at night."""
    if not tests:
        return "–"
    count = f"{len(tests)} test{'s' * (len(tests) > 1)}"
    return f"{count}, nightly" if all(test["nightly"] for test in tests) else count


@click.command(short_help="Show which features work with which models.")
@click.option("--tests", "with_tests", is_flag=True, help="Name the tests behind each feature.")
@json_option
def support(with_tests: bool, as_json: bool) -> None:
    """Show features by model family: proven by how many tests, or refused and what to do instead.

    A dash means that no test says so. All tests run on the CPU device; nothing has run on Neuron hardware.

    \b
    Examples:
      vllm-neuron support
      vllm-neuron support --tests
    """
    data = read_matrix()
    if as_json:
        print_json(data)
    else:
        _show(data, with_tests)


def _show(data: dict[str, Any], with_tests: bool) -> None:
    models = data["models"]
    table = new_table("feature", *models.values(), "Neuron device")
    for row in data["features"]:
        if not row["refused"]:
            cells = (cell_text(row["tests"][model]) for model in models)
            table.add_row(row["feature"], *cells, data["neuron_device"])
    console().print(table)
    refused = new_table("refused", "setting or parameter", "instead", fold=("instead",))
    for row in data["features"]:
        if row["refused"]:
            setting, hint = row["refused"]["setting"], row["refused"]["hint"]
            refused.add_row(row["feature"], cell(setting), cell(hint))
    console().print(refused)
    if with_tests:
        _show_tests(data)


def _show_tests(data: dict[str, Any]) -> None:
    for row in data["features"]:
        tests = dict.fromkeys(test["test"] for tests in row["tests"].values() for test in tests)
        if tests:
            click.echo("\n".join((row["feature"], *(f"  {test}" for test in tests), "")))
