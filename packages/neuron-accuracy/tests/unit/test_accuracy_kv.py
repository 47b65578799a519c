# SPDX-License-Identifier: Apache-2.0
"""Faults planted in random caches are named at their place, clean noise is not, and bad captures are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import CacheRecord, RunRecord
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.cli.main import cli
from neuron_accuracy.errors import AccuracyError, CaptureError, LayoutError
from neuron_accuracy.findings import Level, Outcome, read_outcome
from neuron_accuracy.kv.compare import compare_caches
from neuron_accuracy.kv.limits import RELATIVE_L2
from neuron_accuracy.kv.requests import caches_of
from neuron_accuracy.subjects.info import SubjectInfo

LAYERS, HEADS, DIM, LENGTH, BLOCK = 4, 4, 16, 64, 16
BLOCK_IDS = (3, 7, 5, 9)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Written:
    """What a capture is made of: per request, ``[layers, 2, heads, positions, head_dim]``."""

    caches: dict[str, torch.Tensor]
    tokens: dict[str, tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    cached: int = 0
    freed: tuple[bool, ...] = (False,) * 4
    ranks: int = 1
    replicas: int = 1
    scale: float | None = None
    info: dict[str, object] = field(default_factory=dict)

    def write(self, folder: Path) -> Capture:
        values = {
            "kind": "random",
            "model": "m",
            "revision": "r",
            "dtype": str(self.dtype).removeprefix("torch.") if self.scale is None else "bfloat16",
            "vocab_size": 100,
            "tokenizer": "t",
        }
        run = RunRecord(SubjectInfo(**(values | self.info)), self.ranks)
        for rank in range(self.ranks):
            writer = CaptureWriter(folder, CaptureSpec((), kv=True), run, rank=rank)
            for name, cache in self.caches.items():
                writer.write_cache(self.record(name), *self.pages(cache, rank))
            writer.close()
        return Capture(folder)

    def record(self, name: str) -> CacheRecord:
        tokens = self.tokens[name]
        layers, _, heads, _, dim = self.caches[name].shape
        blocks = -(-len(tokens) // BLOCK)
        return CacheRecord(
            name,
            tokens,
            self.cached,
            BLOCK,
            BLOCK_IDS[:blocks],
            self.freed[:blocks],
            layers,
            heads,
            dim,
            self.replicas,
        )

    def pages(self, cache: torch.Tensor, rank: int) -> tuple[list[torch.Tensor], list | None]:
        local = cache.shape[2] * self.replicas // self.ranks
        first = rank // self.replicas * local
        both = torch.cat([cache[:, 0], cache[:, 1]], dim=-1)[:, first : first + local]
        pages = both.unflatten(2, (-1, BLOCK)).transpose(1, 2)
        if self.scale is None:
            return list(pages.to(self.dtype)), None
        scales = torch.full((local,), self.scale)
        return list((pages / self.scale).to(self.dtype)), [(scales, scales)] * len(pages)


def random_caches(seed: int = 0, requests: int = 1) -> Written:
    generator = torch.Generator().manual_seed(seed)
    names = [f"request-{i}" for i in range(requests)]
    tokens = {name: tuple(torch.randint(100, (LENGTH,), generator=generator).tolist()) for name in names}
    shape = (LAYERS, 2, HEADS, LENGTH, DIM)
    return Written({name: torch.randn(shape, generator=generator) for name in names}, tokens)


def changed(written: Written, **changes: object) -> Written:
    copies = {name: cache.clone() for name, cache in written.caches.items()}
    return replace(written, **{"caches": copies, **changes})


def compare(tmp_path: Path, test: Written, reference: Written, baseline: Written | None = None) -> Outcome:
    captures = [
        written.write(tmp_path / name)
        for name, written in (("test", test), ("reference", reference), ("baseline", baseline))
        if written is not None
    ]
    return compare_caches(*captures)


def noisy(written: Written, seed: int, size: float) -> Written:
    """Every number off by a normal relative error of this size."""
    generator = torch.Generator().manual_seed(seed)
    other = changed(written)
    for cache in other.caches.values():
        cache *= 1 + size * torch.randn(cache.shape, generator=generator)
    return other


def rotate(keys: torch.Tensor, base: float, sign: float = 1.0) -> torch.Tensor:
    """By hand: plane i of dims i and i + D/2 by position * base**(-2i/D)."""
    half = keys.shape[-1] // 2
    for i in range(half):
        angles = sign * torch.arange(keys.shape[-2], dtype=torch.float64) * base ** (-2 * i / keys.shape[-1])
        a, b = keys[..., i].double(), keys[..., i + half].double()
        keys[..., i] = (a * angles.cos() - b * angles.sin()).float()
        keys[..., i + half] = (a * angles.sin() + b * angles.cos()).float()
    return keys


def test_equal_caches_pass_whatever_the_parallel_layout(tmp_path):
    reference = random_caches(requests=2)
    outcome = compare(tmp_path, changed(reference, ranks=4, replicas=2), reference)
    assert outcome.passed and not outcome.findings
    assert [row["positions"] for row in outcome.data["requests"]] == [LENGTH, LENGTH]
    errors = next(m for m in outcome.data["heat_maps"] if m["title"] == "Relative L2 error of values")
    assert errors["values"] == [[0.0] * HEADS] * LAYERS


@pytest.mark.parametrize(
    "dtype, size", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_noise_of_the_dtype_is_no_finding_over_20_seeds(tmp_path, dtype, size):
    for seed in range(20):
        reference = changed(random_caches(seed), dtype=dtype)
        outcome = compare(tmp_path / str(seed), noisy(reference, seed, size), reference)
        assert not outcome.findings, outcome.findings


def test_an_fp8_cache_agrees_with_a_bfloat16_one_over_20_seeds(tmp_path):
    for seed in range(20):
        reference = changed(random_caches(seed), dtype=torch.bfloat16)
        test = changed(reference, dtype=torch.float8_e4m3fn, scale=0.03)
        outcome = compare(tmp_path / str(seed), test, reference)
        assert not outcome.findings, outcome.findings


def test_swapped_heads_are_named_with_the_head_they_hold(tmp_path):
    reference = random_caches(requests=2)
    test = changed(noisy(reference, 1, 1e-5), ranks=2)
    for cache in test.caches.values():
        cache[2, :, [0, 1]] = cache[2, :, [1, 0]]
    outcome = compare(tmp_path, test, reference)
    assert [finding.kind for finding in outcome.findings] == ["swapped heads"] * 2
    assert outcome.faults[0].where == "keys and values of layer 2, head 0"
    assert "head 0 holds what the reference has in head 1" in outcome.faults[0].detail
    assert "head 1 holds what the reference has in head 0" in outcome.faults[1].detail
    assert "in 2 of 2 requests" in outcome.faults[0].detail


@pytest.mark.parametrize("cached, said", [(0, False), (32, True)])
def test_an_overwritten_block_is_named_with_its_positions(tmp_path, cached, said):
    reference = random_caches(requests=2)
    test = changed(noisy(reference, 1, 1e-5), cached=cached)
    test.caches["request-1"][:, :, :, 16:32] = torch.randn(LAYERS, 2, HEADS, 16, DIM)
    (finding,) = compare(tmp_path, test, reference).findings
    assert finding.kind == "overwritten"
    assert finding.where == "request request-1, positions 16-31, all layers"
    assert "positions 16-31 (block 7" in finding.detail
    assert "positions before and after do: the block was overwritten" in finding.detail
    assert ("a cached one" in finding.detail) is said


def test_what_attends_to_an_overwritten_block_is_not_another_fault(tmp_path):
    reference = random_caches()
    test = changed(reference)
    cache = test.caches["request-0"]
    cache[1:, :, :, 32:] *= 1 + 0.05 * torch.randn(LAYERS - 1, 2, HEADS, 32, DIM)
    cache[:, :, :, 16:32] = torch.randn(LAYERS, 2, HEADS, 16, DIM)
    outcome = compare(tmp_path, test, reference)
    assert [finding.kind for finding in outcome.findings] == ["overwritten"]


def test_a_fault_before_an_overwritten_block_is_a_fault_of_its_own(tmp_path):
    reference = random_caches()
    test = changed(reference)
    cache = test.caches["request-0"]
    cache[:, :, :, 32:48] = torch.randn(LAYERS, 2, HEADS, 16, DIM)
    cache[2, 1, 3, 4:9] += 0.5
    kinds = [(f.kind, f.where) for f in compare(tmp_path, test, reference).findings]
    assert kinds[0][0] == "overwritten"
    assert kinds[1] == ("diverges", "values of layer 2, head 3, positions 4-8")


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_scaled_keys_read_as_their_gain(tmp_path, dtype, size):
    reference = changed(random_caches(requests=2), dtype=dtype)
    test = noisy(reference, 1, size)
    for cache in test.caches.values():
        cache[3, 0] *= 2
    (finding,) = compare(tmp_path, test, reference).findings
    assert (finding.kind, finding.where) == ("gain", "keys of layer 3")
    assert finding.detail.startswith("gain 2.00")
    assert finding.figures["gain"] == pytest.approx(2, rel=0.01)


def test_an_fp8_scale_that_is_read_twice_too_large_is_a_gain(tmp_path):
    reference = changed(random_caches(), dtype=torch.bfloat16)
    test = changed(reference, dtype=torch.float8_e4m3fn, scale=0.03)
    folder = tmp_path / "test"
    pages = test.pages

    def doubled(cache, rank):
        stored, scales = pages(cache, rank)
        return stored, [(k, 2 * v) for k, v in scales]

    test.pages = doubled
    outcome = compare_caches(test.write(folder), reference.write(tmp_path / "reference"))
    (finding,) = outcome.findings
    assert (finding.kind, finding.where) == ("gain", "values of all layers")
    assert finding.detail.startswith("gain 2.00")


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e-6), (torch.bfloat16, 2**-9)])
@pytest.mark.parametrize("test_base, base", [(500_000.0, 10_000.0), (10_000.0, 1_000_000.0)])
def test_another_rotary_base_is_named_with_both(tmp_path, dtype, size, test_base, base):
    plain = changed(random_caches(requests=2), dtype=dtype)
    reference, test = changed(plain), noisy(plain, 1, size)
    for written, rotated_by in ((reference, base), (test, test_base)):
        for cache in written.caches.values():
            for layer in range(LAYERS):
                rotate(cache[layer, 0], rotated_by)
    finding = compare(tmp_path, test, reference).faults[0]
    assert (finding.kind, finding.where) == ("rotary", "keys of all layers")
    assert "position 0 agrees" in finding.detail
    first, second = _numbers_after(finding.detail, "rotary base differs: about ")
    assert first == pytest.approx(test_base, rel=0.1)
    assert second == pytest.approx(base, rel=0.1)


def test_keys_that_differ_at_position_0_as_well_are_not_said_to_be_turned(tmp_path):
    plain = random_caches()
    reference, test = changed(plain), changed(plain)
    for layer in range(LAYERS):
        rotate(reference.caches["request-0"][layer, 0], 10_000.0)
        rotate(test.caches["request-0"][layer, 0], 20_000.0)
    test.caches["request-0"][:, 0, :, 0] *= 1.001
    finding = compare(tmp_path, test, reference).faults[0]
    assert (finding.kind, finding.where) == ("diverges", f"keys of layer 0, positions 0-{LENGTH - 1}")


def _numbers_after(text: str, words: str) -> list[float]:
    said = text.split(words)[1].split(" (")[0]
    return [float(word.replace(",", "")) for word in said.split(" against ")]


def test_the_first_divergence_comes_first_and_later_layers_follow_it(tmp_path):
    reference = random_caches()
    test = changed(reference)
    test.caches["request-0"][1, 0, 2] *= 1 + 0.01 * torch.randn(LENGTH, DIM)
    test.caches["request-0"][2:] *= 1 + 0.5 * torch.randn(LAYERS - 2, 2, HEADS, LENGTH, DIM)
    outcome = compare(tmp_path, test, reference)
    assert [(f.kind, f.where) for f in outcome.faults] == [
        ("diverges", "keys of layer 1, head 2, positions 0-63")
    ]
    assert [(f.kind, f.where) for f in outcome.findings[1:]] == [("follows", "layers 2-3")]


def test_decoded_positions_that_are_wrong_are_told_from_prefill(tmp_path):
    reference = random_caches()
    test = changed(reference)
    test.caches["request-0"][:, :, :, 40:] += 0.3
    finding = compare(tmp_path, test, reference).faults[0]
    assert finding.kind == "diverges"
    assert "right up to position 39, wrong from there on" in finding.detail


def test_zeros_are_told_as_never_written(tmp_path):
    reference = random_caches()
    test = changed(reference)
    test.caches["request-0"][1, 1, 3] = 0
    (finding,) = compare(tmp_path, test, reference).findings
    assert (finding.kind, finding.where) == ("zeros", "values of layer 1, head 3")


@pytest.mark.parametrize("side", ["test", "reference"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named_on_either_side(tmp_path, side, number):
    written = {"test": random_caches(), "reference": random_caches()}
    written[side].caches["request-0"][2, 1, 3, 5, 0] = number
    (finding,) = compare(tmp_path, **written).findings
    assert (finding.kind, finding.where) == ("not finite", "values of layer 2, head 3, position 5")
    assert f"not finite in the {side}" in finding.detail


def test_nan_in_a_block_that_was_given_back_is_no_finding(tmp_path):
    reference = random_caches()
    test = changed(reference, freed=(True, False, False, False))
    test.caches["request-0"][:, :, :, :16] = torch.nan
    outcome = compare(tmp_path, test, reference)
    (note,) = outcome.findings
    assert outcome.passed and note.kind == "given back on one side"
    assert "16 of 64 positions (0-15) are not compared" in note.detail
    reference = changed(reference, freed=(True, False, False, False))
    assert not compare(tmp_path / "both", test, reference).findings
    heat = outcome.data["prompts"][0]["heat_maps"][0]
    assert all(row[0] != row[0] and row[1] == 0 for row in heat["values"])


def test_replicas_that_disagree_are_a_finding(tmp_path):
    reference = random_caches()
    test = changed(reference, ranks=2, replicas=2)
    pages = test.pages

    def off(cache, rank):
        cache = cache.clone()
        cache[1, 0, 0, 7, 0] += rank
        return pages(cache, rank)

    test.pages = off
    outcome = compare_caches(test.write(tmp_path / "test"), reference.write(tmp_path / "reference"))
    assert {f.kind for f in outcome.findings} == {"ranks disagree"}
    assert (
        "ranks 0 and 1 of the test should hold the same and do not, from position 7 on"
        in outcome.findings[0].detail
    )


@pytest.mark.parametrize("which, part", [(0, "keys"), (1, "values")])
def test_replicas_with_another_scale_are_a_finding(tmp_path, which, part):
    """Only the first replica is read: what the other would read with its scale nobody else compares."""
    reference = changed(random_caches(), dtype=torch.float8_e4m3fn, scale=0.03)
    test = changed(reference, ranks=2, replicas=2)
    pages = test.pages

    def off(cache, rank):
        stored, scales = pages(cache, rank)
        return stored, [tuple(s * (1 + (rank and i == which)) for i, s in enumerate(both)) for both in scales]

    test.pages = off
    outcome = compare_caches(test.write(tmp_path / "test"), reference.write(tmp_path / "reference"))
    (finding,) = outcome.findings
    assert (finding.kind, finding.where) == ("ranks disagree", f"{part} of all layers")
    assert f"ranks 0 and 1 of the test should have the same scales of {part}" in finding.detail


def test_a_scale_without_its_other_half_is_refused(tmp_path, monkeypatch):
    """Read as if there were none, numbers would be compared that nobody computes with."""
    (cache,) = caches_of(changed(random_caches(), dtype=torch.float8_e4m3fn, scale=0.03).write(tmp_path))
    read = Capture.load_pages

    def half(self, *args, **kwargs):
        return {name: held for name, held in read(self, *args, **kwargs).items() if name != "v_scale"}

    monkeypatch.setattr(Capture, "load_pages", half)
    with pytest.raises(LayoutError, match=r"only ranks \[0\] have k_scale; .* work"):
        cache.layer(2)


def test_a_cache_of_which_nothing_is_left_is_no_pass(tmp_path):
    reference = random_caches(requests=2)
    garbage = replace(random_caches(seed=1, requests=2), tokens=reference.tokens, freed=(True,) * 4)
    outcome = compare(tmp_path, garbage, reference)
    assert [(f.level, f.kind) for f in outcome.faults] == [(Level.INPUT, "nothing compared")] * 2
    assert outcome.faults[0].where == "request request-0, held against request-0"


@pytest.mark.parametrize(
    "length, gone, fault", [(32, 2, "nothing compared"), (32, 1, "missing positions"), (48, 2, None)]
)
def test_a_window_that_slid_past_a_shorter_reference_is_no_pass(tmp_path, length, gone, fault):
    """Of 64 positions the test holds the last blocks only, and those that the reference lacks may be more."""
    test = changed(random_caches(), freed=(True,) * gone + (False,) * (4 - gone))
    shorter = {"request-0": test.caches["request-0"][:, :, :, :length]}
    tokens = {"request-0": test.tokens["request-0"][:length]}
    outcome = compare(tmp_path, test, replace(random_caches(), caches=shorter, tokens=tokens))
    assert {finding.kind for finding in outcome.faults} >= {fault} - {None}
    assert outcome.passed is (fault is None), outcome.findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_does_not_hide_an_overwritten_block(tmp_path, dtype):
    """The first token's keys are hundreds of times larger, as those of an attention sink."""
    reference = changed(random_caches(), dtype=dtype)
    for cache in reference.caches.values():
        cache[:, 0, :, 0] *= 300
    size = 2**-8 if dtype == torch.bfloat16 else 1e-5
    test = noisy(reference, 1, size)
    assert not compare(tmp_path / "clean", test, reference).findings
    test.caches["request-0"][:, :, :, 16:32] = torch.randn(LAYERS, 2, HEADS, 16, DIM)
    test.caches["request-0"][:, 1, :, 16:32] = reference.caches["request-0"][:, 1, :, 16:32]
    (finding,) = compare(tmp_path / "overwritten", test, reference).findings
    assert (finding.kind, finding.where) == ("overwritten", "request request-0, positions 16-31, all layers")


def test_a_cache_in_float64_has_the_limits_of_float32(tmp_path):
    written = changed(random_caches(), dtype=torch.float64)
    outcome = compare(tmp_path, written, written)
    assert outcome.passed and outcome.data["limits"]["relative_l2_of_a_head"] == RELATIVE_L2["float32"]


def test_requests_are_paired_by_tokens_not_by_name(tmp_path):
    reference = random_caches(requests=3)
    renamed = {"a": "request-2", "b": "request-0", "c": "request-1"}
    test = Written(
        {new: reference.caches[old] for new, old in renamed.items()},
        {new: reference.tokens[old] for new, old in renamed.items()},
    )
    outcome = compare(tmp_path, test, reference)
    assert outcome.passed
    assert {row["request"]: row["held_against"] for row in outcome.data["requests"]} == renamed


def test_a_prompt_that_begins_another_is_paired_with_its_like(tmp_path):
    whole = random_caches()
    cache, tokens = whole.caches["request-0"], whole.tokens["request-0"]
    part = (cache[:, :, :, :32], tokens[:32])
    test = Written({"a": part[0], "b": cache}, {"a": part[1], "b": tokens})
    reference = Written({"x": cache, "y": part[0]}, {"x": tokens, "y": part[1]})
    outcome = compare(tmp_path, test, reference)
    assert not outcome.findings
    assert {row["request"]: row["held_against"] for row in outcome.data["requests"]} == {"a": "y", "b": "x"}


def test_a_request_without_counterpart_is_a_fault_on_either_side(tmp_path):
    reference = random_caches(requests=2)
    tokens = {**reference.tokens, "request-1": (101, *reference.tokens["request-1"][1:])}
    outcome = compare(tmp_path, changed(reference, tokens=tokens), reference)
    assert [(f.level, f.kind, f.where) for f in outcome.faults] == [
        (Level.INPUT, "request without a pair", "request request-1 of the test"),
        (Level.INPUT, "request without a pair", "request request-1 of the reference"),
    ]


def test_tokens_that_part_are_a_fault(tmp_path):
    reference = random_caches()
    tokens = list(reference.tokens["request-0"])
    tokens[40] = 100
    outcome = compare(tmp_path, changed(reference, tokens={"request-0": tuple(tokens)}), reference)
    (finding,) = outcome.faults
    assert finding.kind == "tokens part"
    assert f"test 100, reference {reference.tokens['request-0'][40]}; only 40 of {LENGTH}" in finding.detail
    assert outcome.data["requests"][0]["positions"] == 40


@pytest.mark.parametrize("length, passes", [(16, False), (48, True)])
def test_a_side_that_ends_early_is_said_and_fails_when_little_is_left(tmp_path, length, passes):
    reference = random_caches()
    shorter = {"request-0": reference.caches["request-0"][:, :, :, :length]}
    test = changed(reference, caches=shorter, tokens={"request-0": reference.tokens["request-0"][:length]})
    outcome = compare(tmp_path, test, reference)
    (finding,) = outcome.findings
    assert finding.kind == "missing positions"
    assert f"at position {length}: test ends" in finding.detail
    assert outcome.passed is passes


def test_a_baseline_sets_the_limits(tmp_path):
    """What is beyond the table passes where the reference is as far, and not where it is much nearer."""
    baseline = random_caches()
    reference = changed(noisy(baseline, 1, 0.08), info={"dtype": "bfloat16"})
    near, far = noisy(baseline, 2, 0.08), noisy(baseline, 2, 0.24)
    assert compare(tmp_path / "near", near, reference, baseline).passed
    assert not compare(tmp_path / "plain", changed(near, info={"dtype": "bfloat16"}), baseline).passed
    outcome = compare(tmp_path / "far", far, reference, baseline)
    assert outcome.faults[0].kind == "diverges" and "layer 0" in outcome.faults[0].where


def test_a_reference_far_from_the_baseline_is_no_reference(tmp_path):
    baseline = random_caches()
    reference = noisy(baseline, 1, 0.5)
    outcome = compare(tmp_path, reference, reference, baseline)
    assert {finding.kind for finding in outcome.faults} == {"reference off"}


def test_captures_of_other_models_are_refused(tmp_path):
    reference = random_caches()
    smaller = Written({"request-0": reference.caches["request-0"][:2]}, reference.tokens)
    with pytest.raises(LayoutError, match=r"num_layers=2.*num_layers=4"):
        compare(tmp_path / "layers", smaller, reference)
    with pytest.raises(CaptureError, match="token ids mean different things"):
        compare(tmp_path / "tokens", changed(reference, info={"tokenizer": "other"}), reference)


def test_an_unknown_dtype_is_refused(tmp_path):
    reference = random_caches()
    with pytest.raises(AccuracyError, match="no limits for a cache of int3"):
        compare(tmp_path, changed(reference, info={"dtype": "int3"}), reference)


def test_ranks_that_do_not_multiply_out_to_heads_are_refused(tmp_path):
    test = random_caches()
    folder = tmp_path / "test"
    test.write(folder)
    path = next(folder.rglob("kv.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_heads": 6}))
    with pytest.raises(LayoutError, match=r"request-0.*num_heads=6|pages are"):
        compare_caches(Capture(folder), changed(test, info={}).write(tmp_path / "reference"))
    with pytest.raises(LayoutError, match="pages are"):
        compare_caches(Capture(folder), Capture(folder))


def _damaged(folder: Path, what: str) -> str:
    if what == "truncated":
        path = next(folder.rglob("layer.2/rank0.safetensors"))
        path.write_bytes(path.read_bytes()[:-100])
        return "layer.2"
    if what == "missing rank":
        for path in folder.rglob("rank1.*"):
            path.unlink()
        return r"ranks \[0\] of 2"
    for path in folder.rglob("kv/*"):
        if path.is_dir():
            shutil.rmtree(path)
    return "no KV cache"


@pytest.mark.parametrize("what", ["truncated", "missing rank", "no caches"])
def test_a_damaged_capture_is_refused_by_name(tmp_path, what):
    reference = random_caches()
    changed(reference, ranks=2).write(tmp_path / "test")
    message = _damaged(tmp_path / "test", what)
    with pytest.raises(CaptureError, match=message):
        compare_caches(Capture(tmp_path / "test"), reference.write(tmp_path / "reference"))


def test_the_command_says_the_verdict_and_writes_it(tmp_path):
    reference = random_caches()
    reference.write(tmp_path / "reference")
    noisy(reference, 1, 1e-5).write(tmp_path / "clean")
    bad = changed(reference)
    bad.caches["request-0"][1, 0] *= 2
    bad.write(tmp_path / "bad")
    run = CliRunner().invoke
    clean = run(cli, ["kv", str(tmp_path / "clean"), str(tmp_path / "reference")])
    assert clean.exit_code == 0 and "passed" in clean.output
    failed = run(
        cli, ["kv", str(tmp_path / "bad"), str(tmp_path / "reference"), "--json", str(tmp_path / "kv.json")]
    )
    assert failed.exit_code == 1 and "gain" in failed.output
    assert read_outcome(tmp_path / "kv.json").faults[0].kind == "gain"
    missing = run(cli, ["kv", str(tmp_path / "nowhere"), str(tmp_path / "reference")])
    assert isinstance(missing.exception, CaptureError) or missing.exit_code == 2
