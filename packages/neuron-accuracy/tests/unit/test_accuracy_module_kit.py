# SPDX-License-Identifier: Apache-2.0
"""`assert_module_close` passes what rounds as the reference does, and fails what errs more, with a table."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from neuron_accuracy.compare.limits import Gates
from neuron_accuracy.errors import AccuracyError
from neuron_accuracy.testing.gates import three_way
from neuron_accuracy.testing.modules import assert_module_close

BF16 = torch.bfloat16


def rows(generator):
    return torch.randn(64, 32, generator=generator)


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(32, 48).to(BF16)


def noisy(linear, scale, seeds=None):
    """The reference and noise of so many times its own rounding error."""
    generator = torch.Generator().manual_seed(7)
    calls = []

    def run(x):
        calls.append(x)
        wide = nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float())
        out = linear(x)
        if seeds is None or len(calls) - 1 in seeds:
            out = wide + scale * (out - wide).square().mean().sqrt() * torch.randn(
                out.shape, generator=generator
            )
        return out

    return run


def test_the_reference_itself_passes_with_figures_of_equality(linear):
    (verdict,) = assert_module_close(linear, linear, rows, dtype=BF16)
    assert (verdict.bc, verdict.sigma, verdict.l2_ratio, verdict.linf_ratio) == (1.0, 1.0, 1.0, 1.0)
    assert len(verdict.samples) == 10


def test_a_more_accurate_module_passes(linear):
    wide = nn.Linear(32, 48)
    wide.load_state_dict(linear.state_dict())
    (verdict,) = assert_module_close(lambda x: wide(x.float()), linear, rows, dtype=BF16)
    assert verdict.sigma < 0.1


@pytest.mark.parametrize(("scale", "seeds"), [(1.5, None), (4.0, {3}), (20.0, {3})])
def test_a_module_that_errs_more_fails_with_a_table(linear, scale, seeds):
    with pytest.raises(AssertionError) as caught:
        assert_module_close(noisy(linear, scale, seeds), linear, rows, dtype=BF16)
    text = str(caught.value)
    assert "FAILS output" in text
    assert "(BC >= 0.99 or sigma <= 1.0) and L-inf ratio < 5.0 and L2 ratio < 3.0" in text
    if seeds:
        assert "worst 3" in text


@pytest.mark.parametrize(
    ("figures", "passes"),
    [
        ((0.99, 9.0, 4.9, 2.9), True),
        ((0.5, 1.0, 4.9, 2.9), True),
        ((0.98, 1.01, 1.0, 1.0), False),
        ((1.0, 0.5, 5.0, 1.0), False),
        ((1.0, 0.5, 1.0, 3.0), False),
        ((float("nan"), float("nan"), 1.0, 1.0), False),
        ((1.0, 0.5, float("nan"), 1.0), False),
    ],
)
def test_the_published_gates(figures, passes):
    assert Gates().passes(*figures) is passes


def test_what_is_not_finite_fails(linear):
    def spoilt(x):
        out = linear(x).clone()
        out[0, 0] = torch.nan
        return out

    with pytest.raises(AssertionError, match="FAILS output"):
        assert_module_close(spoilt, linear, rows, dtype=BF16, seeds=2)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 8), nn.Linear(32, 4)

    def forward(self, x, scale):
        return {"a": self.first(x) * scale, "b": (self.second(x), None)}


def test_each_output_is_judged_apart():
    torch.manual_seed(0)
    module = Two().to(BF16)

    def inputs(generator):
        return {"x": rows(generator), "scale": torch.tensor(2.0)}

    verdicts = assert_module_close(module, module, inputs, dtype=BF16, seeds=3)
    assert [verdict.name for verdict in verdicts] == ["output.a", "output.b.0"]

    def wrong(x, scale):
        out = module(x, scale)
        return {"a": out["a"], "b": (out["b"][0] * 1.5, None)}

    with pytest.raises(AssertionError) as caught:
        assert_module_close(wrong, module, inputs, dtype=BF16, seeds=3)
    assert "FAILS output.b.0" in str(caught.value) and "FAILS output.a" not in str(caught.value)
    (verdict,) = assert_module_close(wrong, module, inputs, dtype=BF16, seeds=3, compare=lambda out: out["a"])
    assert verdict.passed


def test_inputs_are_rounded_to_the_dtype_before_the_truth_is_computed(linear):
    seen = {}

    def reference(x):
        seen.setdefault(x.dtype, []).append(x)
        return x

    assert_module_close(lambda x: x, reference, rows, dtype=BF16, seeds=1)
    (narrow,), (wide,) = seen[BF16], seen[torch.float32]
    assert torch.equal(narrow.float(), wide)


def test_outputs_of_the_same_names_correspond_in_whatever_order():
    def twice(x):
        return {"a": x.exp() * 2, "b": x.exp() * 3}

    def turned(x):
        return dict(reversed(twice(x).items()))

    verdicts = assert_module_close(turned, twice, rows, dtype=BF16, seeds=2)
    assert [verdict.name for verdict in verdicts] == ["output.b", "output.a"]
    with pytest.raises(AssertionError, match=r"FAILS output\.b"):
        assert_module_close(lambda x: {"b": x.exp() * 2, "a": x.exp() * 3}, twice, rows, dtype=BF16, seeds=2)
    assert_module_close(lambda x: tuple(twice(x).values()), twice, rows, dtype=BF16, seeds=2)
    with pytest.raises(
        AccuracyError, match=r"returns output\.a, output\.c and the reference output\.a, output\.b"
    ):
        assert_module_close(lambda x: {"a": x.exp(), "c": x.exp()}, twice, rows, dtype=BF16, seeds=2)


def test_what_cannot_be_compared_is_an_error(linear):
    with pytest.raises(AccuracyError, match=r"output is empty, \[0, 48\]"):
        assert_module_close(linear, linear, lambda generator: torch.ones(0, 32), dtype=BF16, seeds=1)
    with pytest.raises(
        AccuracyError, match=r"output of the module is \[64, 4\] and of the reference \[64, 48\]"
    ):
        assert_module_close(lambda x: linear(x)[:, :4], linear, rows, dtype=BF16, seeds=1)
    with pytest.raises(AccuracyError, match="module returns 2 tensors and the reference 1"):
        assert_module_close(lambda x: (linear(x), x), linear, rows, dtype=BF16, seeds=1)
    with pytest.raises(AccuracyError, match="seeds=0"):
        assert_module_close(linear, linear, rows, dtype=BF16, seeds=0)


def test_figures_are_those_of_their_definitions():
    base, reference, test = (
        [torch.from_numpy(np.random.default_rng([seed, of]).normal(size=(30, 4))) for seed in range(3)]
        for of in range(3)
    )
    verdict = three_way("y", range(3), base, reference, test, Gates())
    errors = [[(item - b).numpy() for item, b in zip(side, base, strict=True)] for side in (test, reference)]
    norm = np.linalg.norm
    assert verdict.sigma == pytest.approx(norm(np.concatenate(errors[0])) / norm(np.concatenate(errors[1])))
    assert verdict.l2_ratio == pytest.approx(max(norm(t) / norm(r) for t, r in zip(*errors, strict=True)))
    linf = max(abs(t).max() / abs(r).max() for t, r in zip(*errors, strict=True))
    assert verdict.linf_ratio == pytest.approx(linf)


@pytest.mark.module_accuracy(seeds=4)
def test_the_marker_sets_the_fixture(assert_module_close, linear):
    (verdict,) = assert_module_close(linear, linear, rows, dtype=BF16)
    assert len(verdict.samples) == 4


def test_the_plugin_imports_nothing_until_a_test_asks(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import sys

            import pytest


            def test_nothing_is_imported():
                assert not {"torch", "numpy", "rich"} & set(sys.modules)


            @pytest.mark.module_accuracy(seed=1)
            def test_an_unknown_setting(assert_module_close):
                pass
            """
        )
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--strict-markers",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    plugins = ["-p", "no:hypothesispytest", "-p", "neuron_accuracy.testing.plugin"]
    result = subprocess.run(
        [*command, *plugins],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert "1 passed, 1 error" in result.stdout, result.stdout
    assert "module_accuracy takes seeds= and gates=" in result.stdout
