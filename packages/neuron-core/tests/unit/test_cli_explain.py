# SPDX-License-Identifier: Apache-2.0
"""`neuron cache explain`: whatever changes a key is named, and nothing else is."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from neuron_core.cli.difference import changed_values
from neuron_core.cli.main import neuron
from neuron_core.graphs.build import GraphBuilder
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.key import GraphKey, register_op_sources
from neuron_core.graphs.program import Part, Program

SOURCES = {"neuron_cli_test::double": "1"}
_library = torch.library.Library("neuron_cli_test", "FRAGMENT")
_library.define("double(Tensor x) -> Tensor")
_library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
_library.impl("double", torch.empty_like, "Meta")
register_op_sources("neuron_cli_test", lambda name: SOURCES[name])


class Layer(nn.Module):
    def __init__(self, *, relu: bool = False, double: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.relu = relu
        self.double = double

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x)
        x = torch.relu(x) if self.relu else x
        return torch.ops.neuron_cli_test.double(x) if self.double else x


class FlaggedCompiler(FxCompiler):
    def flags(self) -> dict[str, str]:
        return {"optlevel": "3"}


class FarCompiler(FxCompiler):
    def target(self) -> str:
        return "x86_64 with " + " ".join(f"feature{index}" for index in range(40)) + " amx"


class NearCompiler(FxCompiler):
    def target(self) -> str:
        return "x86_64 with " + " ".join(f"feature{index}" for index in range(40)) + " avx"


def build(root: Path, module: nn.Module, rows: int = 2, compiler: FxCompiler | None = None) -> str:
    """Compile one part for real; returns its key."""
    device = SimpleNamespace(name="cpu", torch_device=torch.device("cpu"))
    builder = GraphBuilder(device, compiler or FxCompiler(), CompileCache(root))
    program = Program((Part("layer", module, ("x",), ("x",)),), ("x",))
    builder.build(program, {"x": ((rows, 4), torch.float32)}, bucket=f"decode_b{rows}")
    builder.close()
    (job,) = builder._graphs
    return job


def explain(root: Path, *keys: str, as_json: bool = False) -> str:
    done = CliRunner().invoke(
        neuron, ["cache", "explain", *keys, "--cache-dir", str(root), *(["--json"] if as_json else [])]
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def named(root: Path, first: str, second: str) -> dict[str, dict]:
    report = json.loads(explain(root, first, second, as_json=True))
    found = {each["component"]: each for each in report["differences"]}
    manifests = [json.loads((root / "graphs" / key / "manifest.json").read_text()) for key in (first, second)]
    keys = [GraphKey.of(manifest["components"]) for manifest in manifests]
    assert tuple(sorted(found)) == keys[0].differences(keys[1])
    assert set(report["equal"]) == manifests[0]["components"].keys() - found.keys()
    return found


def test_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    first, second = build(tmp_path, Layer(), rows=2), build(tmp_path, Layer(), rows=3)
    found = named(tmp_path, first, second)
    assert list(found) == ["inputs"]
    assert found["inputs"]["changes"] == ["[2].shape: [2, 4] → [3, 4]"]


def test_another_graph_is_shown_as_a_diff(tmp_path: Path) -> None:
    first, second = build(tmp_path, Layer()), build(tmp_path, Layer(relu=True))
    found = named(tmp_path, first, second)
    assert list(found) == ["graph"]
    diff = found["graph"]["diff"]
    assert diff[:2] == [f"--- {first[:12]}", f"+++ {second[:12]}"]
    (added,) = [line for line in diff if line.startswith("+") and "relu" in line]
    texts = [(tmp_path / "graphs" / key / "graph.txt").read_text() for key in (first, second)]
    assert added[1:] in texts[1].splitlines() and added[1:] not in texts[0].splitlines()
    assert added in explain(tmp_path, first[:8], second[:8])


def test_without_the_text_of_both_graphs_that_is_said(tmp_path: Path) -> None:
    first, second = build(tmp_path, Layer()), build(tmp_path, Layer(relu=True))
    (tmp_path / "graphs" / first / "graph.txt").unlink()
    found = named(tmp_path, first, second)
    assert found["graph"]["diff"] == [] and "graph.txt" in found["graph"]["changes"][0]


def test_another_flag_and_another_target_are_named(tmp_path: Path) -> None:
    plain = build(tmp_path, Layer())
    flagged = build(tmp_path, Layer(), compiler=FlaggedCompiler())
    assert named(tmp_path, plain, flagged)["compiler"]["changes"] == ["flags.optlevel: 3, only in the second"]
    far, near = (build(tmp_path, Layer(), compiler=each) for each in (FarCompiler(), NearCompiler()))
    changes = named(tmp_path, far, near)["target"]["changes"]
    assert changes == ["only in the first: amx", "only in the second: avx"]


def test_the_operators_whose_source_changed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build(tmp_path, Layer(double=True))
    monkeypatch.setitem(SOURCES, "neuron_cli_test::double", "2")
    found = named(tmp_path, before, build(tmp_path, Layer(double=True)))
    assert list(found) == ["op_sources"]
    assert found["op_sources"]["changes"] == ["neuron_cli_test::double: its source is another (1 → 2)"]
    found = named(tmp_path, before, build(tmp_path, Layer()))
    assert found["op_sources"]["changes"] == ["neuron_cli_test::double: only reached by the first"]


def test_the_same_key_is_said_to_be_the_same(tmp_path: Path) -> None:
    key = build(tmp_path, Layer())
    assert "the same key" in explain(tmp_path, key, key[:6])
    assert json.loads(explain(tmp_path, key, key, as_json=True))["differences"] == []


def test_one_key_shows_every_component(tmp_path: Path) -> None:
    key = build(tmp_path, Layer())
    manifest = json.loads((tmp_path / "graphs" / key / "manifest.json").read_text())
    shown = json.loads(explain(tmp_path, key, as_json=True))
    assert shown["key"] == key and shown["components"] == manifest["components"]
    assert shown["facts"]["inputs"][2]["shape"] == [2, 4]
    text = explain(tmp_path, key)
    for name, digest in manifest["components"].items():
        assert any(name in line and digest[:12] in line for line in text.splitlines())


def test_an_entry_without_facts_is_explained_by_its_hashes(tmp_path: Path) -> None:
    first, second = build(tmp_path, Layer(), rows=2), build(tmp_path, Layer(), rows=3)
    path = tmp_path / "graphs" / first / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["key_facts"]
    path.write_text(json.dumps(manifest))
    assert "only the hashes are known" in named(tmp_path, first, second)["inputs"]["changes"][0]


def test_a_damaged_entry_and_too_many_keys_are_errors(tmp_path: Path) -> None:
    key = build(tmp_path, Layer())
    (tmp_path / "graphs" / key / "manifest.json").write_text("[]")
    done = CliRunner().invoke(neuron, ["cache", "explain", key, "--cache-dir", str(tmp_path)])
    assert done.exit_code == 1 and "neuron cache verify" in done.stderr
    done = CliRunner().invoke(neuron, ["cache", "explain", "a", "b", "c", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 2
    shutil.rmtree(tmp_path / "graphs" / key)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text("ab ", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values, json_values)
def test_values_have_no_changes_exactly_when_they_are_equal(before, after) -> None:
    same = json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)
    assert (changed_values(before, after) == []) == same
    assert changed_values(before, before) == []
