# SPDX-License-Identifier: Apache-2.0
"""The report in a real Chromium: light, dark, narrow, printed, by keyboard, and without scripts.

Debian's package `chromium` is enough; playwright drives it and brings no browser of its own here.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from neuron_accuracy.findings import Finding, Level, Outcome, Severity
from neuron_accuracy.report.write import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome")
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
LONG = "model.layers.11.self_attn.a_projection_with_a_name_that_is_longer_than_any_window_is_wide<script>"

each_view = pytest.mark.parametrize("view", [LAPTOP, PHONE], ids=["laptop", "narrow"])
each_scheme = pytest.mark.parametrize("scheme", ["light", "dark"])


def outcomes() -> list[Outcome]:
    def heat(title: str) -> dict[str, object]:
        values = [[10.0 ** (-7 + 6 * (layer > 5) + head / 9) for head in range(8)] for layer in range(12)]
        return {
            "title": title,
            "rows": {"name": "layer", "labels": [*range(12)]},
            "columns": {"name": "head", "labels": [*range(8)]},
            "values": values,
            "limit": 1e-4,
        }

    series = {
        "title": "Where it begins",
        "x": {"name": "layer", "values": [*range(12)]},
        "y": {"name": "relative error"},
        "lines": [
            {"name": name, "values": [10.0 ** (i - 9) for i in range(12)]} for name in ("keys", "values")
        ],
        "limit": 1e-4,
    }
    modules = [
        {"module": f"{LONG}.{i}", "relative_l2": 1e-7 * 3**i, "cosine": 1 - 1e-7 * 3**i} for i in range(20)
    ]
    forced = {
        "token": [*range(64)],
        "error": {"top 5": [math.exp(i / 9) / 1e4 for i in range(64)]},
        "mass": [0.9] * 64,
    }
    return [
        Outcome(
            "kv",
            "KV caches",
            "vllm-neuron:model (bfloat16, tp=2)",
            "transformers:model (float32)",
            [
                Finding(
                    Level.KV, "gain", "keys of layer 6", "gain 2.00", figures={"gain": 2.0, "residual": 1e-7}
                ),
                Finding(Level.KV, "follows", "layers 7-11", "do not agree either", Severity.NOTE),
            ],
            {
                "series": [series],
                "heat_maps": [heat("Relative L2 error of keys"), heat("Relative L2 error of values")],
                "prompts": [{"title": "Request 0", "heat_maps": [heat("Keys")]}],
            },
        ),
        Outcome("compare", "Tensors", "test", "reference", [], {"modules": modules}),
        Outcome(
            "logits",
            "Logits",
            "test",
            "reference",
            [],
            {"prompts": [{"prompt": 0, "text": "A.", "forced": forced}]},
        ),
    ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(f"no browser: none of {', '.join(NAMES)} is on the PATH; apt-get install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(outcomes(), path, title="Two ranks against one", about={"model": "tiny", "seeds": 10})
    return path


class Watched:
    """A page, and all that it says and asks for."""

    def __init__(self, browser: Browser, report: Path, **options) -> None:
        self.page: Page = browser.new_page(**options)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(report.as_uri())

    def scroll_through(self) -> None:
        self.page.evaluate("document.querySelectorAll('details.group').forEach((d) => { d.open = true; })")
        for place in range(0, self.page.evaluate("document.documentElement.scrollHeight") + 800, 400):
            self.page.evaluate(f"scrollTo(0, {place})")
            self.page.wait_for_timeout(30)
        self.page.wait_for_function(
            "[...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('svg'))"
        )
        self.page.evaluate("scrollTo(0, 0)")


@each_view
@each_scheme
def test_everything_is_drawn_without_an_error_a_request_or_an_overflow(
    browser, report, tmp_path, view, scheme
):
    watched = Watched(browser, report, viewport=view, color_scheme=scheme)
    watched.scroll_through()
    page = watched.page
    assert watched.said == []
    assert [url for url in watched.asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= view["width"]
    drawn = page.evaluate(
        "[...document.querySelectorAll('.chart')].map((chart) => chart.querySelectorAll('.trace, .hm').length)"
    )
    assert len(drawn) == 7 and all(drawn)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.removeprefix("rgb(").removesuffix(")").split(","))) > 384) is (
        scheme == "light"
    )
    page.screenshot(path=tmp_path / f"{scheme}-{view['width']}.png", full_page=True)
    page.close()


@each_scheme
def test_text_stands_out_from_what_is_behind_it(browser, report, scheme):
    watched = Watched(browser, report, viewport=LAPTOP, color_scheme=scheme)
    watched.scroll_through()
    for first, second in (
        ("--ink", "--paper"),
        ("--soft", "--band"),
        ("--link", "--paper"),
        ("--fault", "--fault-band"),
    ):
        assert _contrast(_colour(watched.page, first), _colour(watched.page, second)) >= 4.5, (first, second)
    fills = watched.page.evaluate(
        "[...document.querySelectorAll('.chart .xtick text, .chart .legendtext')].map((t) => getComputedStyle(t).fill)"
    )
    ink = watched.page.evaluate("getComputedStyle(document.body).color")
    assert fills and set(fills) == {ink}
    watched.page.close()


def _colour(page: Page, name: str) -> list[float]:
    code = page.evaluate(
        f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()"
    ).lstrip("#")
    return [int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)]


def _contrast(first: list[float], second: list[float]) -> float:
    """As WCAG 2.2 defines it."""

    def luminance(colour: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_the_button_switches_colours_and_says_what_it_will_do(browser, report):
    page = Watched(browser, report, viewport=LAPTOP, color_scheme="light").page
    button = page.get_by_role("button", name="Switch to dark colours")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    button.click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == before
    page.close()


CONTROLS = "a[href], button, summary, [tabindex='0']"


@each_view
def test_the_keyboard_reaches_every_control_in_order_and_shows_where_it_is(browser, report, view):
    page = Watched(browser, report, viewport=view).page
    wanted = page.evaluate(
        f'[...document.querySelectorAll("{CONTROLS}")].filter((element) => element.checkVisibility())'
        ".map((element, place) => (element.dataset.nth = place))"
    )
    reached, unseen = [], []
    for _ in wanted:
        page.keyboard.press("Tab")
        nth, outline = page.evaluate(
            "[document.activeElement.dataset.nth, getComputedStyle(document.activeElement).outlineStyle]"
        )
        reached.append(int(nth))
        if outline == "none":
            unseen.append(nth)
    assert reached == wanted and not unseen
    page.close()


def test_the_skip_link_leads_past_the_navigation(browser, report):
    page = Watched(browser, report, viewport=LAPTOP).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
    page.close()


def test_a_summary_opens_by_keyboard_the_numbers_of_its_chart(browser, report):
    page = Watched(browser, report, viewport=LAPTOP).page
    summary = page.locator("#outcome-2 figure summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#outcome-2 figure table").first.is_visible()
    page.close()


def test_the_accessibility_tree_names_charts_and_regions(browser, report):
    page = Watched(browser, report, viewport=LAPTOP).page
    assert page.get_by_role("main").count() == page.get_by_role("navigation").count() == 1
    images = page.get_by_role("img", name="Heat map: Relative L2 error of keys; layer by head")
    assert images.count() == 1
    assert "above the limit of 0.0001" in images.get_attribute("aria-label")
    page.close()


@each_scheme
def test_printing_is_light_complete_and_fits_the_paper(browser, report, tmp_path, scheme):
    watched = Watched(browser, report, viewport=LAPTOP, color_scheme=scheme)
    page = watched.page
    page.pdf(path=tmp_path / "report.pdf", format="A4", prefer_css_page_size=True)
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
    page.set_viewport_size({"width": 680, "height": 960})  # A4 within its margins
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_timeout(300)
    page.screenshot(path=tmp_path / "print.png", full_page=True)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg'))")
    widest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.chart svg')].map((s) => s.getBoundingClientRect().right))"
    )
    assert widest <= 680
    assert page.evaluate("document.documentElement.scrollWidth") <= 680
    assert page.evaluate("[...document.querySelectorAll('details.group')].every((d) => d.open)")
    assert not page.get_by_role("button").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.evaluate("[...document.querySelectorAll('details.group')].every((d) => d.open)")
    page.emulate_media(media="screen", color_scheme=scheme)
    watched.scroll_through()
    assert watched.said == []
    page.close()


def test_tables_are_read_without_scripts_on_screen_and_paper(browser, report):
    page = browser.new_page(java_script_enabled=False, viewport=LAPTOP)
    page.goto(report.as_uri())
    assert not page.get_by_role("button").is_visible()
    page.locator("#outcome-2 figure summary").first.click()
    assert page.locator("#outcome-2 figure table").first.is_visible()
    page.emulate_media(media="print")
    assert page.locator("figure table").last.is_visible()
    page.close()
