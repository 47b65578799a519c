# SPDX-License-Identifier: Apache-2.0
"""`neuron calibrate`: the file it writes, what it says, and what it refuses before it reads a weight."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from neuron_core.cli.main import neuron
from neuron_core.devices.host import Host
from neuron_models import build_model
from neuron_models.kv_scales import load_kv_scales
from neuron_parallel import ParallelGroups

FIRST = [5, 17, 99, 3, 42, 8, 61, 7, 7, 30, 31, 32]
SECOND = [1, 2, 4, 90]

# Kernels that a process has loaded stay, and other tests of this one use block sizes they do not take.
RUNS = """
import json, sys
from click.testing import CliRunner
from neuron_core.cli.main import neuron
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(neuron, ["calibrate", *arguments])
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""


@pytest.fixture(scope="module")
def folder(driver, tmp_path_factory):
    """A tiny random model whose tokenizer reads `t7` as token 7, and two texts beside it."""
    root = tmp_path_factory.mktemp("calibrate")
    config = driver.llama_config()
    driver.write_checkpoint(config, root / "model")
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root / "model")
    for name, ids in (("first", FIRST), ("second", SECOND)):
        (root / f"{name}.txt").write_text(" ".join(f"t{i}" for i in ids))
    return root


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Exit code, output and errors of four calibrations, one after the other, and the files after the first three."""
    texts = ["--texts", str(folder / "first.txt"), "--texts", str(folder / "second.txt")]
    exact = [str(folder / "model"), *texts, "--tokens", "10", "--window", "4"]
    other = str(folder / "other.safetensors")
    arguments = [
        [*exact, "--json"],
        [*exact, "--per-head"],
        [*exact, "--per-head", "--output", other],
        [str(folder / "model"), *texts, "--per-head", "--output", other, "--overwrite", "--json"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def peaks(folder, windows):
    """``[k and v, layers, heads]``: the largest magnitudes that transformers caches for the windows."""
    reference = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    found = []
    for window in windows:
        with torch.no_grad():
            cache = reference(torch.tensor([window]), use_cache=True).past_key_values
        layers = [torch.stack((layer.keys, layer.values)).abs().amax(dim=(1, 3, 4)) for layer in cache.layers]
        found.append(torch.stack(layers, dim=1))
    return torch.stack(found).amax(dim=0)


def check_scales(file, expected):
    """Each scale is one of the sixteen from its peak over 448 on, a sixteenth of an octave apart."""
    scales = load_file(file)
    assert len(scales) == 6
    for layer in range(3):
        for kind, row in (("k", 0), ("v", 1)):
            scale = scales[f"model.layers.{layer}.self_attn.{kind}_scale"]
            peak = expected[row, layer] if scale.numel() == 2 else expected[row, layer].max()
            steps = torch.log2(scale * 448 / peak) * 16
            torch.testing.assert_close(steps, steps.round(), atol=0.01, rtol=0.0)
            assert bool((steps > -0.5).all() and (steps < 15.5).all())


def test_the_scales_are_those_of_the_windows_that_were_asked_for(folder, runs):
    code, output, errors = runs[0]
    assert (code, errors) == (0, "")
    said, file = json.loads(output), folder / "model" / "kv_scales.safetensors"
    windows = [FIRST[:4], FIRST[4:8], FIRST[8:10], SECOND]
    check_scales(file, peaks(folder, windows))
    assert said["file"] == str(file) and said["tokens"] == 14
    assert said["texts"] == {str(folder / "first.txt"): 10, str(folder / "second.txt"): 4}
    assert said["scales"] == {name: scale.tolist() for name, scale in load_file(file).items()}
    assert said["serve"] == f"vllm serve {folder / 'model'} --kv-cache-dtype fp8"


def test_an_existing_file_is_kept_unless_told_otherwise(folder, runs):
    code, output, errors = runs[1]
    file = folder / "model" / "kv_scales.safetensors"
    assert (code, output) == (1, "")
    assert errors == (
        f"Error: --output='{file}': exists already; give --overwrite, or another file as --output\n"
    )
    assert all(scale.numel() == 1 for scale in load_file(file).values())  # as the first run left it
    code, output, _ = runs[3]
    assert code == 0 and json.loads(output)["tokens"] == 16
    check_scales(folder / "other.safetensors", peaks(folder, [FIRST, SECOND]))


def test_the_report_names_texts_ranges_file_and_command(folder, runs):
    code, output, errors = runs[2]
    assert (code, errors) == (0, "")
    other = folder / "other.safetensors"
    for part in (
        f"{folder / 'first.txt'}: 10 tokens",
        "key scales: 6, one for each KV head, ",
        f"written to {other} in ",
        f"""--kv-cache-dtype fp8 --additional-config '{{"neuron_config": {{"kv_scales": "{other}"}}}}'""",
    ):
        assert part in output


def test_the_file_loads_on_any_number_of_ranks(folder, runs, driver):
    groups = ParallelGroups.single()
    model = build_model(
        driver.llama_config(),
        dtype=torch.float32,
        groups=groups,
        block_size=16,
        kv_dtype=torch.float8_e4m3fn,
    )
    stats = load_kv_scales(model, folder / "model", groups.tp, 0)
    assert (stats.num_loaded, stats.num_default) == (6, 0)


def refused(*arguments: object, code: int = 1) -> str:
    done = CliRunner().invoke(neuron, ["calibrate", *map(str, arguments)])
    assert done.exit_code == code and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert code == 2 or done.stderr.splitlines() == [line]
    return line


@pytest.fixture
def unreadable(folder, tmp_path):
    """The model with a weight file that nobody can read: what is refused is refused before it is opened."""
    model = tmp_path / "model"
    model.mkdir()
    for file in (folder / "model").iterdir():
        (model / file.name).write_bytes(b"" if file.suffix == ".safetensors" else file.read_bytes())
    (model / "kv_scales.safetensors").unlink(missing_ok=True)
    return model


def test_wrong_input_is_refused_before_weights_are_read(unreadable, folder, tmp_path):
    text = folder / "first.txt"
    assert "window=65: is more than the model's length; 64 works" in refused(
        unreadable, "--texts", text, "--window", 65
    )
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert f"--texts='{empty}': holds no text" in refused(unreadable, "--texts", empty)
    assert f"--texts='{binary}': is not a file of UTF-8" in refused(unreadable, "--texts", binary)
    nowhere = tmp_path / "no" / "scales.safetensors"
    assert f"--output='{nowhere}': is in a folder that does not exist" in refused(
        unreadable, "--texts", text, "--output", nowhere
    )
    assert "--texts" in refused(unreadable, code=2)
    assert "does not exist" in refused(tmp_path / "none", "--texts", text, code=2)
    assert not (unreadable / "kv_scales.safetensors").exists()


def edit(config: Path, **changes: object) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def test_a_folder_that_is_no_model_is_refused_by_what_it_lacks(unreadable, folder, tmp_path):
    text = folder / "first.txt"
    config = unreadable / "config.json"
    edit(config, architectures=["GPT2LMHeadModel"])
    assert "architectures=['GPT2LMHeadModel']: is not supported" in refused(unreadable, "--texts", text)
    edit(config, architectures=["LlamaForCausalLM"], vocab_size=50)
    assert "tokenizer of another model: token 99" in refused(unreadable, "--texts", text)
    for file in unreadable.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer that can be read" in refused(unreadable, "--texts", text)
    config.unlink()
    assert "has no config.json that can be read" in refused(unreadable, "--texts", text)


def test_a_model_larger_than_the_host_is_refused_before_weights_are_read(unreadable, folder, monkeypatch):
    rows = 1 << 36  # of 32 float32, twice: 16 TiB
    edit(unreadable / "config.json", vocab_size=rows, dtype="float32")
    line = refused(unreadable, "--texts", folder / "first.txt")
    assert "weights of 16384.0 GiB" in line and "do not fit into" in line and "free" in line
    edit(unreadable / "config.json", vocab_size=101)
    monkeypatch.setattr(Host, "available_memory_bytes", lambda self: 1 << 40)
    assert "not a complete safetensors file" in refused(unreadable, "--texts", folder / "first.txt")
