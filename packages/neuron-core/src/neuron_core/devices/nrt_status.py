# SPDX-License-Identifier: Apache-2.0
"""Status codes of the Neuron runtime, and what to do about each.

Codes and names are those of AWS's header ``nrt_status.h`` (aws-neuron-sdk: neuron-runtime/api/nrt_status.rst).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from neuron_core.errors import DeviceError

__all__ = ["NRT_STATUSES", "NrtStatus", "nrt_error", "nrt_status_in"]

GIB = 1024**3

_HARDWARE = "this is a fault of the chip: move to another instance and report the runtime's log"
_RESTART = "the core cannot go on: end this process, start it again, and replace the instance if it returns"
_REPORT = "see the runtime's log (NEURON_RT_LOG_LEVEL=INFO)"


@dataclass(frozen=True)
class NrtStatus:
    """One status: its number, its name in ``nrt_status.h`` and one line of advice."""

    code: int
    name: str
    advice: str


_TABLE = (
    (1, "NRT_FAILURE", f"a failure without a cause of its own; {_REPORT}"),
    (
        2,
        "NRT_INVALID",
        "the NEFF or an input does not fit: compile again with the installed SDK, same bucket",
    ),
    (3, "NRT_INVALID_HANDLE", "a handle of a closed runtime was used; start the process again"),
    (
        4,
        "NRT_RESOURCE",
        "device memory (HBM) is used up: use a smaller KV cache, fewer or smaller buckets, a shorter context or "
        "more tensor parallelism",
    ),
    (
        5,
        "NRT_TIMEOUT",
        "the step took longer than NEURON_RT_EXEC_TIMEOUT seconds; set it, or look for a lost rank",
    ),
    (6, "NRT_HW_ERROR", _HARDWARE),
    (7, "NRT_QUEUE_FULL", "more steps are in flight than the queue holds; wait for results sooner"),
    (
        9,
        "NRT_LOAD_NOT_ENOUGH_NC",
        "fewer cores are free than the NEFF needs: free cores or lower tensor parallelism",
    ),
    (
        10,
        "NRT_UNSUPPORTED_NEFF_VERSION",
        "the NEFF was compiled for another chip or by a newer compiler: compile it for this chip with the "
        "installed SDK; NEURON_RT_ALLOW_LEGACY_NEFF=1 lets an older chip's NEFF load, for tests only",
    ),
    (11, "NRT_FAIL_HOST_MEM_ALLOC", "host memory (RAM) is used up; free some or take a larger instance"),
    (13, "NRT_UNINITIALIZED", "the runtime was used before it was started"),
    (14, "NRT_CLOSED", "the runtime was used after it was closed"),
    (15, "NRT_QUEUE_EMPTY", "a queue was read that holds nothing"),
    (101, "NRT_EXEC_UNIT_UNRECOVERABLE", _RESTART),
    (
        1002,
        "NRT_EXEC_BAD_INPUT",
        "a tensor's size or name is not the NEFF's: the bucket and the artifact differ",
    ),
    (1003, "NRT_EXEC_COMPLETED_WITH_NUM_ERR", "the step produced NaN: check weights, dtype and FP8 scales"),
    (1004, "NRT_EXEC_COMPLETED_WITH_ERR", f"the step ended with an error; {_REPORT}"),
    (1005, "NRT_EXEC_NC_BUSY", "another process holds the core; a core belongs to one process"),
    (1006, "NRT_EXEC_OOB", "an index reached outside its tensor: check block tables and slots of the step"),
    (1100, "NRT_COLL_PENDING", "a collective is still running; wait for it"),
    (
        1200,
        "NRT_EXEC_HW_ERR_COLLECTIVES",
        "a collective waits for a rank that never came: look at the other ranks",
    ),
    (1201, "NRT_EXEC_HW_ERR_HBM_UE", _HARDWARE),
    (1202, "NRT_EXEC_HW_ERR_NC_UE", _HARDWARE),
    (1203, "NRT_EXEC_HW_ERR_DMA_ABORT", _HARDWARE),
    (1204, "NRT_EXEC_SW_NQ_OVERFLOW", "set NEURON_RT_ENABLE_DGE_NOTIFICATIONS=0 and try again"),
    (
        1205,
        "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE",
        "a memory cell failed and can be repaired: reboot the instance",
    ),
    (
        1206,
        "NRT_NETWORK_PROXY_FAILURE",
        "the network between instances failed: check EFA and its security group",
    ),
)

NRT_STATUSES: dict[int, NrtStatus] = {code: NrtStatus(code, name, advice) for code, name, advice in _TABLE}
"""Every status that is not a success, by number."""

_BY_NAME = {status.name: status for status in NRT_STATUSES.values()}
_NAME = re.compile(r"\bNRT_[A-Z_]+\b")
# `nrt_tensor_allocate status=4 message=...` of torch-neuronx, `err: 10` of the runtime's own log
_NUMBER = re.compile(r"\b(?:status|err)\s*[=:]\s*(\d+)\b")


def nrt_status_in(text: str) -> NrtStatus | None:
    """The first status a runtime message names, by name or by number; None when it names none."""
    for name in _NAME.findall(text):
        if name in _BY_NAME:
            return _BY_NAME[name]
    for number in _NUMBER.findall(text):
        if int(number) in NRT_STATUSES:
            return NRT_STATUSES[int(number)]
    return None


def nrt_error(what: str, text: str, memory: tuple[int, int] | None = None) -> DeviceError:
    """A ``DeviceError`` for a runtime failure while doing ``what``, with advice and the runtime's own words.

    ``memory`` is ``(used, free)`` HBM bytes of the logical core, as the runtime counts them; it is shown when
    memory is what ran out.
    """
    status = nrt_status_in(text)
    said = " ".join(text.split()) or "nothing"
    if status is None:
        return DeviceError(f"{what} failed: {said}")
    room = ""
    if status.code == 4 and memory is not None:
        used, free = memory
        room = f" ({used / GIB:.2f} GiB of {(used + free) / GIB:.2f} GiB used, {free / GIB:.2f} GiB free)"
    return DeviceError(
        f"{what} failed with status {status.code} ({status.name}): {status.advice}{room}; it said: {said}"
    )
