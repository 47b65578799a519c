# SPDX-License-Identifier: Apache-2.0
"""Environment variables: every one is read, checked or named, none is ignored in silence."""

import ast
import dataclasses
from pathlib import Path

import pytest

import neuron_core
from neuron_core.environ import INERT_NAMES, KNOWN_NAMES, Environment, size_in_bytes, unknown_names
from neuron_core.errors import ConfigError


def test_nothing_set_gives_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    read = Environment.read({})
    unset = dict.fromkeys(field.name for field in dataclasses.fields(Environment))
    off = dict.fromkeys(("require_compiled", "retry_failed", "cpu_compile"), False)
    cache = {"cache_dir": tmp_path / ".cache/vllm/neuron", "remote_timeout_s": 10.0, "trusted_keys": ()}
    assert dataclasses.asdict(read) == unset | off | cache


def test_every_setting_is_read(tmp_path: Path) -> None:
    for name in ("digests", "one.pem", "two.pem"):
        (tmp_path / name).write_text("")
    values = {
        "VLLM_NEURON_DEVICE": ("neuron", "device", "neuron"),
        "VLLM_NEURON_CACHE_DIR": (str(tmp_path / "new"), "cache_dir", tmp_path / "new"),
        "VLLM_NEURON_CACHE_MAX_SIZE": ("1.5GiB", "cache_max_bytes", 3 << 29),
        "VLLM_NEURON_REMOTE_CACHE": ("s3://bucket/x", "remote_cache", "s3://bucket/x"),
        "VLLM_NEURON_REMOTE_TIMEOUT": ("2.5", "remote_timeout_s", 2.5),
        "VLLM_NEURON_TRUSTED_DIGESTS": (f"{tmp_path}/digests", "trusted_digests", tmp_path / "digests"),
        "VLLM_NEURON_TRUSTED_KEYS": (
            f"{tmp_path}/one.pem:{tmp_path}/two.pem",
            "trusted_keys",
            (tmp_path / "one.pem", tmp_path / "two.pem"),
        ),
        "VLLM_NEURON_REQUIRE_COMPILED": ("1", "require_compiled", True),
        "VLLM_NEURON_RETRY_FAILED": ("1", "retry_failed", True),
        "VLLM_NEURON_CPU_COMPILE": ("1", "cpu_compile", True),
        "VLLM_NEURON_COMPILE_JOBS": ("3", "compile_jobs", 3),
        "NEURON_PLATFORM_TARGET_OVERRIDE": ("trn3-rev2", "platform_target", "trn3-rev2"),
        "NEURON_VISIBLE_DEVICES": ("0, 2,4-6", "visible_devices", (0, 2, 4, 5, 6)),
        "NEURON_RT_VISIBLE_CORES": ("0-3", "visible_cores", "0-3"),
        "NEURON_LOGICAL_NC_CONFIG": ("2", "logical_nc_config", 2),
    }
    assert values.keys() >= set(KNOWN_NAMES)
    read = Environment.read({name: text for name, (text, _, _) in values.items()})
    assert dataclasses.asdict(read) == {field: value for _, field, value in values.values()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("2KB", 2000), ("2KiB", 2048), ("3 gib", 3 << 30), ("1.5T", 1_500_000_000_000)],
)
def test_sizes_have_decimal_and_binary_units(text: str, expected: int) -> None:
    assert size_in_bytes("size", text) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"VLLM_CACHE_ROOT": "/a/b"}, "/a/b/neuron"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/vllm/neuron"),
        ({"XDG_CACHE_HOME": "/x", "VLLM_CACHE_ROOT": "/a"}, "/a/neuron"),
        ({"VLLM_NEURON_CACHE_DIR": "/c", "VLLM_CACHE_ROOT": "/a"}, "/c"),
    ],
)
def test_cache_directory_follows_vllm(variables: dict[str, str], expected: str) -> None:
    assert Environment.read(variables).cache_dir == Path(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_NEURON_DEVICE", "neurn", "did you mean 'neuron'?"),
        ("VLLM_NEURON_DEVICE", "gpu", "cpu"),
        ("VLLM_NEURON_REQUIRE_COMPILED", "maybe", "must be 0 or 1"),
        ("VLLM_NEURON_CPU_COMPILE", "1", "needs NEURON_PLATFORM_TARGET_OVERRIDE"),
        ("VLLM_NEURON_CACHE_MAX_SIZE", "much", "20GiB"),
        ("VLLM_NEURON_REMOTE_TIMEOUT", "-1", "above 0"),
        ("VLLM_NEURON_REMOTE_TIMEOUT", "nan", "above 0"),
        ("VLLM_NEURON_COMPILE_JOBS", "0", "at least 1"),
        ("VLLM_NEURON_TRUSTED_DIGESTS", "/nowhere/list", "is no file"),
        ("VLLM_NEURON_TRUSTED_KEYS", "/nowhere/key.pem", "is no file"),
        ("VLLM_NEURON_CPU_COMPILE", "yes", "must be 0 or 1"),
        ("NEURON_PLATFORM_TARGET_OVERRIDE", "trn22", "did you mean 'trn2'?"),
        ("NEURON_VISIBLE_DEVICES", "0,x", "'x'"),
        ("NEURON_VISIBLE_DEVICES", "3-1", "'3-1'"),
        ("NEURON_VISIBLE_DEVICES", "0,0", "twice"),
        ("NEURON_LOGICAL_NC_CONFIG", "3", "1 or 2"),
    ],
)
def test_wrong_value_names_the_variable_the_value_and_what_works(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Environment.read({name: value})
    assert str(caught.value).startswith(f"{name}={value!r}: ")
    assert message in str(caught.value)


def test_cache_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        Environment.read({"VLLM_NEURON_CACHE_DIR": str(tmp_path / "file")})


def test_visible_cores_set_by_the_user_is_refused_only_with_worker_processes() -> None:
    Environment.read({}).check_multiprocess()
    chosen = Environment.read({"NEURON_RT_VISIBLE_CORES": "0-1"})
    assert chosen.visible_cores == "0-1"
    with pytest.raises(ConfigError, match=r"NEURON_RT_VISIBLE_CORES='0-1'.*NEURON_VISIBLE_DEVICES"):
        chosen.check_multiprocess()


def test_unknown_and_inert_names_are_reported_once_each() -> None:
    mapping = dict.fromkeys(KNOWN_NAMES, "1") | {
        "VLLM_NEURON_DEVISE": "cpu",
        "NEURON_COMPILED_ARTIFACTS": "/x",
        "VLLM_NEURON_CPU_MODE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "NEURON_RT_LOG_LEVEL": "INFO",
    }
    found = unknown_names(mapping)
    assert list(found) == ["NEURON_COMPILED_ARTIFACTS", "VLLM_NEURON_CPU_MODE", "VLLM_NEURON_DEVISE"]
    assert "did you mean 'VLLM_NEURON_DEVICE'?" in found["VLLM_NEURON_DEVISE"]
    assert "VLLM_NEURON_CACHE_DIR" in found["NEURON_COMPILED_ARTIFACTS"]
    assert "VLLM_NEURON_DEVICE=cpu" in found["VLLM_NEURON_CPU_MODE"]


def test_no_name_is_both_known_and_inert() -> None:
    assert not set(KNOWN_NAMES) & set(INERT_NAMES)


def reads_environment(node: ast.AST) -> bool:
    """``os.environ[...]``, ``os.environ.get(...)``, ``... in os.environ`` or ``os.getenv(...)``."""

    def is_environ(part: ast.AST) -> bool:
        return isinstance(part, ast.Attribute) and part.attr == "environ"

    if isinstance(node, ast.Subscript):
        return is_environ(node.value) and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Compare):
        return any(is_environ(part) for part in node.comparators)
    if isinstance(node, ast.Attribute):
        return node.attr == "getenv" or (is_environ(node.value) and node.attr != "update")
    return False


def test_no_other_module_of_the_package_reads_the_environment() -> None:
    root = Path(neuron_core.__file__).parent
    readers = set()
    for path in root.rglob("*.py"):
        if any(reads_environment(node) for node in ast.walk(ast.parse(path.read_text()))):
            readers.add(path.relative_to(root).as_posix())
    assert readers <= {"environ.py"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("os.environ['A']", True),
        ("os.environ.get('A')", True),
        ("'A' in os.environ", True),
        ("os.getenv('A')", True),
        ("os.environ['A'] = 'b'", False),
        ("patch.dict(os.environ, {})", False),
    ],
)
def test_the_check_above_finds_reads(source: str, found: bool) -> None:
    assert any(map(reads_environment, ast.walk(ast.parse(source)))) is found
