# SPDX-License-Identifier: Apache-2.0
"""The report holds every number it was given, nothing from elsewhere, and nothing that a reader's browser would run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_accuracy.cli.main import cli
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.findings import Finding, Level, Outcome, Severity, write_outcome
from neuron_accuracy.report.blocks import blocks_of
from neuron_accuracy.report.elements import Chart, Facts, Group, Table
from neuron_accuracy.report.figures import figure, summary
from neuron_accuracy.report.numbers import cell, label
from neuron_accuracy.report.write import render, write_report

EVIL = '<script>alert("1")</script>&<b onload=x>'
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Parsed(HTMLParser):
    """The page's elements, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag, attrs):
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def of(self, *tags: str) -> list[tuple[str, dict[str, str | None], str]]:
        return [(tag, attrs, "".join(text)) for tag, attrs, text in self.elements if tag in tags]


def outcomes() -> list[Outcome]:
    heat = {
        "title": "Relative L2 error of keys",
        "rows": {"name": "layer", "labels": [0, 1]},
        "columns": {"name": "head", "labels": ["a", "b", "c"]},
        "values": [[1e-7, 2e-7, 3e-7], [0.5, 0.123456789, float("nan")]],
        "limit": 1e-4,
    }
    series = {
        "title": "Where it begins",
        "x": {"name": "layer", "values": [0, 1]},
        "y": {"name": "error"},
        "lines": [{"name": "keys", "values": [1e-7, 0.5]}, {"name": "values", "values": [2e-7, 0.25]}],
        "limit": 1e-4,
    }
    forced = {"token": [0, 1, 2], "error": {"5": [0.1, 0.2, 0.3]}, "mass": [0.9, 0.8, 0.7]}
    return [
        Outcome(
            "compare",
            "Tensors",
            "test",
            "reference",
            [Finding(Level.TENSOR, "diverges", EVIL, "detail " + EVIL, figures={"relative_l2": 0.25})],
            {"modules": [{"module": f"layer.{i}{EVIL}", "relative_l2": 0.001 * i} for i in range(6)]},
        ),
        Outcome("kv", "KV caches", "test", "reference", [], {"heat_maps": [heat], "series": [series]}),
        Outcome(
            "logits",
            "Logits",
            "test",
            EVIL,
            [
                Finding(Level.PROMPT, "beyond limit", "prompt 0", "token 2"),
                Finding(Level.INPUT, "other weights", "test", "digests", Severity.NOTE),
            ],
            {"prompts": [{"prompt": 0, "text": EVIL, "forced": forced}]},
        ),
        Outcome(
            "novel", "A tool of tomorrow", "test", "reference", [], {"deep": {"er": [{"x": [[1, [2]]]}]}}
        ),
    ]


@pytest.fixture(scope="module")
def text() -> str:
    return render(outcomes(), title="A title " + EVIL, about={"model": EVIL, "size_bytes": 1234})


@pytest.fixture(scope="module")
def page(text: str) -> Parsed:
    return Parsed(text)


def test_the_page_is_structured_for_who_listens_or_uses_the_keyboard(page):
    assert page.of("html")[0][1]["lang"] == "en"
    assert page.of("title")[0][2].startswith("Failed: A title")
    assert [len(page.of(tag)) for tag in ("main", "nav", "header", "footer", "h1")] == [1] * 5
    levels = [int(tag[1]) for tag, _, _ in page.of("h1", "h2", "h3", "h4", "h5", "h6")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(attrs.get("scope") in ("col", "row") for _, attrs, _ in page.of("th"))
    assert all(
        "aria-label" in attrs for _, attrs, _ in page.of("div") if attrs.get("role") in ("img", "region")
    )
    first_link = page.of("a")[0]
    assert first_link[1] == {"class": "skip", "href": "#main"}


def test_ids_are_unique_and_every_reference_to_one_resolves(page):
    ids = [attrs["id"] for _, attrs, _ in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs, _ in page.elements:
        for name in ("aria-labelledby", "data-figure"):
            assert attrs.get(name, ids[0]) in ids
        if "href" in attrs and attrs["href"].startswith("#"):
            assert attrs["href"][1:] in ids


def test_nothing_is_fetched_and_only_the_two_scripts_of_the_file_may_run(page):
    for _, attrs, _ in page.elements:
        assert "src" not in attrs and "srcset" not in attrs
        assert attrs.get("href", "#").startswith("#") or attrs["href"] == "data:,"
        assert not any(name.startswith("on") for name in attrs)
    (style,) = (text for _, _, text in page.of("style"))
    assert "url(" not in style and "@import" not in style
    run = [text for _, attrs, text in page.of("script") if attrs.get("type") != "application/json"]
    digests = {"'sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() + "'" for s in run}
    (policy,) = (
        a["content"] for _, a, _ in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules["script-src"].split()) == digests
    assert len(run) == 2
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert rules["img-src"] == "data: blob:"


def test_what_users_give_is_text_and_never_markup(page, text):
    assert '<script>alert("1")' not in text and "<b onload" not in text
    assert not page.of("b")
    assert EVIL in page.of("h1")[0][2]
    said = [text for _, _, text in page.of("td", "th", "p", "dd")]
    assert any(f"layer.3{EVIL}" == item for item in said)
    assert any(item == "detail " + EVIL for item in said)


def test_data_for_scripts_cannot_end_its_element(page, text):
    held = [
        json.loads(body) for _, attrs, body in page.of("script") if attrs.get("type") == "application/json"
    ]
    assert len(held) == text.count('class="chart"') >= 3
    for body in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S):
        assert "<" not in body


def test_every_number_of_a_chart_is_in_a_table(page):
    cells = [text for _, _, text in page.of("td", "th")]
    exact = [attrs["value"] for _, attrs, _ in page.of("data")]
    assert {"1e-7", "0.5", "NaN"} <= set(cells)
    assert "0.123456789" in exact and "0.1235" in cells
    assert {"0.9", "0.8", "0.7", "0.3"} <= set(cells)


def test_the_first_fault_is_prominent_and_levels_go_from_wide_to_narrow(page):
    (first,) = (text for _, attrs, text in page.of("div") if attrs.get("class") == "first")
    assert "diverges" in first and "layer.3" not in first and EVIL in first
    order = [text.split(" ✓")[0].split(" ✕")[0] for tag, _, text in page.of("h2")]
    assert order == ["Overview", "Logits", "KV caches", "Tensors", "A tool of tomorrow"]
    rows = [text.split() for _, _, text in page.of("tr")]
    assert ["Sampling", "not", "examined", "–", "–", "–"] in rows
    assert any(row[:5] == ["Prompt", "✕", "failed", "1", "0"] for row in rows)
    assert any(row[:5] == ["Input", "✓", "passed", "0", "1"] for row in rows)


def test_a_summary_repeats_no_finding_and_what_was_left_out_has_not_passed():
    fault = Finding(Level.KV, "gain", "keys of layer 3", "gain 2.00")
    note = Finding(Level.TASK, "left out", "tasks", "no tasks were named", Severity.NOTE)
    given = [
        Outcome("run", "All levels", "a", "b", [fault, note], {"levels": [{"level": "kv", "seconds": 1.5}]}),
        Outcome("tasks", "Tasks", "a", "b", [note]),
        Outcome("kv", "KV caches", "a", "b", [fault]),
    ]
    page = Parsed(render(given))
    assert any("1 fault in 1 of 1 comparison." in text for _, _, text in page.of("p"))
    assert sum("gain 2.00" in text for _, _, text in page.of("li")) == 1
    assert ["Task", "not", "examined", "–", "–"] in [text.split()[:5] for _, _, text in page.of("tr")]
    (first,) = (text for _, attrs, text in page.of("div") if attrs.get("class") == "first")
    assert "keys of layer 3" in first
    assert "1.5" in [text for _, _, text in page.of("td")]
    alone = Parsed(render(given[:1]))
    assert sum("gain 2.00" in text for _, _, text in alone.of("li")) == 1


@pytest.mark.parametrize(
    ("verdict", "severity", "said", "state"),
    [
        ("failed", Severity.FAULT, "1 fault in 1 of 2 comparisons.", "✕"),
        ("could not be compared", Severity.ERROR, "1 of what was asked for could not be compared.", "could"),
        ("passed", None, "no fault in 2 comparisons.", "✓"),
    ],
)
def test_a_summary_alone_tells_of_the_levels_it_summed_up(verdict, severity, said, state):
    findings = [] if severity is None else [Finding(Level.KV, "gain", "keys of layer 3", "2.00", severity)]
    verdicts = {"task": "left out", "prompt": "passed", "kv": verdict}
    levels = [{"level": level, "verdict": each} for level, each in verdicts.items()]
    page = Parsed(render([Outcome("run", "All levels", "a", "b", findings, {"levels": levels})]))
    assert any(said in text for _, _, text in page.of("p"))
    rows = [text.split()[:2] for _, _, text in page.of("tr")]
    assert ["Prompt", "✓"] in rows and ["Task", "not"] in rows and ["Tensors", "not"] in rows
    assert any(text.split()[:3] == ["KV", "cache", state] for _, _, text in page.of("tr"))


def test_a_page_on_which_nothing_was_compared_says_so():
    page = Parsed(
        render(
            [Outcome("tasks", "Tasks", "a", "b", [Finding(Level.TASK, "left out", "t", "", Severity.NOTE)])]
        )
    )
    assert any(text == "Nothing was compared." for _, _, text in page.of("p"))
    assert not any("Passed" in text for _, _, text in page.of("p", "title"))


def test_modules_in_order_have_a_chart_of_where_errors_begin():
    data = [
        {"name": f"model.layers.{i}.mlp.down_proj:output.0", "rel_l2": 1e-7 * 9**i, "n": i} for i in range(6)
    ]
    (group,) = blocks_of("Modules", data)
    chart, table = group.blocks
    assert isinstance(chart, Chart) and isinstance(table, Table)
    assert chart.lines[0].values == [row["rel_l2"] for row in data]
    axis = figure(chart)["layout"]["xaxis"]
    assert axis["ticktext"][0] == "….0.mlp.down_proj:output.0"[-23:].rjust(24, "…")
    assert [row[0].text for row in table.rows] == [row["name"] for row in data]


def test_lists_of_one_record_that_belong_together_are_one_chart():
    record = {"request": "r", "positions": [*range(4, 24)], "rel_l2": [0.5] * 20}
    (group,) = blocks_of("Series", [record])
    (inner,) = group.blocks
    assert inner.title == "r"
    (chart,) = inner.blocks
    assert (chart.x, chart.xs, [line.name for line in chart.lines]) == (
        "positions",
        [*range(4, 24)],
        ["rel L2"],
    )


def test_no_chart_has_more_lines_than_can_be_told_apart():
    columns = {f"c{i}": [0.1 * i, 0.2, 0.3] for i in range(8)} | {"error": {"5": [1.0, 2.0, 3.0]}}
    charts = blocks_of("Forced", {"token": [0, 1, 2], **columns})
    assert [len(chart.lines) for chart in charts] == [6, 2, 1]
    assert charts[2].title == "Forced: error" and charts[2].lines[0].name == "5"
    drawn = figure(charts[0])["data"]
    assert len({(t["line"]["color"], t["line"]["dash"], t["marker"]["symbol"]) for t in drawn}) == 6


def test_mappings_of_the_same_keys_are_a_table():
    (table,) = blocks_of(
        "Limits", {"float32": {"head": 1e-4, "row": 3e-4}, "bfloat16": {"head": 0.05, "row": 0.15}}
    )
    assert table.columns == ["", "head", "row"]
    assert [[shown.text for shown in row] for row in table.rows] == [
        ["float32", "1e-4", "3e-4"],
        ["bfloat16", "0.05", "0.15"],
    ]


def test_small_mappings_of_records_are_columns():
    (table,) = blocks_of("", [{"name": "a", "ulps": {"0": 5, "1": 7}}, {"name": "b", "ulps": None}])
    assert table.columns == ["name", "ulps: 0", "ulps: 1", "ulps"]
    assert [shown.text for shown in table.rows[0]] == ["a", "5", "7", ""]


def test_a_run_without_faults_passes():
    page = Parsed(render([Outcome("kv", "KV caches", "a", "b")]))
    assert page.of("title")[0][2] == "Passed: Accuracy report"
    assert any("no fault in 1 comparison." in text for _, _, text in page.of("p"))
    assert not [attrs for _, attrs, _ in page.of("div") if attrs.get("class") == "first"]


def _cells(blocks):
    for block in blocks:
        if isinstance(block, Facts):
            yield from ((name, shown) for name, shown in block.items)
        elif isinstance(block, Table):
            yield from ((block.title, shown) for row in block.rows for shown in row)
            yield from ((name, None) for name in block.columns)
        elif isinstance(block, Chart):
            yield from _cells([block.table])
            yield from block.others
        else:
            yield (block.title, None)
            yield from _cells(block.blocks)


def _leaves(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(-1e6, 1e6)
    | st.text("xyz", min_size=3)
)
names = st.sampled_from(
    ["alpha", "beta", "values", "rows", "columns", "lines", "x", "y", "name", "limit", "title"]
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.dictionaries(names, inner, max_size=5)
        | st.lists(st.dictionaries(names, inner, max_size=3), max_size=3)
        | st.lists(st.lists(st.floats(-9, 9), min_size=3, max_size=3), max_size=4)
    ),
    max_leaves=40,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, trees, min_size=1))
def test_nothing_of_any_data_is_dropped(data):
    shown = list(_cells(blocks_of("", data)))
    text = "\n".join(str(part) for name, c in shown for part in (name, c and c.text, c and c.exact))
    for leaf in _leaves(data):
        wanted = cell(leaf)
        assert (wanted.exact or wanted.text) in text or wanted.text in text or str(leaf) in text, leaf


@given(st.floats(-1e300, 1e300))
def test_a_rounded_number_is_right_to_four_digits_and_keeps_the_exact_one(value):
    shown = cell(value)
    assert shown.number
    assert float(shown.text) == pytest.approx(value, rel=5.1e-4)
    assert float(shown.exact or shown.text) == value


def test_names_are_words_with_units():
    assert label("relative_l2") == "relative L2"
    assert label("model.self_attn") == "model.self_attn"
    assert label("worst: rel_l2") == "worst: rel L2"
    assert label("size_bytes") == "size (bytes)"
    assert cell(True).text == "yes" and not cell(True).number
    assert cell("nan").number and cell(float("inf")).text == "∞"


def test_a_heat_map_draws_errors_by_magnitude_and_marks_those_above_the_limit():
    (chart,) = blocks_of("", outcomes()[1].data["heat_maps"][0])
    trace = figure(chart)["data"][0]
    assert trace["z"][0] == pytest.approx([-7, math.log10(2e-7), math.log10(3e-7)])
    assert trace["z"][1][2] is None
    assert trace["text"] == [["", "", ""], ["✕", "✕", ""]]
    assert trace["customdata"][1][1] == "0.1235"
    assert "2 of 5 above the limit of 0.0001" in summary(chart)
    assert [(name, shown.text) for name, shown in chart.others] == [("limit", "1e-4")]


def test_a_heat_map_that_says_so_is_linear():
    (chart,) = blocks_of("", outcomes()[1].data["heat_maps"][0] | {"scale": "linear"})
    assert figure(chart)["data"][0]["z"][1][0] == 0.5


def test_a_series_is_drawn_as_it_is_with_its_limit():
    (chart,) = blocks_of("", outcomes()[1].data["series"][0])
    drawn = figure(chart)
    assert [trace["y"] for trace in drawn["data"]] == [[1e-7, 0.5], [2e-7, 0.25]]
    assert len({trace["line"]["dash"] for trace in drawn["data"]}) == 2
    assert drawn["layout"]["shapes"][0]["y0"] == 1e-4
    assert drawn["layout"]["annotations"][0]["y"] == pytest.approx(-4)
    assert drawn["layout"]["yaxis"]["type"] == "log"


def test_markup_in_a_chart_is_text():
    data = {"x": {"name": EVIL, "values": [0, 1]}, "lines": [{"name": EVIL, "values": [1, 2]}], "title": EVIL}
    (chart,) = blocks_of("", data)
    drawn = figure(chart)
    assert "<" not in drawn["data"][0]["name"] and "<" not in drawn["layout"]["xaxis"]["title"]["text"]


def test_no_outcomes_are_refused(tmp_path):
    with pytest.raises(AccuracyError, match="no outcome to report"):
        write_report([], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AccuracyError, match="cannot be written"):
        write_report(outcomes(), tmp_path / "file" / "report.html")


def run(*words: str | Path):
    return CliRunner().invoke(cli, ["report", *map(str, words)])


def test_the_command_writes_one_file_and_exits_with_the_verdict(tmp_path):
    paths = [tmp_path / f"{outcome.tool}.json" for outcome in outcomes()]
    for outcome, path in zip(outcomes(), paths, strict=True):
        write_outcome(outcome, path)
    failed = run(*paths, "-o", tmp_path / "report.html", "--title", "Nightly")
    assert failed.exit_code == 1 and "failed: 2 faults" in failed.output
    assert "<title>Failed: Nightly</title>" in (tmp_path / "report.html").read_text()
    passed = run(paths[1], "-o", tmp_path / "passed.html")
    assert passed.exit_code == 0 and "passed" in passed.output


def test_what_could_not_be_compared_is_no_pass_and_a_fault_beside_it_is_one(tmp_path):
    error = Outcome(
        "kv", "KV", "a", "b", [Finding(Level.KV, "could not be compared", "kv", "x", Severity.ERROR)]
    )
    write_outcome(error, tmp_path / "kv.json")
    write_outcome(outcomes()[0], tmp_path / "compare.json")
    alone = run(tmp_path / "kv.json", "-o", tmp_path / "report.html")
    assert alone.exit_code == 2 and "not all could be compared" in alone.output
    assert "<title>Not compared:" in (tmp_path / "report.html").read_text()
    both = run(tmp_path / "kv.json", tmp_path / "compare.json", "-o", tmp_path / "report.html")
    assert both.exit_code == 1


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": "other"}', '{"format": "neuron-accuracy-outcome/1"}', None]
)
def test_a_file_that_is_no_outcome_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    outcome = run(path, "-o", tmp_path / "report.html")
    assert isinstance(outcome.exception, AccuracyError) and str(path) in str(outcome.exception)
    assert not (tmp_path / "report.html").exists()


def test_the_command_wants_at_least_one_outcome(tmp_path):
    assert run("-o", tmp_path / "report.html").exit_code == 2


def test_a_group_within_a_group_is_kept():
    (group,) = blocks_of("prompts", [{"title": "first", "heat": [[1.0, 2.0], [3.0, 4.0]]}])
    assert isinstance(group, Group)
    (inner,) = group.blocks
    assert isinstance(inner, Group) and inner.title == "first"
    assert isinstance(inner.blocks[0], Chart) and inner.blocks[0].cells == [[1.0, 2.0], [3.0, 4.0]]
