# SPDX-License-Identifier: Apache-2.0
"""Two captures of one computation agree however it was cut up, and a planted difference is named where it is."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from neuron_accuracy.compare.captures import compare_captures
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import Rows, Sharding, Slice, TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

# Not shrunk: an example is a few hundred files.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

REQUESTS, FEATURES = captures.REQUESTS, captures.FEATURES
made, changed, pair = captures.made, captures.changed, captures.pair


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture
def by_rows(monkeypatch):
    """Every tensor counts as too large to be read at once."""
    monkeypatch.setattr("neuron_accuracy.compare.views.SMALL_ELEMENTS", 0)
    monkeypatch.setattr("neuron_accuracy.compare.captures.CHUNK_ELEMENTS", 7 * FEATURES)


@pytest.mark.parametrize("ranks", [2, 4])
def test_large_tensors_are_read_by_rows_of_whatever_ranks_hold(tmp_path, by_rows, ranks):
    tensors = made(*LAYOUTS)
    steps = [[("b", 0, 9), ("a", 0, 19)], [("b", 9, 20), ("c", 0, 1)], [("a", 19, 24)]]
    test = captures.write(tmp_path / "t", REQUESTS, tensors, steps, ranks=ranks, layouts=LAYOUTS, padding=2)
    whole = tuple(Slice(part.name, part.size) for part in SLICES)
    single = {"m.qkv:output.0": TensorLayout(slices=whole), "m.last:output.0": LAYOUTS["m.last:output.0"]}
    outcome = compare_captures(test, captures.write(tmp_path / "r", REQUESTS, tensors, layouts=single))
    assert not outcome.findings
    assert {row["linf"] for row in outcome.data["modules"]} == {0.0}
    assert {row["rows"] for row in outcome.data["modules"] if "last" not in row["name"]} == {45}


def test_replicas_and_digests_of_large_tensors_are_checked(tmp_path, by_rows):
    tensors = made("m:output.0")

    def apart(step, rank, held):
        if rank == 1 and step.number == 1:
            held["m", "output.0"][13, 0] += 1
        return held

    reference = captures.write(tmp_path / "r", REQUESTS, tensors)
    test = captures.write(tmp_path / "t", REQUESTS, tensors, ranks=2, edit=apart)
    (finding,) = compare_captures(test, reference).faults
    assert finding.kind == "replicas differ" and finding.detail.endswith("from row 13 on")
    (file,) = (tmp_path / "r").glob("dp0/*_0/m/rank0.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(CaptureError, match="is not what was written"):
        compare_captures(test, reference)


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


@pytest.mark.parametrize("seed", range(5))
def test_noise_whose_slopes_are_far_from_one_is_no_scaled_channel(tmp_path, seed):
    requests = {"a": list(range(24))}
    tensors = made("m:output.0", features=256, requests=requests, seed=seed)
    noise = 0.08 * torch.randn(24, 256, generator=torch.Generator().manual_seed(seed + 100))
    slopes = ((tensors["m:output.0"]["a"] * noise).sum(0) / tensors["m:output.0"]["a"].square().sum(0)).abs()
    assert (slopes > 0.008).sum() > 100, "far above what a channel may be off"
    noisy = {"m:output.0": {"a": (tensors["m:output.0"]["a"] + noise).bfloat16()}}
    reference = captures.write(tmp_path / "r", requests, tensors)
    assert compare_captures(captures.write(tmp_path / "t", requests, noisy), reference).passed


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


def test_the_error_of_a_part_is_not_its_modules_own(tmp_path):
    tensors = made("m.o:input.0", "m.o:output.0", "m:input.0", "m:output.0")
    wrong = changed(tensors, "m.o:output.0", lambda tensor: tensor.mul_(1.5))
    wrong = changed(wrong, "m:output.0", lambda tensor: tensor.mul_(1.5))
    outcome = compare_captures(*pair(tmp_path, tensors, wrong))
    (finding,) = outcome.findings
    assert finding.where.startswith("m.o:output.0")
    assert outcome.data["modules"][-1]["verdict"] == "inherits"


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


@pytest.mark.parametrize(
    ("own", "size", "passes"),
    [
        (1e-4, 1.0, True),
        (1e-4, 1.3, True),
        (1e-4, 2.0, True),  # the reference may have been lucky: within two-way limits
        (1e-4, 4.0, False),
        (1.5e-3, 1.0, True),  # far from the baseline, as the reference is
        (1.5e-3, 2.0, False),
    ],
)
def test_three_way_holds_errors_against_the_references_own(tmp_path, own, size, passes):
    tensors = made("m:output.0")

    def noisy(scale, seed):
        generator = torch.Generator().manual_seed(seed)
        noise = lambda tensor: tensor.add_(scale * torch.randn(tensor.shape, generator=generator))  # noqa: E731
        return changed(tensors, "m:output.0", noise)

    baseline = captures.write(tmp_path / "b", REQUESTS, tensors)
    reference = captures.write(tmp_path / "r", REQUESTS, noisy(own, 1))
    test = captures.write(tmp_path / "t", REQUESTS, noisy(own * size, 2))
    outcome = compare_captures(test, reference, baseline)
    assert outcome.passed is passes
    (row,) = outcome.data["modules"]
    assert row["sigma_ratio"] == pytest.approx(size, rel=0.1)
    assert outcome.data["mode"] == "three-way"


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


def test_tensors_only_one_side_has_are_noted(tmp_path):
    """Of a run of another kind: what one kind lost, test_accuracy_compare_filters.py has."""
    reference = captures.write(tmp_path / "r", REQUESTS, made("m:output.0"), kind="other")
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
