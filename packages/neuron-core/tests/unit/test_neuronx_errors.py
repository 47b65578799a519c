# SPDX-License-Identifier: Apache-2.0
"""What a failed run of the vendor compiler says, against the documented codes and messages users reported."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from neuron_core.devices.host import Host
from neuron_core.graphs.compilers.vendor_errors import (
    ADVICE,
    CompilerRun,
    VendorCompileError,
    compilers_running,
    error_codes,
)

LOG = Path("kept/neuronx-cc.log")
GIB = 1024**3

# What aws-neuron-sdk: compiler/error-codes/ says each code is about -> a word the advice must have.
DOCUMENTED = {
    "EARG001": "logical core size",
    **dict.fromkeys(("EOOM001", "EOOM002", "EVRF009", "EXSP001"), "HBM"),
    **dict.fromkeys(("EBVF030", "EVRF007", "EXTP004"), "instructions"),
    "EMOD025": "static shapes",
    **dict.fromkeys(("EUOC002", "EVRF001", "EHCA005", "EVRF015"), "operator"),
    **dict.fromkeys(("ESPP004", "ESPP047", "EVRF004", "EVRF005", "EVRF051", "EVRF052"), "dtype"),
    **dict.fromkeys(("EVRF035", "EVRF060", "EVRF061", "EVRF062", "EVRF063"), "--implicit-integer-downcast"),
    "EVRF059": "NKI kernel",
    "EVRF065": "nki",
    "ITEN404": "prefix caching on trn1",
    "INLA001": "trn1",
}


def run(output="", returncode=1, **facts):
    facts = {"log_path": LOG, "versions": "neuronx-cc 2.27.1", "timeout_s": 60.0, **facts}
    return CompilerRun("part 'layer' of bucket decode_b4", returncode, output, **facts)


@pytest.mark.parametrize(("code", "word"), DOCUMENTED.items())
def test_every_documented_code_has_one_line_of_advice_and_stays_visible(code, word):
    said = f"2026-08-20T10:00:00Z [NCC_{code}] (dot.7) something about the graph - see the documentation"
    error = run(said, returncode=70).error()
    first, *rest = str(error).splitlines()
    assert word in first and f"[NCC_{code}]" in first
    assert "part 'layer' of bucket decode_b4" in first and str(LOG) in first and "neuronx-cc 2.27.1" in first
    assert rest == [said]
    assert error.code == f"NCC_{code}" and error.recordable


def test_the_table_covers_exactly_the_documented_rows():
    assert set(ADVICE) == {f"NCC_{code}" for code in DOCUMENTED}
    assert all("\n" not in advice for advice in ADVICE.values())


@pytest.mark.parametrize(
    ("output", "codes"),
    [
        ("ERROR [NCC_EVRF009] x\n[NCC_EVRF009] again, then NCC_EOOM001.", ("NCC_EVRF009", "NCC_EOOM001")),
        ("[TEN404] (_sine.127) Internal tensorizer error: Too many strides!", ("TEN404",)),
        ("XNCC_EVRF009 NCC_EVRF0091 NCC_EV1 [1234]", ()),
        ("[F137] neuronx-cc was forcibly killed", ("F137",)),
    ],
)
def test_codes_are_found_in_order_once_each(output, codes):
    assert error_codes(output) == codes


def test_the_old_form_of_a_code_gets_the_advice_of_the_new_one():
    """Row 33: the code of `too many strides` must survive; older compilers print it without NCC_I."""
    error = run("[TEN404] (_sine.127) Internal tensorizer error: BirCodeGenLoop:Too many strides!").error()
    assert "[TEN404]" in str(error) and "too many strides" in str(error).splitlines()[0]


@pytest.mark.parametrize(
    "output",
    [
        "2024-12-14T00:55:07Z [XCG863] (uint32<1 x 8> $13494:13494)0: ISA check failed - Please open a ticket",
        "[NCC_IXCG863] (uint32<1 x 8> $13494:13494)0: ISA check failed",
    ],
)
def test_a_failed_isa_check_names_log_and_versions(output):
    first = str(run(output).error()).splitlines()[0]
    assert "ISA check failed" in first and "XCG863]" in first
    assert str(LOG) in first and "neuronx-cc 2.27.1" in first


def test_an_internal_code_nobody_described_is_still_explained():
    error = run("[NCC_IRPX902] internal").error()
    assert "inside the compiler" in str(error) and error.code == "NCC_IRPX902"


@pytest.mark.parametrize(
    ("returncode", "output"),
    [
        (-9, ""),
        (137, ""),
        (70, "[F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient memory"),
        (1, "INFO:Neuron:generating HLO: context_encoding_model\nKilled\n"),
    ],
)
def test_a_killed_compiler_is_reported_as_host_memory_with_numbers(returncode, output):
    memory = psutil.virtual_memory()
    error = run(output, returncode, others=3).error(Host())
    first = str(error).splitlines()[0]
    found = re.search(r"([\d.]+) of ([\d.]+) GiB are free now and 3 other compilers ran beside it", first)
    assert found and float(found[2]) <= memory.total / GIB + 0.1
    assert 0 < float(found[1]) <= float(found[2])
    assert "RAM, not HBM" in first and "--jobs 1" in first and "elsewhere" in first
    assert not error.recordable


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"returncode": -6}, "aborted"),
        ({"returncode": 134}, "aborted"),
        ({"returncode": 70, "output": "[F134] neuronx-cc terminated abnormally"}, "aborted"),
        ({"returncode": None, "timeout_s": 90.0}, "did not end within 90 s"),
        ({"returncode": -15}, "signal 15 ended it"),
        ({"returncode": 0, "fault": "it reported success and wrote no NEFF"}, "wrote no NEFF"),
        ({"returncode": 2, "output": "libxml2.so.2: cannot open shared object file"}, "exit status 2"),
    ],
)
def test_what_the_machine_may_have_caused_is_not_remembered(facts, words):
    error = run(**facts).error()
    assert words in str(error).splitlines()[0]
    assert not error.recordable


def test_the_end_of_a_long_log_is_shown_and_all_of_it_kept():
    output = "\n".join(f"line {number}" for number in range(1000))
    error = run(output).error()
    assert "line 999" in str(error) and "line 900" not in str(error)
    assert error.log == output


def test_an_error_survives_the_way_from_a_worker_process():
    error = run("[NCC_EVRF009] too much", log_path=None).error()
    assert "log:" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, VendorCompileError)
    assert (str(again), again.code, again.log, again.recordable) == (
        str(error),
        error.code,
        error.log,
        error.recordable,
    )


def test_running_compilers_are_counted_without_their_own_children(tmp_path):
    name = "neuronx-cc-counted"
    script = tmp_path / name
    script.write_text(
        f"#!{sys.executable} -S\nimport os, time\nos.fork()\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)\n"
    )
    script.chmod(0o755)
    assert compilers_running(name) == 0
    started = [
        subprocess.Popen([script], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    try:
        pids = {int(process.stdout.readline()) for process in started for _ in range(2)}
        assert len(pids) == 4
        assert compilers_running(name) == 2
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            process.stdout.close()
    deadline = time.monotonic() + 10
    while compilers_running(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert compilers_running(name) == 0
