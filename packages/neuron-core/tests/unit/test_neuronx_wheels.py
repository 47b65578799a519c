# SPDX-License-Identifier: Apache-2.0
"""The error that says what to install: real versions of the SDK's manifest, no address, a placeholder recognised."""

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import neuron_core
from neuron_core.doctor.compatibility import releases_of, torch_of
from neuron_core.graphs.compilers.hlo import XlaLowering
from neuron_core.graphs.compilers.vendor_wheels import WHEELS, VendorToolsMissing, wheels_hint

SOURCES = Path(neuron_core.__file__).parent.parent


# aws-neuron-sdk: src/helperscripts/n2-manifest.json, releases 2.31 and 2.32
@pytest.mark.parametrize(
    ("release", "sdk", "compiler", "runs_on"),
    [
        ("2.9", "2.31", "2.26.6360", "torch-neuronx==2.9.0.2.15.32035"),
        ("2.10", "2.31", "2.26.6360", "libtorch_neuronx_lite==2.10.0.1.0.696"),
        ("2.11", "2.32", "2.27.5334", "libtorch_neuronx_lite==2.11.0.1.0.1284"),
        ("2.12", "2.32", "2.27.5334", "libtorch_neuronx_lite==2.12.0.1.0.1284"),
    ],
)
def test_the_wheels_are_those_of_the_sdk_for_the_running_torch(release, sdk, compiler, runs_on):
    hint = wheels_hint(f"{release}.1+cpu")
    assert f"torch-xla=={release}.* and neuronx-cc=={compiler}.*" in hint and f"SDK {sdk}" in hint
    assert "PIP_EXTRA_INDEX_URL" in hint and "://" not in hint
    assert WHEELS[release].running == (runs_on,)


def test_the_doctors_table_agrees():
    for release, wheels in WHEELS.items():
        assert wheels.sdk in releases_of("torch", release)
        (compiler,) = [wheel for wheel in wheels.compiling if wheel.startswith("neuronx-cc")]
        assert wheels.sdk in releases_of("neuronx-cc", compiler.split("==")[1].removesuffix(".*"))
        for wheel in wheels.running:
            name, version = wheel.replace("_", "-").split("==")
            assert wheels.sdk in releases_of(name, version) and torch_of(version) == release


def test_a_torch_no_sdk_supports_is_told_which_one_to_use():
    hint = wheels_hint("2.13.0")
    assert "supports torch 2.13" in hint and "torch==2.12.* and torch-xla==2.12.*" in hint


def test_the_error_survives_the_way_from_a_worker_process(tmp_path):
    error = VendorToolsMissing.of("part 'x'", ["a is missing", "b is missing"], "2.12.0", tmp_path)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.captured == tmp_path and not again.recordable
    assert "a is missing; b is missing" in str(error) and str(tmp_path) in str(error)
    assert "kept" not in str(VendorToolsMissing.of("part 'x'", ["a"], "2.12.0", None))


def lowering_program(*planted, folder):
    for name, source in planted:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]; from neuron_core.graphs.compilers.xla_lowering import main"
    )
    command = [sys.executable, "-c", f"{code}; sys.exit(main([]))", str(folder), str(SOURCES)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('wrong package: use the other index')", "wrong package: use the other index"),
        ("raise OSError('libsomething.so: cannot open')", "libsomething.so"),
        ("__version__ = '1.0'", "torch_xla 1.0 is a placeholder"),
        ("", "torch_xla None is a placeholder"),
        ("class _XLAC: lowering = None\n__version__ = '1.9'", "torch_xla 1.9 is a placeholder"),
    ],
)
def test_a_package_that_only_has_the_name_is_missing(source, said, tmp_path):
    done = lowering_program(("torch_xla", source), folder=tmp_path)
    assert done.returncode == 4 and said in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_the_lowering_says_so():
    assert XlaLowering().version() == "absent"
    assert XlaLowering().missing() == "no lowering to HLO (No module named 'torch_xla')"
