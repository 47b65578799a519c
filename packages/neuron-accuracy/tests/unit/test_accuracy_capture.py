# SPDX-License-Identifier: Apache-2.0
"""What a capture takes, how it is kept, and that nothing damaged is read."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from neuron_accuracy.capture.order import merge_order
from neuron_accuracy.capture.reader import Capture
from neuron_accuracy.capture.records import CacheRecord, RunRecord, StepRecord, StepRow
from neuron_accuracy.capture.spec import CaptureSpec
from neuron_accuracy.capture.writer import CaptureWriter
from neuron_accuracy.errors import CaptureError
from neuron_accuracy.layout import TensorLayout

_spec = importlib.util.spec_from_file_location("accuracy_captures", Path(__file__).parents[1] / "captures.py")
captures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(captures)

RUN = RunRecord(captures.info(), 2)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
)


def step(number=0, phase="prefill", requests=("a",), tokens=4):
    rows = tuple(
        StepRow(name, row * tokens, row, tuple(range(tokens)), tuple(range(row, row + tokens)))
        for row, name in enumerate(requests)
    )
    return StepRecord(number, f"{phase}_s8", phase, 8, 2, rows)


def tensors(*names, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 6, generator=generator) for name in names}


def writer(folder, spec=captures.EVERYTHING, rank=0, run=RUN):
    return CaptureWriter(folder, spec, run, rank=rank)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_read_is_what_was_written(tmp_path):
    spec = CaptureSpec(("*",), tensors=("output.*",), max_bytes=12345)
    values = {
        ("m.layers.0", f"output.{index}"): (torch.randn(8, 3) * 4).to(dtype)
        for index, dtype in enumerate(DTYPES)
    }
    for rank in (0, 1):
        writer(tmp_path, spec, rank).write_step(step(requests=("a/b", "ü")), values)
    capture = Capture(tmp_path)
    (read,) = capture.steps()
    assert (capture.run, capture.spec, read) == (RUN, spec, step(requests=("a/b", "ü")))
    assert capture.requests == ("a/b", "ü")
    assert capture.ranks("m.layers.0", read) == (0, 1)
    for (module, name), value in values.items():
        loaded = capture.load(module, name, read, 1)
        assert loaded.dtype == value.dtype and torch.equal(loaded.double(), value.double())
        part = capture.load(module, name, read, 0, rows=(2, 5))
        assert torch.equal(part.double(), value[2:5].double())
        capture.check(module, name, read)


def test_outputs_that_share_memory_and_scalars_are_kept(tmp_path):
    base = torch.arange(8.0)
    writer(tmp_path).write_step(
        step(),
        {("m", "output.0"): base[:4], ("m", "output.1"): base[2:6], ("m", "output.2"): torch.tensor(3.0)},
    )
    capture = Capture(tmp_path)
    loaded = [capture.load("m", f"output.{index}", capture.steps()[0]) for index in range(3)]
    assert [item.tolist() for item in loaded] == [[0, 1, 2, 3], [2, 3, 4, 5], 3]


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ({"modules": ("m.*.mlp",)}, {(0, "m.0.mlp", "output.0"), (1, "m.0.mlp", "output.0")}),
        ({"tensors": ("input.*",)}, {(0, "m.0.attn", "input.0"), (1, "m.0.attn", "input.0")}),
        (
            {"tensors": (), "modules": ("*.attn",), "steps": (0,)},
            {(0, "m.0.attn", "input.0"), (0, "m.0.attn", "output.0")},
        ),
        ({"phases": ("decode",), "modules": ("*.mlp",)}, {(1, "m.0.mlp", "output.0")}),
        ({"steps": (0,), "modules": ("*.mlp",)}, {(0, "m.0.mlp", "output.0")}),
        ({"requests": ("b*",), "modules": ("*.mlp",)}, {(1, "m.0.mlp", "output.0")}),
    ],
)
def test_a_spec_takes_what_it_says(tmp_path, spec, kept):
    held = tensors(("m.0.mlp", "output.0"), ("m.0.attn", "output.0"), ("m.0.attn", "input.0"))
    taker = writer(tmp_path, CaptureSpec(**{"modules": ("**",), **spec}))
    taker.write_step(step(0, "prefill", ("a",)), held)
    taker.write_step(step(1, "decode", ("a", "bb")), held)
    capture = Capture(tmp_path)
    found = {
        (item.number, module, name)
        for item in capture.steps()
        for module in capture.modules_of(item)
        for name in capture.tensors(module, item)
    }
    assert found == kept
    if "requests" in spec:
        assert [row.request for item in capture.steps() for row in item.rows] == ["bb"]


def test_of_ranks_that_are_not_taken_only_the_steps_are_written(tmp_path):
    spec = CaptureSpec(("**",), ranks=(1,))
    for rank in (0, 1):
        writer(tmp_path, spec, rank).write_step(step(), tensors(("m", "output.0")))
    capture = Capture(tmp_path)
    assert capture.ranks("m", capture.steps()[0]) == (1,)
    assert files(tmp_path) == [
        "capture.json",
        "dp0/prefill_s8_0/m/rank1.json",
        "dp0/prefill_s8_0/m/rank1.safetensors",
        "dp0/prefill_s8_0/step.json",
    ]


def test_a_capture_that_would_grow_too_large_ends_with_nothing_half_written(tmp_path):
    held = tensors(("m", "output.0"), ("n", "output.0"))
    size = sum(tensor.numel() * 4 for tensor in held.values())
    taker = writer(tmp_path, CaptureSpec(("**",), max_bytes=2 * size - 1))
    taker.write_step(step(0), held)
    before = files(tmp_path)
    with pytest.raises(CaptureError, match=rf"{2 * size} bytes.*max_bytes={2 * size - 1}; narrow modules"):
        taker.write_step(step(1), held)
    assert files(tmp_path) == before
    assert taker.written_bytes == size


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_holds_a_capture_is_refused(tmp_path, rank):
    writer(tmp_path, rank=rank).write_step(step(), tensors(("m", "output.0")))
    with pytest.raises(CaptureError, match="holds a capture already"):
        writer(tmp_path, rank=rank)
    writer(tmp_path, rank=1 - rank)


def test_a_write_that_fails_leaves_no_file(tmp_path):
    taker = writer(tmp_path)
    (tmp_path / "dp0" / "prefill_s8_0").mkdir(parents=True)
    (tmp_path / "dp0" / "prefill_s8_0" / "m").write_text("in the way")
    with pytest.raises(CaptureError, match=r"rank0\.safetensors cannot be written"):
        taker.write_step(step(), tensors(("m", "output.0")))
    assert files(tmp_path) == ["capture.json", "dp0/prefill_s8_0/m"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (StepRow("a", 6, 0, (0, 1, 2), (1, 2, 3)), "3 positions and 3 tokens from row 6 on, of 8 rows"),
        (StepRow("a", 0, 0, (0, 1), (1, 2, 3)), "2 positions and 3 tokens"),
        (StepRow("a", 0, 2, (0,), (1,)), "row 2 of 2 requests"),
    ],
)
def test_rows_that_do_not_fit_their_step_are_refused(tmp_path, bad, message):
    with pytest.raises(CaptureError, match=message):
        writer(tmp_path).write_step(StepRecord(0, "p", "prefill", 8, 2, (bad,)), {})


def test_a_step_is_written_once_and_not_after_the_end(tmp_path):
    taker = writer(tmp_path)
    taker.write_step(step(), tensors(("m", "output.0")))
    with pytest.raises(CaptureError, match="step 0 was written already"):
        taker.write_step(step(), tensors(("m", "output.0")))
    taker.close()
    with pytest.raises(CaptureError, match="is closed"):
        taker.write_step(step(1), {})
    with pytest.raises(CaptureError, match="rank 2 is none of the run's 2"):
        writer(tmp_path, rank=2)


def cache(**changes):
    values = {
        "request": "a/1",
        "token_ids": (5, 6, 7),
        "num_cached": 0,
        "block_size": 2,
        "block_ids": (4, 1),
        "freed": (False, True),
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 3,
    }
    return CacheRecord(**{**values, **changes})


def test_a_cache_is_kept_with_its_scales(tmp_path):
    pages = [torch.randn(2, 1, 2, 6).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [(torch.tensor(0.5), torch.tensor(2.0)), None]
    for rank in (0, 1):
        writer(tmp_path, CaptureSpec((), kv=True), rank).write_cache(cache(), pages, scales)
    capture = Capture(tmp_path)
    assert capture.caches() == (cache(),)
    assert capture.cache_ranks("a/1", 1) == (0, 1)
    first, second = (capture.load_pages("a/1", layer, 1) for layer in range(2))
    assert torch.equal(first["pages"].float(), pages[0].float())
    assert (float(first["k_scale"]), float(first["v_scale"]), set(second)) == (0.5, 2.0, {"pages"})
    with pytest.raises(CaptureError, match="written already"):
        CaptureWriter.write_cache(_reopened(tmp_path), cache(), pages)


def _reopened(folder):
    taker = object.__new__(CaptureWriter)
    taker.spec, taker.rank, taker._closed, taker._replica = CaptureSpec((), kv=True), 0, False, folder / "dp0"
    return taker


@pytest.mark.parametrize("shape", [(1, 1, 2, 6), (2, 1, 3, 6), (2, 1, 2, 5), (2, 2, 6)])
def test_pages_that_are_not_what_the_record_says_are_refused(tmp_path, shape):
    with pytest.raises(CaptureError, match=r"pages of layer 0 are .*not \[2, local heads, 2, 6\]"):
        writer(tmp_path, CaptureSpec((), kv=True)).write_cache(cache(), [torch.zeros(shape)] * 2)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _other_format(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "other/9"}))


def _without(key):
    def change(path):
        data = json.loads(path.read_text())
        del data[key]
        path.write_text(json.dumps(data))

    return change


def _changed(key, value, *path):
    """Well-formed JSON in which one value is another."""

    def change(file):
        data = json.loads(file.read_text())
        inside = data
        for name in path:
            inside = inside[name]
        inside[key] = value
        file.write_text(json.dumps(data))

    return change


MODULE = "dp0/prefill_s8_0/m"
STEP = "dp0/prefill_s8_0/step.json"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("capture.json", _cut, r"capture\.json cannot be read"),
        ("capture.json", Path.unlink, r"capture\.json is missing"),
        ("capture.json", _other_format, r"capture\.json is of format 'other/9'; this version reads"),
        ("capture.json", _without("info"), r"capture\.json is damaged"),
        ("dp0/prefill_s8_0/step.json", Path.unlink, r"step\.json is missing"),
        ("dp0/prefill_s8_0/step.json", _without("rows"), r"step\.json is damaged"),
        ("capture.json", _changed("parallel", None, "info"), r"capture\.json is damaged.*parallel is None"),
        ("capture.json", _changed("parallel", {"tp": "2"}, "info"), r"capture\.json is damaged.*parallel"),
        ("capture.json", _changed("vocab_size", "9", "info"), r"capture\.json is damaged.*vocab_size is '9'"),
        ("capture.json", _changed("info", None), r"capture\.json is damaged"),
        ("capture.json", _changed("names", ["m"]), r"capture\.json is damaged.*names"),
        ("capture.json", _changed("ranks", 0), r"capture\.json is damaged.*ranks is 0"),
        ("capture.json", _changed("spec", {"modules": 3}), r"capture\.json is damaged"),
        ("capture.json", _changed("heads", "4", "layouts", "m:output.0"), r"capture\.json is damaged.*heads"),
        (STEP, _changed("token_ids", [1], "rows", 0), r"step\.json is damaged.*4 positions and 1 tokens"),
        (STEP, _changed("token_ids", "1234", "rows", 0), r"step\.json is damaged.*token_ids is '1234'"),
        (STEP, _changed("positions", [0, 1, None, 3], "rows", 0), r"step\.json is damaged.*positions"),
        (STEP, _changed("begin", 5, "rows", 0), r"step\.json is damaged.*from row 5 on, of 8 rows"),
        (STEP, _changed("row", 2, "rows", 0), r"step\.json is damaged.*in row 2 of 2 requests"),
        (STEP, _changed("rows", ["a"]), r"step\.json is damaged"),
        (STEP, _changed("num_tokens", 8.5), r"step\.json is damaged.*num_tokens is 8\.5"),
        (f"{MODULE}/rank0.json", _changed("shape", "8", "tensors", "output.0"), r"damaged.*shape is '8'"),
        (f"{MODULE}/rank0.json", _changed("shape", [8.0, 6], "tensors", "output.0"), r"damaged.*shape"),
        (f"{MODULE}/rank0.json", _changed("dtype", 32, "tensors", "output.0"), r"damaged.*dtype is 32"),
        (f"{MODULE}/rank0.json", _changed("order", None), r"damaged.*order is None"),
        (f"{MODULE}/rank0.json", _cut, r"rank0\.json cannot be read"),
        (f"{MODULE}/rank0.json", Path.unlink, r"holds no rank's tensors"),
        (f"{MODULE}/rank0.safetensors", _cut, r"rank0\.safetensors cannot be read"),
        (f"{MODULE}/rank0.safetensors", Path.unlink, r"rank0\.safetensors is missing"),
        (f"{MODULE}/rank0.safetensors", _flip, r"rank0\.safetensors: output\.0 is not what was written"),
    ],
)
def test_damage_is_an_error_that_names_the_file(tmp_path, name, damage, message):
    run = RunRecord(captures.info(), 2, {"m:output.0": TensorLayout()})
    writer(tmp_path, run=run).write_step(step(), tensors(("m", "output.0")))
    damage(tmp_path / name)
    with pytest.raises(CaptureError, match=message):
        capture = Capture(tmp_path)
        capture.modules()
        capture.load("m", "output.0", capture.steps()[0])


def test_a_digest_is_checked_piece_by_piece_too(tmp_path, monkeypatch):
    monkeypatch.setattr("neuron_accuracy.capture.reader.CHECK_BYTES", 50)
    writer(tmp_path).write_step(step(), tensors(("m", "output.0")))
    capture = Capture(tmp_path)
    capture.check("m", "output.0", capture.steps()[0])
    _flip(tmp_path / MODULE / "rank0.safetensors")
    with pytest.raises(CaptureError, match="not what was written"):
        capture.check("m", "output.0", capture.steps()[0])


def test_a_renamed_step_is_not_taken_for_another(tmp_path):
    writer(tmp_path).write_step(step(), tensors(("m", "output.0")))
    shutil.move(tmp_path / "dp0" / "prefill_s8_0", tmp_path / "dp0" / "prefill_s8_1")
    with pytest.raises(CaptureError, match="is of step prefill_s8_0, not of prefill_s8_1"):
        Capture(tmp_path)


def test_names_that_do_not_exist_are_errors(tmp_path):
    writer(tmp_path).write_step(step(), tensors(("m.mlp", "output.0")))
    capture = Capture(tmp_path)
    with pytest.raises(CaptureError, match=r"did you mean 'output\.0'"):
        capture.load("m.mlp", "output.1", capture.steps()[0])
    with pytest.raises(CaptureError, match=r"did you mean 'm\.mlp'"):
        capture.first_step("m.mlb")
    with pytest.raises(CaptureError, match="is no folder"):
        Capture(tmp_path / "none")


def test_modules_are_in_the_order_they_ran(tmp_path):
    taker = writer(tmp_path)
    names = [("z", "output.0"), ("y.b", "output.0"), ("y", "output.0"), ("a", "output.0")]
    taker.write_step(step(0), tensors(*names[:1], *names[2:]))
    taker.write_step(step(1), tensors(*names))
    assert Capture(tmp_path).modules() == ("z", "y.b", "y", "a")
    assert merge_order([["b", "d"], ["a", "b", "c", "d", "e"]]) == ("a", "b", "c", "d", "e")
