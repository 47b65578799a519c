# SPDX-License-Identifier: Apache-2.0
"""Runtime status codes against the published header, and the messages users reported."""

import re

import pytest

from neuron_core.devices.nrt_status import NRT_STATUSES, nrt_error, nrt_status_in

GIB = 1024**3

# aws-neuron-sdk: neuron-runtime/api/nrt_status.rst
HEADER = """
NRT_SUCCESS = 0, NRT_FAILURE = 1, NRT_INVALID = 2, NRT_INVALID_HANDLE = 3, NRT_RESOURCE = 4, NRT_TIMEOUT = 5,
NRT_HW_ERROR = 6, NRT_QUEUE_FULL = 7, NRT_LOAD_NOT_ENOUGH_NC = 9, NRT_UNSUPPORTED_NEFF_VERSION = 10,
NRT_FAIL_HOST_MEM_ALLOC = 11, NRT_UNINITIALIZED = 13, NRT_CLOSED = 14, NRT_QUEUE_EMPTY = 15,
NRT_EXEC_UNIT_UNRECOVERABLE = 101, NRT_EXEC_BAD_INPUT = 1002, NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003,
NRT_EXEC_COMPLETED_WITH_ERR = 1004, NRT_EXEC_NC_BUSY = 1005, NRT_EXEC_OOB = 1006, NRT_COLL_PENDING = 1100,
NRT_EXEC_HW_ERR_COLLECTIVES = 1200, NRT_EXEC_HW_ERR_HBM_UE = 1201, NRT_EXEC_HW_ERR_NC_UE = 1202,
NRT_EXEC_HW_ERR_DMA_ABORT = 1203, NRT_EXEC_SW_NQ_OVERFLOW = 1204, NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205,
NRT_NETWORK_PROXY_FAILURE = 1206
"""
DOCUMENTED = {int(code): name for name, code in re.findall(r"(NRT_\w+) = (\d+)", HEADER)}


def test_codes_and_names_are_those_of_the_header():
    assert {0: "NRT_SUCCESS", **{code: status.name for code, status in NRT_STATUSES.items()}} == DOCUMENTED
    assert all(code == status.code and status.advice for code, status in NRT_STATUSES.items())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NRT Error NRT_FAILURE(1): Failed to load model", 1),
        ('nrt_tensor_allocate status=4 message="Allocation Failure"', 4),
        ("ERROR NMGR:kmgr_load_nn_post_metrics Failed to load NN: /tmp/x.neff, err: 10", 10),
        ("NMGR:dlr_infer Inference completed with err: 1006. mode->h_nn=1001, start_nc=0", 1006),
        ("NRT:nrt_infodump Failure: NRT_EXEC_SW_NQ_OVERFLOW in nrt_execute()", 1204),
        ("RuntimeError: Could not load the model status=2 message=Invalid", 2),
    ],
)
def test_the_status_is_found_in_messages_as_users_see_them(text, code):
    status = nrt_status_in(text)
    assert status is not None and status.code == code
    error = str(nrt_error("loading graph.neff", text))
    assert error.startswith(
        f"loading graph.neff failed with status {code} ({DOCUMENTED[code]}): {status.advice}"
    )
    assert error.endswith(text)


def test_a_message_without_a_status_is_passed_on():
    assert nrt_status_in("status=77, err: 8, NRT_NOTHING") is None
    assert str(nrt_error("running", "the  chip\nis gone")) == "running failed: the chip is gone"


def test_a_failed_allocation_is_device_memory_with_numbers():
    text = 'nrt_tensor_allocate status=4 message="Allocation Failure"'
    error = str(nrt_error("placing the KV cache", text, memory=(23 * GIB, GIB // 2)))
    assert "device memory (HBM)" in error
    assert "23.00 GiB of 23.50 GiB used, 0.50 GiB free" in error
    assert "GiB" not in str(nrt_error("running", "status=6", memory=(GIB, GIB)))


def test_an_older_chips_neff_is_explained_with_the_variable_that_allows_it():
    error = str(nrt_error("loading", "Failed to load NN: x.neff, err: 10"))
    assert "NEURON_RT_ALLOW_LEGACY_NEFF=1" in error and "compile it for this chip" in error
