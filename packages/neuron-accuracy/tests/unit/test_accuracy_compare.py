# SPDX-License-Identifier: Apache-2.0
"""Two captures of one computation agree however it was cut up, and a planted difference is named where it is."""

import importlib.util
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.errors import CaptureError, LayoutError
from neuron_accuracy.findings import Severity
from neuron_accuracy.layout import Rows, Sharding, Slice, TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

# Not shrunk: an example is a few hundred files.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

REQUESTS = {"a": [5, 6, 7, 8, 9, 10, 11, 12] * 3, "b": [5, 6, 1, 2, 3] * 4, "c": [9]}
FEATURES = 24


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(*names, features=FEATURES, requests=REQUESTS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {
            key: torch.randn(len(tokens), features, generator=generator) for key, tokens in requests.items()
        }
        for name in names
    }


def changed(tensors, name, change, requests=None):
    """The tensors with one of them changed in place, for the requests given."""
    copied = {key: {of: value.clone() for of, value in held.items()} for key, held in tensors.items()}
    for of in requests or copied[name]:
        change(copied[name][of])
    return copied


@st.composite
def partitions(draw):
    """Steps of batches of chunks, in any order that keeps each request's own."""
    queues = {}
    for name, tokens in REQUESTS.items():
        cuts = sorted({0, len(tokens), *draw(st.lists(st.integers(0, len(tokens)), max_size=5))})
        queues[name] = list(itertools.pairwise(cuts))
    steps = []
    while any(queues.values()):
        ready = [name for name in queues if queues[name]]
        batch = draw(st.lists(st.sampled_from(ready), min_size=1, max_size=3, unique=True))
        steps.append([(name, *queues[name].pop(0)) for name in batch])
    return steps


SLICES = (Slice("q", 12), Slice("k", 6, 2), Slice("v", 6, 2))
LAYOUTS = {
    "m.qkv:output.0": TensorLayout(Sharding.SHARDED, slices=SLICES),
    "m.mid:output.0": TensorLayout(Sharding.SHARDED),
    "m.seq:output.0": TensorLayout(Sharding.SHARDED, 0),
    "m.dealt:output.0": TensorLayout(Sharding.INTERLEAVED, 0),
    "m.same:output.0": TensorLayout(),
    "m.last:output.0": TensorLayout(rows=Rows.REQUESTS),
}


@settings(max_examples=6, deadline=None, phases=PHASES)
@given(partitions(), partitions(), st.sampled_from([0, 3]), st.sampled_from([2, 4]), st.data())
def test_any_steps_batches_and_ranks_align(tmp_path_factory, left, right, padding, ranks, data):
    folder = tmp_path_factory.mktemp("captures")
    tensors = made(*LAYOUTS)
    test = captures.write(
        folder / "t", REQUESTS, tensors, left, ranks=ranks, layouts=LAYOUTS, padding=padding
    )
    single = {
        name: TensorLayout(slices=SLICES if "qkv" in name else (), rows=item.rows)
        for name, item in LAYOUTS.items()
    }
    reference = captures.write(folder / "r", REQUESTS, tensors, right, layouts=single)
    outcome = compare_captures(test, reference)
    assert outcome.passed and not outcome.findings, outcome.findings
    rows = {item["name"]: (item["rows"], item["linf"]) for item in outcome.data["modules"]}
    total = sum(map(len, REQUESTS.values()))
    both_last = sum({(n, e) for s in left for n, _, e in s} >= {(n, e)} for s in right for n, _, e in s)
    assert rows.pop("m.last:output.0") == (both_last, 0.0)
    assert set(rows.values()) == {(total, 0.0)}
    assert {"m.qkv:output.0:q", "m.qkv:output.0:k", "m.qkv:output.0:v"} <= rows.keys()

    # One element off is found at its request, position and channel, whatever the steps.
    request = data.draw(st.sampled_from(["a", "b"]))
    position = data.draw(st.integers(0, len(REQUESTS[request]) - 1))
    channel = data.draw(st.integers(0, 11))

    def off(tensor):
        tensor[position, channel] += 50

    wrong = captures.write(
        folder / "w",
        REQUESTS,
        changed(tensors, "m.mid:output.0", off, [request]),
        left,
        ranks=ranks,
        layouts=LAYOUTS,
    )
    (finding,) = compare_captures(wrong, reference).findings
    assert finding.where == f"m.mid:output.0, only positions {position} of {request}, only channel {channel}"


def pair(tmp_path, tensors, wrong, **options):
    reference = captures.write(tmp_path / "r", REQUESTS, tensors, **options)
    return captures.write(tmp_path / "t", REQUESTS, wrong, **options), reference


def test_a_range_of_positions_is_named(tmp_path):
    tensors = made("m:output.0")

    def off(tensor):
        tensor[16:21] *= -1

    (finding,) = compare_captures(
        *pair(tmp_path, tensors, changed(tensors, "m:output.0", off, ["a"]))
    ).findings
    assert finding.where == "m:output.0, only positions 16–20 of a"


def test_a_scaled_channel_is_found_under_noise(tmp_path):
    """The noise is a few times the difference of any one value; only the slope over all rows shows it."""
    requests = {"a": list(range(96))}
    tensors = made("m:output.0", features=64, requests=requests)

    def noisy(tensor):
        tensor += 0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))

    def scaled(tensor):
        tensor[:, 17] *= 1.02
        noisy(tensor)

    options = {"dtype": "bfloat16"}
    as_bf16 = lambda held: {k: {of: v.bfloat16() for of, v in item.items()} for k, item in held.items()}  # noqa: E731
    reference = captures.write(tmp_path / "r", requests, tensors)
    clean = captures.write(
        tmp_path / "c", requests, as_bf16(changed(tensors, "m:output.0", noisy)), **options
    )
    wrong = captures.write(
        tmp_path / "w", requests, as_bf16(changed(tensors, "m:output.0", scaled)), **options
    )
    assert compare_captures(clean, reference).passed
    (finding,) = compare_captures(wrong, reference).findings
    assert finding.where == "m:output.0, only channel 17"
    noise = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))[:, 17].double()
    values = tensors["m:output.0"]["a"][:, 17].double()
    slope = float((values * (values * 1.02 + 0.02 * noise)).sum() / values.square().sum())
    (gain,) = compare_captures(wrong, reference).data["gains"]["m:output.0"]
    assert gain["slope"] == pytest.approx(slope, abs=2e-3)


def test_swapped_heads_are_named(tmp_path):
    tensors = made("m:output.0")

    def swap(tensor):
        tensor[:] = torch.cat([tensor[:, 6:12], tensor[:, :6], tensor[:, 12:]], 1)

    layouts = {"m:output.0": TensorLayout(heads=4)}
    outcome = compare_captures(
        *pair(tmp_path, tensors, changed(tensors, "m:output.0", swap), layouts=layouts)
    )
    (finding,) = outcome.findings
    assert finding.where == "m:output.0, only heads 0–1"
    assert "head 0: " in finding.detail and "it equals the reference's head 1" in finding.detail
    assert [head["equals"] for head in outcome.data["heads"]["m:output.0"]] == [1, 0, None, None]


def test_one_wrong_head_of_a_slice_is_named(tmp_path):
    """A KV head of one rank under a fused projection, against a run that has three projections."""
    tensors = made("m.qkv:output.0")
    parts = {"q": (0, 12), "k": (12, 18), "v": (18, 24)}
    separate = {
        f"m.{name}_proj:output.0": {
            of: value[:, begin:end] for of, value in tensors["m.qkv:output.0"].items()
        }
        for name, (begin, end) in parts.items()
    }

    def off(tensor):
        tensor[:, 15:18] *= -1

    layout = TensorLayout(Sharding.SHARDED, slices=(Slice("q", 12), Slice("k", 6), Slice("v", 6)), heads=8)
    test = captures.write(
        tmp_path / "t",
        REQUESTS,
        changed(tensors, "m.qkv:output.0", off),
        ranks=2,
        layouts={"m.qkv:output.0": layout},
        names={f"m.qkv:output.0:{name}": f"m.{name}_proj:output.0" for name in parts},
    )
    outcome = compare_captures(test, captures.write(tmp_path / "r", REQUESTS, separate))
    (finding,) = outcome.faults
    assert finding.where == "m.k_proj:output.0, only head 1"
    assert "the test calls it m.qkv:output.0:k" in finding.detail
    assert [item["name"] for item in outcome.data["modules"]] == [f"m.{name}_proj:output.0" for name in parts]


def chain(*outputs):
    """Modules in a row: each one's input is the output before it."""
    tensors, before = {}, "embed:output.0"
    tensors |= made(before)
    for seed, name in enumerate(outputs, start=1):
        tensors[f"{name}:input.0"] = tensors[before]
        before = f"{name}:output.0"
        tensors |= made(before, seed=seed)
    return tensors


def test_what_makes_an_error_is_told_from_what_inherits_it(tmp_path):
    """The later error is the larger, and the first module's is not first by name."""
    tensors = chain("z", "y", "x")
    wrong = changed(tensors, "y:output.0", lambda tensor: tensor.mul_(1.5))
    wrong = changed(wrong, "x:input.0", lambda tensor: tensor.mul_(1.5))
    wrong = changed(wrong, "x:output.0", lambda tensor: tensor.mul_(-3))
    outcome = compare_captures(*pair(tmp_path, tensors, wrong))
    (finding,) = outcome.findings
    assert finding.where.startswith("y:output.0")
    assert "its input agrees (rel_l2 0)" in finding.detail
    verdicts = {item["name"]: item["verdict"] for item in outcome.data["modules"]}
    assert [verdicts[name] for name in ("z:output.0", "y:output.0", "x:input.0", "x:output.0")] == [
        "agrees",
        "makes",
        "inherits",
        "inherits",
    ]
    assert outcome.data["first"] == "y:output.0"


def test_without_inputs_the_first_in_order_is_named(tmp_path):
    tensors = made("c:output.0", "b:output.0", "a:output.0")
    wrong = changed(tensors, "b:output.0", lambda tensor: tensor.mul_(1.1))
    wrong = changed(wrong, "a:output.0", lambda tensor: tensor.mul_(-9))
    (finding,) = compare_captures(*pair(tmp_path, tensors, wrong)).findings
    assert finding.where.startswith("b:output.0")
    assert "its input was not captured" in finding.detail and "agrees is c:output.0" in finding.detail


def test_an_error_between_a_module_and_its_part_is_named_there(tmp_path):
    tensors = made("m:input.0", "m.o:input.0", "m.o:output.0", "m:output.0")
    order = ["m.o:input.0", "m.o:output.0", "m:input.0", "m:output.0"]
    tensors = {name: tensors[name] for name in order}
    wrong = tensors
    for name in ("m.o:input.0", "m.o:output.0", "m:output.0"):
        wrong = changed(wrong, name, lambda tensor: tensor.mul_(-1))
    (finding,) = compare_captures(*pair(tmp_path, tensors, wrong)).findings
    assert finding.where.startswith("m:output.0")
    assert "that of its o does not: it lies between them" in finding.detail


def test_a_layer_whose_error_grows_unlike_the_others_is_found(tmp_path):
    names = [f"m.layers.{index}.down" for index in range(6)]
    tensors = made(*(f"{name}:{end}" for name in names for end in ("input.0", "output.0")))
    wrong = tensors
    for index, name in enumerate(names):
        for end, size in (("input.0", 0.003), ("output.0", 0.012 if index == 3 else 0.003)):
            noise = torch.Generator().manual_seed(index)

            def noisy(tensor, size=size, noise=noise):
                tensor += size * torch.randn(tensor.shape, generator=noise)

            wrong = changed(wrong, f"{name}:{end}", noisy)
    as_bf16 = {name: {of: value.bfloat16() for of, value in held.items()} for name, held in wrong.items()}
    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    (finding,) = compare_captures(captures.write(tmp_path / "t", REQUESTS, as_bf16), reference).findings
    assert finding.where.startswith("m.layers.3.down:output.0")
    assert "usual for the 6 modules of its kind" in finding.detail


@pytest.mark.parametrize(("size", "passes"), [(1.0, True), (1.3, True), (2.0, False)])
def test_three_way_holds_errors_against_the_references_own(tmp_path, size, passes):
    tensors = made("m:output.0")

    def noisy(scale, seed):
        generator = torch.Generator().manual_seed(seed)
        noise = lambda tensor: tensor.add_(scale * torch.randn(tensor.shape, generator=generator))  # noqa: E731
        return changed(tensors, "m:output.0", noise)

    baseline = captures.write(tmp_path / "b", REQUESTS, tensors)
    reference = captures.write(tmp_path / "r", REQUESTS, noisy(1e-4, 1))
    test = captures.write(tmp_path / "t", REQUESTS, noisy(1e-4 * size, 2))
    outcome = compare_captures(test, reference, baseline)
    assert outcome.passed is passes
    (row,) = outcome.data["modules"]
    assert row["sigma_ratio"] == pytest.approx(size, rel=0.1)
    assert outcome.data["mode"] == "three-way"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["test", "reference", "both"])
def test_what_is_not_finite_is_a_fault_on_either_side(tmp_path, value, side):
    tensors = made("m:output.0")

    def spoil(tensor):
        tensor[7, 3] = value

    wrong = changed(tensors, "m:output.0", spoil, ["b"])
    test, reference = pair(
        tmp_path, tensors if side == "test" else wrong, tensors if side == "reference" else wrong
    )
    outcome = compare_captures(test, reference)
    if side == "both" and math.isinf(value):
        # A score that both mask out is no difference.
        assert outcome.passed
        return
    assert [item.kind for item in outcome.faults] == ["not finite"]
    assert "at position 7 of b, channel 3" in outcome.faults[0].detail
    named = {"test": "the test", "reference": "the reference", "both": "the test and reference"}[side]
    assert f"the first in {named}" in outcome.faults[0].detail


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("vocabulary size", {"vocab_size": 101}),
        ("tokenizer", {"tokenizer": "u"}),
        ("revision", {"revision": "s"}),
    ],
)
def test_captures_of_different_models_are_refused(tmp_path, what, change):
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"))
    test = captures.write(tmp_path / "t", REQUESTS, made("m:output.0"), **change)
    with pytest.raises(CaptureError, match=rf"different models: {what}"):
        compare_captures(test, reference)


def test_steps_missing_on_one_side_are_a_fault(tmp_path):
    steps = [[("a", 0, 10), ("b", 0, 20), ("c", 0, 1)], [("a", 10, 11)], [("a", 11, 24)]]
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", REQUESTS, tensors, steps)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, steps[:2])
    (finding,) = compare_captures(test, reference).faults
    assert (finding.kind, finding.where) == ("missing positions", "a")
    assert finding.detail == "the test has no rows of positions 11–23"
    (finding,) = compare_captures(reference, test).faults
    assert finding.detail == "the reference has no rows of positions 11–23"


def test_steps_that_were_not_asked_for_are_noted_only(tmp_path):
    tensors = made("m:output.0")
    steps = [[("a", 0, 23), ("b", 0, 20), ("c", 0, 1)], [("a", 23, 24)]]
    spec = CaptureSpec(("**",), phases=("prefill",))
    reference = captures.write(tmp_path / "r", REQUESTS, tensors, steps)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, steps, spec=spec)
    outcome = compare_captures(test, reference)
    assert outcome.passed
    assert [(item.kind, item.severity) for item in outcome.findings] == [("missing positions", Severity.NOTE)]


def test_a_module_missing_in_one_step_is_a_fault(tmp_path):
    tensors = made("m:output.0", "n:output.0")
    steps = [[("a", 0, 24)], [("b", 0, 20)], [("c", 0, 1)]]

    def without(step, rank, held):
        return {key: value for key, value in held.items() if key[0] != "n" or step.number != 1}

    reference = captures.write(tmp_path / "r", REQUESTS, tensors, steps)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, steps, edit=without)
    (finding,) = compare_captures(test, reference).faults
    assert (finding.kind, finding.where) == ("missing step", "n:output.0")
    assert "step 1 of the test" in finding.detail


def test_requests_are_paired_by_their_tokens(tmp_path):
    tensors = made("m:output.0")
    renamed = {"x": REQUESTS["c"], "y": REQUESTS["b"], "z": REQUESTS["a"]}
    moved = {"m:output.0": {new: tensors["m:output.0"][old] for new, old in zip("xyz", "cba", strict=True)}}
    reference = captures.write(tmp_path / "r", renamed, moved)
    test = captures.write(tmp_path / "t", REQUESTS, tensors)
    outcome = compare_captures(test, reference)
    assert outcome.passed
    assert {(item["test"], item["reference"]) for item in outcome.data["requests"]} == {
        ("a", "z"),
        ("b", "y"),
        ("c", "x"),
    }


def test_requests_whose_tokens_part_are_a_fault_and_compared_up_to_there(tmp_path):
    tensors = made("m:output.0")
    other = {**REQUESTS, "a": [*REQUESTS["a"][:9], 99, *REQUESTS["a"][10:]]}
    beyond = changed(tensors, "m:output.0", lambda tensor: tensor[9:].mul_(-1), ["a"])
    reference = captures.write(tmp_path / "r", other, beyond)
    outcome = compare_captures(captures.write(tmp_path / "t", REQUESTS, tensors), reference)
    (finding,) = outcome.findings
    assert (finding.kind, finding.where) == ("tokens part", "a")
    assert "position 9 the test has token 6 and the reference 99" in finding.detail


def test_requests_without_a_pair_are_faults_and_none_at_all_an_error(tmp_path):
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", {"a": REQUESTS["a"]}, tensors)
    outcome = compare_captures(captures.write(tmp_path / "t", REQUESTS, tensors), reference)
    assert {(item.kind, item.where) for item in outcome.faults} == {
        ("request without a pair", "b"),
        ("request without a pair", "c"),
    }
    stranger = captures.write(tmp_path / "s", {"a": [1, 1, 1]}, tensors)
    with pytest.raises(CaptureError, match="begins with the tokens of one of"):
        compare_captures(stranger, reference)


def test_ranks_that_should_hold_the_same_but_do_not_are_a_fault(tmp_path):
    tensors = made("m:output.0")

    def apart(step, rank, held):
        if rank == 1 and step.number == 1:
            held["m", "output.0"][4, 0] += 1
        return held

    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, ranks=2, edit=apart)
    (finding,) = compare_captures(test, reference).faults
    assert (finding.kind, finding.where) == ("replicas differ", "m:output.0")
    assert "in step 1 ranks 0 and 1 should hold the same" in finding.detail and "row 4" in finding.detail


def test_layouts_that_do_not_multiply_out_are_errors_naming_the_tensor(tmp_path):
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", REQUESTS, tensors)

    def halved(step, rank, held):
        return {key: value[: len(value) // 2] for key, value in held.items()}

    short = captures.write(tmp_path / "t", REQUESTS, tensors, edit=halved)
    with pytest.raises(
        LayoutError, match=r"m:output\.0 in step 0 is \[12, 24\], but the step has 24 rows of tokens"
    ):
        compare_captures(short, reference)
    captures.write(tmp_path / "u", REQUESTS, tensors, ranks=2)
    described = json.loads((tmp_path / "u" / "capture.json").read_text())
    layout = TensorLayout(Sharding.SHARDED, slices=(Slice("q", 7),))
    described["layouts"]["m:output.0"] = layout.to_json()
    described["names"]["m:output.0:q"] = "m:output.0"
    described["names"]["m:output.0"] = "m:fused"
    (tmp_path / "u" / "capture.json").write_text(json.dumps(described))
    with pytest.raises(
        LayoutError, match=r"m:output\.0:q: slice 'q': 7 elements do not divide into 2 pieces"
    ):
        compare_captures(tmp_path / "u", reference)


def test_a_rank_that_is_missing_is_an_error(tmp_path):
    tensors = made("m:output.0")
    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    layouts = {"m:output.0": TensorLayout(Sharding.SHARDED)}
    spec = CaptureSpec(("**",), ranks=(0,))
    test = captures.write(tmp_path / "t", REQUESTS, tensors, ranks=2, layouts=layouts, spec=spec)
    with pytest.raises(
        CaptureError, match=r"ranks \[1\] hold nothing of m:output\.0 in step 0, but it is sharded over 2"
    ):
        compare_captures(test, reference)


def test_tensors_of_other_widths_are_a_fault_unless_the_rest_is_padding(tmp_path):
    tensors = made("m:output.0")

    def widened(value):
        return lambda step, rank, held: {
            key: torch.cat([tensor, torch.full((len(tensor), 8), value)], 1) for key, tensor in held.items()
        }

    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    padded = captures.write(tmp_path / "p", REQUESTS, tensors, edit=widened(0.0))
    assert compare_captures(padded, reference).passed
    wider = captures.write(tmp_path / "t", REQUESTS, tensors, edit=widened(1.0))
    (finding,) = compare_captures(wider, reference).findings
    assert (finding.kind, finding.where) == ("shapes differ", "m:output.0")
    assert (
        finding.detail
        == "m:output.0 has 32 features in the test, m:output.0 has 24 features in the reference"
    )


def test_captures_with_nothing_in_common_are_an_error(tmp_path):
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"))
    test = captures.write(tmp_path / "t", REQUESTS, made("n:output.0"))
    with pytest.raises(CaptureError, match="no tensor of one name"):
        compare_captures(test, reference)
    named = captures.write(tmp_path / "n", REQUESTS, made("n:output.0"), names={"n:output.0": "m:output.0"})
    assert compare_captures(named, reference).passed


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"))
    names = {"n:output.0": "m:output.0"}
    test = captures.write(tmp_path / "t", REQUESTS, made("m:output.0", "n:output.0"), names=names)
    with pytest.raises(CaptureError, match=r"m:output\.0 and n:output\.0 are both called m:output\.0"):
        compare_captures(test, reference)


def test_tensors_only_one_side_has_are_noted(tmp_path):
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"))
    test = captures.write(tmp_path / "t", REQUESTS, made("m:output.0", "n:output.0"))
    outcome = compare_captures(test, reference)
    assert outcome.passed
    assert [(item.kind, item.where) for item in outcome.findings] == [("not compared", "test")]
    assert outcome.data["unpaired"] == {"test": ["n:output.0"], "reference": []}


def test_tensors_without_rows_are_compared_as_they_are(tmp_path):
    layouts = {"m:output.0": TensorLayout(rows=Rows.NONE)}
    tensors = {"m:output.0": {"a": torch.arange(6.0).reshape(2, 3)}}
    other = {"m:output.0": {"a": torch.tensor([[0.0, 1, 2], [3, 4, 7]])}}
    reference = captures.write(tmp_path / "r", {"a": [1, 2]}, tensors, layouts=layouts)
    assert compare_captures(
        captures.write(tmp_path / "s", {"a": [1, 2]}, tensors, layouts=layouts), reference
    ).passed
    outcome = compare_captures(
        captures.write(tmp_path / "t", {"a": [1, 2]}, other, layouts=layouts), reference
    )
    assert outcome.data["modules"][0]["linf"] == 2.0 and not outcome.passed
