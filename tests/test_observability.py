# SPDX-License-Identifier: Apache-2.0
"""The dashboard and the alerts read series that are exported, with the labels they have."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry

import demo
import doc_blocks
from doc_blocks import ROOT
from neuron_core.metrics import NeuronMetrics
from promql_labels import Checker, Series, names_in, parsed, series_of

PAGE = ROOT / "docs" / "observability.md"
FOLDER = ROOT / "docs" / "observability"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
RULE_TESTS = Path(__file__).with_name("alerts.test.yaml")
UNSHOWN: dict[str, str] = {}
"""Series of ours without a panel, with the reason."""

GRAFANA = ("$__rate_interval", "$__range")
VLLM_TIMEOUT_S = 120
ALERT_LABELS = {"alertname", "alertstate", "severity"}

VLLM_PAGE = """
import json, sys
from pathlib import Path
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

if __name__ == "__main__":
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="float32")
    Path("config.json").write_text(json.dumps(config | sizes | heads))
    engine = EngineArgs(model=".", served_model_name="m", skip_tokenizer_init=True).create_engine_config()
    PrometheusStatLogger(engine).record(SchedulerStats(), IterationStats())
    app = FastAPI()
    app.add_api_route("/v1/fails", lambda: 1 / 0)
    attach_router(app)
    client = TestClient(app, raise_server_exceptions=False)
    client.get("/v1/fails")
    Path("metrics.txt").write_text(client.get("/metrics").text)
"""


def own_series() -> dict[str, Series]:
    """Every name of `NeuronMetrics`, also of those that have recorded nothing."""
    registry = CollectorRegistry()
    NeuronMetrics("m", 0, registry)
    found = {}
    # The registry has no public way to ask for the labels of a series without values.
    for collector in registry._collector_to_names:
        (family,) = collector.describe()
        labels = frozenset(collector._labelnames)
        if family.type == "gauge":
            found[family.name] = Series(False, labels)
        elif family.type == "counter":
            found[f"{family.name}_total"] = Series(True, labels)
        else:
            assert family.type == "histogram", family.type
            found |= {f"{family.name}_{end}": Series(True, labels) for end in ("sum", "count")}
            found[f"{family.name}_bucket"] = Series(True, labels | {"le"})
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Series]:
    """Our series, those that this vLLM registers and answers at `/metrics`, and Prometheus' own."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "page.py").write_text(VLLM_PAGE)
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=VLLM_TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    alerts = Series(False, frozenset(ALERT_LABELS))
    return {
        **series_of((folder / "metrics.txt").read_text()),
        **own_series(),
        "up": Series(False, frozenset()),
        "ALERTS": alerts,
    }


TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("panel", "target"), TARGETS, ids=[f"{p['title']} {t['refId']}" for p, t in TARGETS])
def test_a_panel_reads_what_is_exported(panel: Any, target: Any, exported: dict[str, Series]) -> None:
    labels = Checker(exported).labels(parsed(target["expr"]))
    assert labels is not None
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_reads_what_is_exported(rule: Any, exported: dict[str, Series]) -> None:
    labels = Checker(exported).labels(promql.parse(rule["expr"]))
    assert labels is not None
    text = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("vllm_neuron:kv_blocks", "nothing exports"),
        ('vllm_neuron:kv_blocks_free{bucket_name="x"}', "no label bucket_name"),
        ('vllm:request_success_total{finished_reason="eof"}', "no finished_reason eof"),
        ("rate(vllm_neuron:kv_blocks_free[5m])", "not a counter"),
        ("deriv(vllm_neuron:preemptions_total[5m])", "is a counter"),
        ("sum by (engine) (vllm_neuron:kv_blocks_free)", "no label"),
        ("vllm_neuron:kv_blocks_free and vllm:num_requests_running", "never match"),
        ("vllm_neuron:kv_blocks_free and on (engine) vllm:num_requests_running", "does not have"),
        ("histogram_quantile(0.5, rate(vllm_neuron:host_gap_seconds_sum[5m]))", "without le"),
        ("rate(vllm_neuron:preemptions_total)", "expected"),
        ("sum by (job (up)", "unclosed"),
    ],
)
def test_a_wrong_expression_is_found(expr: str, complaint: str, exported: dict[str, Series]) -> None:
    with pytest.raises(ValueError, match=complaint):
        Checker(exported).labels(parsed(expr))


def test_every_series_of_ours_has_a_panel() -> None:
    shown = set().union(*(names_in(target["expr"]) for _, target in TARGETS))
    ending = re.compile(r"_(bucket|sum|count)$")
    histograms = {
        ending.sub("", name) for name in own_series() if f"{ending.sub('', name)}_bucket" in own_series()
    }
    families = {ending.sub("", name) if ending.sub("", name) in histograms else name for name in own_series()}
    unshown = {
        name for name in families if not shown & {name, f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    }
    assert unshown == UNSHOWN.keys()


def test_the_dashboard_is_whole() -> None:
    declared = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    text = json.dumps(DASHBOARD)
    for name in GRAFANA:
        text = text.replace(name, "")
    assert set(re.findall(r"\$\{?([a-z]\w*)", text)) == set(declared)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    places: Counter[tuple[int, int]] = Counter()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        places.update(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
    assert max(places.values()) == 1, "two panels in one place"
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["targets"]
        sources = {item["datasource"]["uid"] for item in (panel, *panel["targets"])}
        assert sources == {"${datasource}"}, panel["title"]


def test_the_variables_of_the_dashboard_read_what_is_exported(exported: dict[str, Series]) -> None:
    queries = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    assert len(queries) == 3
    for query in queries:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert match and match[2] in Checker(exported).labels(promql.parse(match[1])), query


def scrape_config() -> dict[str, Any]:
    (block,) = (block for block in doc_blocks.blocks(PAGE) if block.language == "yaml")
    return yaml.safe_load(block.source)


def test_every_selector_of_a_rule_names_the_job_of_the_page() -> None:
    (job,) = (entry["job_name"] for entry in scrape_config()["scrape_configs"])
    for rule in RULES:
        selectors = re.findall(r"(?:vllm|vllm_neuron):\w+|\bup\b|\bhttp_\w+", rule["expr"])
        assert len(selectors) == rule["expr"].count(f'job="{job}"'), rule["alert"]


def test_the_page_says_what_each_alert_means_and_only_those() -> None:
    headings = re.findall(r"^### (VllmNeuron\w+)$", PAGE.read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"{PAGE.name}#{rule['alert'].lower()}"


def test_every_alert_is_tested_firing_and_silent() -> None:
    cases = [
        case for test in yaml.safe_load(RULE_TESTS.read_text())["tests"] for case in test["alert_rule_test"]
    ]
    for outcome in (True, False):
        names = {case["alertname"] for case in cases if bool(case.get("exp_alerts")) == outcome}
        assert names == {rule["alert"] for rule in RULES}, "firing" if outcome else "silent"


def program(name: str) -> str:
    """A program of the Debian package `prometheus` on PATH; the test is skipped where there is none."""
    return shutil.which(name) or pytest.skip(f"no {name} on PATH; {PAGE.name} says where to get it")


def promtool(*words: object, folder: Path = ROOT) -> None:
    command = [program("promtool"), *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def write_config(folder: Path, **changed: Any) -> Path:
    """The page's configuration in a file, with the rules beside it."""
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(scrape_config() | changed))
    shutil.copy(FOLDER / "alerts.yaml", folder)
    return path


def test_promtool_accepts_the_rules_and_the_config_of_the_page(tmp_path: Path) -> None:
    promtool("check", "rules", FOLDER / "alerts.yaml")
    promtool("check", "config", write_config(tmp_path))


def test_promtool_fires_each_alert_when_it_should() -> None:
    promtool("test", "rules", RULE_TESTS)


@contextlib.contextmanager
def prometheus(folder: Path, server: str) -> Iterator[Callable[..., Any]]:
    """A real Prometheus that scrapes ``server`` every second; gives a function that asks its API."""
    (job,) = scrape_config()["scrape_configs"]
    job["static_configs"] = [{"targets": [server.removeprefix("http://")]}]
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = write_config(folder, **{"global": every, "scrape_configs": [job]})
    address = f"127.0.0.1:{demo.free_port()}"
    words = [f"--config.file={config}", f"--web.listen-address={address}", f"--storage.tsdb.path={folder}/db"]

    def ask(what: str, **parameters: str) -> Any:
        url = f"http://{address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    with subprocess.Popen([program("prometheus"), *words], stderr=subprocess.DEVNULL) as process:
        try:
            yield ask
        finally:
            process.terminate()


def until(what: Callable[[], Any], timeout_s: float = 60) -> Any:
    """What ``what`` returns, once it is true; an address that refuses to be asked counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found := what():
                return found
        time.sleep(0.5)
    return None


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_real_prometheus_runs_the_rules_and_draws_the_panels_of_a_real_server(tmp_path: Path) -> None:
    """Each panel has data whose series the server exports after some answers."""
    program("prometheus")
    with (
        demo.server(demo.prepare_model(tmp_path), tmp_path / "server.log") as server,
        prometheus(tmp_path, server) as ask,
    ):
        assert until(lambda: any(t["health"] == "up" for t in ask("targets")["activeTargets"]))
        for question in ("What is the capital of France?", "Name three colours.", "Count to ten."):
            demo.ask(server, question)
        groups = until(lambda: all(g["lastEvaluation"] > "1" for g in ask("rules")["groups"])) and ask(
            "rules"
        )
        health = {r["name"]: r["health"] for g in groups["groups"] for r in g["rules"]}
        assert health == {rule["alert"]: "ok" for rule in RULES}
        exported = {"up", *series_of(urllib.request.urlopen(f"{server}/metrics").read().decode())}
        for panel, target in TARGETS:
            query = re.sub(r"\$(job|instance|model_name)", ".+", target["expr"]).replace(
                "$__rate_interval", "5m"
            )
            names = names_in(query)
            if names <= exported:
                assert until(lambda query=query: ask("query", query=query)["result"]), panel["title"]
            else:
                ask("query", query=query)
                assert names - exported <= {"ALERTS", *own_series()}, panel["title"]
