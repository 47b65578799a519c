# SPDX-License-Identifier: Apache-2.0
"""`neuron cache`: what it lists, measures, verifies and removes is what is on disk."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from neuron_core.cli.local import resolve
from neuron_core.cli.main import neuron
from neuron_core.errors import CacheError, CompileError
from neuron_core.graphs.cache import CompileCache
from neuron_core.graphs.key import GraphKey

KEYS = [GraphKey.of({"graph": name}) for name in ("first", "second", "third")]


def fill(root: Path, key: GraphKey, size: int, compiler: str, part: str) -> Path:
    def compile_into(staging: Path) -> dict[str, str]:
        (staging / "artifact.bin").write_bytes(os.urandom(size))
        return {"part": part, "bucket": f"decode_b{size}", "compiler": compiler}

    return CompileCache(root).get_or_compile(key, compile_into)[0].path


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three entries written by a process that has ended."""
    source = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from test_cli_cache import KEYS, fill;"
        "[fill(Path(sys.argv[2]), k, 1000 * 2**n, c, p) for n, (k, c, p) in"
        " enumerate(zip(KEYS, ('fx', 'inductor', 'inductor'), ('embed', 'layer.0', 'head[greedy]')))]"
    )
    folder = tmp_path_factory.mktemp("filled")
    command = [sys.executable, "-c", source, str(Path(__file__).parent), str(folder)]
    subprocess.run(command, check=True, timeout=120)
    return folder


@pytest.fixture
def root(filled: Path, tmp_path: Path) -> Path:
    """The three entries, used one, two and three days ago."""
    shutil.copytree(filled, tmp_path / "cache")
    for days, key in enumerate(KEYS, start=1):
        used = time.time() - days * 86400 - 60
        os.utime(tmp_path / "cache/graphs" / key.digest / "COMPLETE", (used, used))
    return tmp_path / "cache"


def invoke(root: Path, *arguments: str, **kwargs: str) -> Result:
    return CliRunner().invoke(neuron, ["cache", *arguments, "--cache-dir", str(root)], **kwargs)


def read_json(root: Path, *arguments: str) -> dict:
    done = invoke(root, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_ls_lists_every_entry_with_what_its_manifest_and_the_disk_say(root: Path) -> None:
    listed = read_json(root, "ls")
    assert [entry["key"] for entry in listed["entries"]] == [key.digest for key in KEYS]
    for days, entry in enumerate(listed["entries"], start=1):
        folder = root / "graphs" / entry["key"]
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {name: entry[name] for name in ("part", "bucket", "compiler")} == {
            name: manifest[name] for name in ("part", "bucket", "compiler")
        }
        assert entry["size_bytes"] == bytes_on_disk(folder)
        assert days * 86400 < entry["last_used_s"] < days * 86400 + 600
        assert 0 <= entry["age_s"] < 600 and entry["in_use"] is False


def test_ls_prints_a_table_in_which_square_brackets_stay(root: Path) -> None:
    shown = invoke(root, "ls").stdout
    (row,) = [line for line in shown.splitlines() if KEYS[2].digest[:12] in line]
    assert "head[greedy]" in row and "decode_b4000" in row and "3 d" in row
    assert f"3 entries, {bytes_on_disk(root / 'graphs') / 1024:.1f} KiB, in {root}" in shown


def test_ls_says_what_a_running_process_uses(root: Path) -> None:
    CompileCache(root).lookup(KEYS[1].digest)  # this process, until it ends
    used = {entry["key"]: entry["in_use"] for entry in read_json(root, "ls")["entries"]}
    assert used == {KEYS[0].digest: False, KEYS[1].digest: True, KEYS[2].digest: False}


def test_a_damaged_manifest_does_not_hide_the_others(root: Path) -> None:
    (root / "graphs" / KEYS[0].digest / "manifest.json").write_text("{")
    assert len(read_json(root, "ls")["entries"]) == 3
    assert read_json(root, "du")["use"]["graphs (unknown)"]["count"] == 1


def test_du_counts_entries_by_compiler_and_other_folders_by_name(root: Path) -> None:
    (root / "toolchain" / "header").mkdir(parents=True)
    (root / "toolchain" / "header" / "kernels.h.gch").write_bytes(b"0" * 12345)
    use = read_json(root, "du")
    fx, inductor = use["use"]["graphs (fx)"], use["use"]["graphs (inductor)"]
    assert (fx["count"], inductor["count"]) == (1, 2)
    assert fx["size_bytes"] + inductor["size_bytes"] == bytes_on_disk(root / "graphs")
    assert use["use"]["toolchain"] == {"count": 1, "size_bytes": 12345}
    assert use["size_bytes"] == bytes_on_disk(root)
    assert "12.1 KiB" in invoke(root, "du").stdout


def test_verify_names_the_damaged_file_and_fails(root: Path) -> None:
    assert invoke(root, "verify").exit_code == 0
    file = root / "graphs" / KEYS[1].digest / "artifact.bin"
    content = bytearray(file.read_bytes())
    content[999] ^= 4
    file.write_bytes(content)
    done = invoke(root, "verify")
    assert done.exit_code == 1
    assert KEYS[1].digest in done.stdout and "artifact.bin" in done.stdout
    assert "2 of 3 entries are whole" in done.stdout
    assert file.exists(), "verify must change nothing"
    report = json.loads(invoke(root, "verify", "--json").stdout)
    assert list(report["bad"]) == [KEYS[1].digest] and report["verified"] == 2
    assert invoke(root, "verify", KEYS[0].digest[:10]).exit_code == 0
    assert invoke(root, "verify", KEYS[1].digest[:10]).exit_code == 1


def test_prune_keeps_the_most_recently_used_within_the_size(root: Path) -> None:
    largest = bytes_on_disk(root / "graphs" / KEYS[0].digest)
    dry = read_json(root, "prune", "--max-size", str(largest), "--dry-run")
    assert dry["evicted"] == [KEYS[2].digest, KEYS[1].digest]
    assert len(read_json(root, "ls")["entries"]) == 3
    done = invoke(root, "prune", "--max-size", str(largest))
    assert done.exit_code == 0 and f"{KEYS[2].digest[:12]} removed" in done.stdout
    assert [entry["key"] for entry in read_json(root, "ls")["entries"]] == [KEYS[0].digest]


def test_prune_removes_what_nobody_used_for_long(root: Path) -> None:
    assert read_json(root, "prune", "--older-than", "60h")["evicted"] == [KEYS[2].digest]
    assert read_json(root, "prune", "--older-than", "1d")["evicted"] == [KEYS[1].digest, KEYS[0].digest]


def test_prune_leaves_what_a_process_uses_and_says_so(root: Path) -> None:
    CompileCache(root).lookup(KEYS[2].digest)
    used = time.time() - 10 * 86400
    os.utime(root / "graphs" / KEYS[2].digest / "COMPLETE", (used, used))
    done = invoke(root, "prune", "--older-than", "5d")
    assert "1 of them only because they are in use" in done.stdout
    assert (root / "graphs" / KEYS[2].digest).is_dir()


def test_prune_without_a_limit_uses_the_configured_one_or_asks(root: Path) -> None:
    done = invoke(root, "prune")
    assert done.exit_code == 2 and "--max-size" in done.stderr
    done = CliRunner().invoke(
        neuron,
        ["cache", "prune", "--cache-dir", str(root)],
        env={"VLLM_NEURON_CACHE_MAX_SIZE": "1"},
    )
    assert done.exit_code == 0 and list((root / "graphs").iterdir()) == []


@pytest.mark.parametrize("value", ["5x", "-1", "lots", "1 week"])
def test_a_limit_that_is_no_size_or_age_is_a_usage_error(root: Path, value: str) -> None:
    assert invoke(root, "prune", "--max-size", value).exit_code == 2
    done = invoke(root, "prune", "--older-than", value)
    assert done.exit_code == 2 and "30d" in done.stderr


def test_a_folder_that_is_no_cache_is_an_error_and_stays_as_it_was(tmp_path: Path) -> None:
    done = invoke(tmp_path, "ls")
    assert done.exit_code == 1 and "is no compile cache" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_configured_cache_is_used(root: Path) -> None:
    done = CliRunner().invoke(neuron, ["cache", "ls"], env={"VLLM_NEURON_CACHE_DIR": str(root)})
    assert done.exit_code == 0 and "3 entries" in done.stdout


def hashes(*texts: str) -> list[str]:
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_the_beginning_of_a_key_is_enough_while_it_is_unique() -> None:
    keys = ["abc" + "0" * 61, "abd" + "0" * 61, "f" * 64]
    assert resolve("f", keys) == keys[2]
    assert resolve("ABC", keys) == keys[0]
    with pytest.raises(CacheError, match=r"'ab' is the beginning of 2 keys: abc0\w+, abd0\w+$"):
        resolve("ab", keys)


def test_an_ambiguous_beginning_is_answered_with_beginnings_that_are_not() -> None:
    common = "a" * 40
    keys = [common + tail * 24 for tail in "bcde"]
    with pytest.raises(CacheError) as caught:
        resolve("aaa", keys)
    shown = str(caught.value).partition("keys: ")[2].partition(" and 1 more")[0].split(", ")
    assert [resolve(each, keys) for each in shown] == keys[:3]


def test_an_unknown_key_names_the_closest() -> None:
    keys = hashes("a", "b", "c", "d", "e")
    typed = keys[3][:6] + ("0" if keys[3][6] != "0" else "1") + keys[3][7:10]
    with pytest.raises(CacheError, match=rf"no entry has the key '{typed}'; closest: {keys[3][:12]}"):
        resolve(typed, keys)
    with pytest.raises(CacheError, match="the cache is empty"):
        resolve("abc", [])


def test_an_unknown_key_on_the_command_line_is_an_error(root: Path) -> None:
    done = invoke(root, "ls", "zzzz")
    assert done.exit_code == 1 and "no entry has the key 'zzzz'; closest: " in done.stderr
    assert any(key.digest[:12] in done.stderr for key in KEYS)


def test_what_failed_to_compile_is_no_entry(root: Path) -> None:
    def fail(staging: Path) -> dict[str, str]:
        raise CompileError("no")

    with pytest.raises(CompileError):
        CompileCache(root).get_or_compile(GraphKey.of({"graph": "bad"}), fail)
    assert len(read_json(root, "ls")["entries"]) == 3
    assert read_json(root, "du")["use"]["failures"]["count"] == 2
