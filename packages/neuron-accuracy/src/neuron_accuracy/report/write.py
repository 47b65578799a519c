# SPDX-License-Identifier: Apache-2.0
"""Writes the report: one HTML file that needs nothing beside itself."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Outcome
from neuron_accuracy.report.figures import figure, summary
from neuron_accuracy.report.page import page_of

__all__ = ["render", "write_report"]

_TEMPLATES = files("neuron_accuracy.report") / "templates"


def write_report(
    outcomes: Sequence[Outcome],
    path: Path,
    *,
    title: str = "Accuracy report",
    about: Mapping[str, object] | None = None,
) -> None:
    """Write ``path``, whole or not at all; ``about`` are facts of the runs, shown at the top.

    Raises ``AccuracyError`` when there is no outcome, or the file cannot be written.
    """
    text = render(outcomes, title=title, about=about)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    except OSError as error:
        raise AccuracyError(f"the report {path} cannot be written: {error}") from error


def render(
    outcomes: Sequence[Outcome], *, title: str = "Accuracy report", about: Mapping[str, object] | None = None
) -> str:
    """The HTML text."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    page = page_of(outcomes, title, about or {})
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("neuron_accuracy.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"figure": figure, "summary": summary, "number": _numbers()}
    scripts = [_plain(get_plotlyjs()), _plain(_read("report.js"))]
    return environment.get_template("report.html.j2").render(
        page=page,
        style=Markup(_read("report.css")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
    )


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy: nothing is fetched, and only these scripts run.

    Plotly styles elements inline and draws heat maps as data images.
    """
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _plain(script: str) -> str:
    """A script as it may stand in an HTML element, its digest that of what the browser sees."""
    if "</script" in script.lower() or "<!--" in script:
        script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return script.replace("\r\n", "\n").replace("\r", "\n")


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _numbers() -> Any:
    """A counter for what needs a name of its own in the page."""
    count = 0

    def following() -> int:
        nonlocal count
        count += 1
        return count

    return following
