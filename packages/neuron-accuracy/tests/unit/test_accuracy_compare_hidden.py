# SPDX-License-Identifier: Apache-2.0
"""No large element, long row, rank, dtype or phase hides what differs beside it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.errors import CaptureError, LayoutError
from neuron_accuracy.layout import Rows, Sharding, TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

REQUESTS = {"a": list(range(40))}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NAME = "head:output.0"
MODES = pytest.mark.parametrize("ways", [2, 3])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def write(folder, tensor, steps=None, **options):
    return captures.write(folder, REQUESTS, {NAME: {"a": tensor}}, steps, **options)


def compared(tmp_path, test, reference, ways=2, **options):
    """Of two, or against the reference in float32 as the baseline."""
    sides = [write(tmp_path / "t", test, **options), write(tmp_path / "r", reference)]
    return compare_captures(*sides, *([write(tmp_path / "b", reference.float())] if ways == 3 else []))


LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@MODES
@pytest.mark.parametrize("mask", [LOWEST[torch.float32], -1e9, 1e30])
def test_a_masked_column_does_not_hide_the_others(tmp_path, mask, ways):
    test, reference = normal(40, 32), normal(40, 32, seed=1)
    test[:, 5] = reference[:, 5] = mask
    assert not compared(tmp_path, test, reference, ways).passed


@pytest.mark.parametrize("dtype", LOWEST)
@pytest.mark.parametrize("mask", [None, -1e9])
def test_a_mask_that_both_round_in_their_own_way_is_no_difference(tmp_path, dtype, mask):
    """The least of bfloat16 is not that of float32."""
    reference = normal(40, 32)
    test = reference.to(dtype)
    for side in (test, reference):
        side[:, 5] = -torch.inf if mask and dtype is torch.float16 else mask or LOWEST[side.dtype]
    if dtype is torch.float16 and not mask:
        reference[:, 5] = LOWEST[dtype]
    outcome = compared(tmp_path, test, reference)
    assert outcome.passed, outcome.faults
    off = (test.double() - reference.double())[:, [c for c in range(32) if c != 5]]
    assert outcome.data["modules"][0]["linf"] == float(off.abs().max())


def test_what_only_one_side_masks_or_by_another_number_is_a_fault(tmp_path):
    reference = normal(40, 32)
    reference[:, 5] = -1e9
    test = reference.clone()
    test[7, 6], reference[8, 6], test[9, 5] = -1e9, -1e9, 1e9
    (fault,) = compared(tmp_path, test, reference).faults
    assert "only positions 7–9 of a" in fault.where


def test_what_all_hold_alike_is_left_out_only_where_it_is_a_mask(tmp_path):
    """A residual's few huge channels are what it is measured by."""
    reference = 0.1 * normal(40, 32)
    reference[:, 5] = 20_000.0
    test = reference + 0.01
    test[:, 5] = 20_000.0
    outcome = compared(tmp_path, test, reference)
    assert outcome.data["modules"][0]["linf_rel"] == pytest.approx(0.01 / 20_000, rel=0.1)


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [30.0, 3e3, 3e5])
def test_the_long_row_of_a_sink_does_not_hide_another(tmp_path, dtype, size, ways):
    reference = normal(40, 32)
    reference[0, 5] = size
    test = reference.clone()
    clean = reference.to(dtype)
    assert compared(tmp_path / "clean", clean, reference if ways == 2 else clean, ways).passed
    test[25] = normal(32, seed=7)
    fault = compared(tmp_path, test.to(dtype), reference.to(dtype), ways).faults[0]
    assert "only positions 25 of a" in fault.where


def test_rows_of_zeros_are_held_against_the_others(tmp_path):
    reference = normal(40, 32)
    reference[10:] = 0
    assert compared(tmp_path, reference + 1e-6, reference).passed


@pytest.mark.parametrize(("shape", "large"), [((6, 4), True), ((6, 4), False), ((), False)])
def test_replicas_of_a_tensor_without_rows_are_compared(tmp_path, monkeypatch, shape, large):
    if large:
        monkeypatch.setattr("neuron_accuracy.compare.views.SMALL_ELEMENTS", 0)
    layouts = {NAME: TensorLayout(rows=Rows.NONE)}
    whole = normal(24)[: 24 if shape else 1].reshape(shape)

    def holding(name, *parts):
        def edit(step, rank, held):
            return dict.fromkeys(held, parts[rank])

        return write(tmp_path / name, whole, layouts=layouts, ranks=len(parts), edit=edit)

    reference, same, test = holding("r", whole), holding("s", whole, whole), holding("t", whole, 2 * whole)
    assert not compare_captures(same, reference).findings
    (fault,) = compare_captures(test, reference).faults
    assert (fault.kind, fault.where) == ("replicas differ", NAME)
    file = next((tmp_path / "s").glob("dp0/*/*/rank1.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CaptureError, match="is not what was written"):
        compare_captures(same, reference)


@pytest.mark.parametrize(
    ("value", "other", "dtype"),
    [
        (2**60, 2**60 + 1, torch.int64),
        (True, False, torch.bool),
        (1.0, 1.0 + 1e-12, torch.float64),
        (torch.nan, 1.0, torch.float32),
        (1j, 2j, torch.complex64),
    ],
)
def test_replicas_differ_whatever_they_hold(tmp_path, value, other, dtype):
    """From row 9 on, and not before, where both may have a NaN."""
    first = torch.full((40, 4), value, dtype=dtype)
    second = first.clone()
    second[9:] = other

    def apart(step, rank, held):
        return dict.fromkeys(held, second if rank else first)

    test = write(tmp_path / "t", normal(40, 4), ranks=2, edit=apart)
    reference = write(tmp_path / "r", normal(40, 4), edit=lambda step, rank, held: dict.fromkeys(held, first))
    found = compare_captures(test, reference).faults
    assert found[0].kind == "replicas differ" and found[0].detail.endswith("from row 9 on")


STEPS = [[("a", 0, 39)], [("a", 39, 40)]]


@pytest.mark.parametrize("rows", [Rows.REQUESTS, Rows.NONE])
def test_a_layout_that_only_phases_have_is_kept(tmp_path, rows):
    layouts = {f"{NAME}@{phase}": TensorLayout(rows=rows) for phase in ("prefill", "decode")}
    tall = normal(100, 8)
    wrong = tall.clone()
    wrong[99] = torch.nan

    def held(whole):
        def edit(step, rank, held):
            return dict.fromkeys(held, whole[:1] if rows is Rows.REQUESTS else whole)

        return edit

    reference = write(tmp_path / "r", normal(40, 8), STEPS, layouts=layouts, edit=held(tall))
    test = write(tmp_path / "t", normal(40, 8), STEPS, layouts=layouts, edit=held(tall))
    outcome = compare_captures(test, reference)
    assert not outcome.findings
    assert outcome.data["modules"][0]["rows"] == 2
    if rows is Rows.NONE:
        spoilt = write(tmp_path / "s", normal(40, 8), STEPS, layouts=layouts, edit=held(wrong))
        (fault,) = compare_captures(spoilt, reference).faults
        assert fault.kind == "not finite"


def test_rows_that_differ_between_phases_are_an_error(tmp_path):
    layouts = {f"{NAME}@prefill": TensorLayout(rows=Rows.NONE)}
    test = write(tmp_path / "t", normal(40, 8), STEPS, layouts=layouts)
    message = r"rows of head:output\.0 are declared to be tokens in decode, none in prefill; declare"
    with pytest.raises(LayoutError, match=message):
        compare_captures(test, write(tmp_path / "r", normal(40, 8), STEPS))


@MODES
@pytest.mark.parametrize(
    ("test", "reference"),
    [
        (torch.complex(torch.ones(40, 4), normal(40, 4)), torch.ones(40, 4) + 0j),
        (torch.full((40, 4), 2**60 + 7), torch.full((40, 4), 2**60)),
    ],
)
def test_imaginary_parts_and_large_integers_are_compared(tmp_path, test, reference, ways):
    def holding(name, whole):
        return write(tmp_path / name, normal(40, 4), edit=lambda step, rank, held: dict.fromkeys(held, whole))

    wrong, *others = holding("t", test), holding("r", reference), holding("b", reference)
    assert not compare_captures(wrong, *others[: ways - 1]).passed
    assert compare_captures(others[0], *others[: ways - 1]).passed


def test_nothing_is_no_padding_of_something(tmp_path):
    (fault,) = compared(tmp_path, torch.zeros(40, 0), torch.zeros(40, 8)).faults
    assert fault.kind == "shapes differ" and "0 features in the test" in fault.detail
    both = {NAME: {"a": torch.zeros(40, 0)}, "m:output.0": {"a": normal(40, 8)}}
    sides = [captures.write(tmp_path / name, REQUESTS, both) for name in "xy"]
    assert [item.detail for item in compare_captures(*sides).findings] == ["it has no features"]


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16"])
def test_a_run_in_16_bits_is_held_by_their_limits_whatever_it_stores(tmp_path, dtype):
    """The logits of a head that are converted at its end."""
    exact = normal(40, 32)
    off = exact + 0.01 * normal(40, 32, seed=1)
    assert compared(tmp_path, off, exact, dtype=dtype).passed
    assert not compared(tmp_path / "32", off, exact).passed
    assert not compared(tmp_path / "far", exact + 0.3 * normal(40, 32, seed=1), exact, dtype=dtype).passed


def test_a_sum_is_no_more_exact_than_its_summands(tmp_path):
    parts = normal(2, 40, 32)

    def rounded(step, rank, held):
        return {key: parts[rank].bfloat16() for key in held}

    layouts = {NAME: TensorLayout(Sharding.PARTIAL)}
    test = write(tmp_path / "t", parts.sum(0), ranks=2, layouts=layouts, edit=rounded)
    assert compare_captures(test, write(tmp_path / "r", parts.sum(0))).passed


@pytest.mark.parametrize("change", [{"vocab_size": 0}, {"tokenizer": "none"}, {"revision": "unknown"}])
def test_what_a_run_does_not_know_is_no_other_model(tmp_path, change):
    assert compared(tmp_path, normal(40, 8), normal(40, 8), **change).passed
