# SPDX-License-Identifier: Apache-2.0
"""A stream runs work in order, one at a time, and gives each its own result or exception."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from neuron_core.devices.cpu import CpuDevice
from neuron_core.devices.stream import InlineStream, Stream, ThreadStream
from neuron_core.errors import DeviceError


@pytest.fixture(params=[False, True], ids=["inline", "thread"])
def stream(request: pytest.FixtureRequest) -> Iterator[Stream]:
    made = CpuDevice().stream(overlap=request.param)
    yield made
    made.close()


def test_work_runs_in_order_and_never_two_at_a_time(stream: Stream) -> None:
    running, order = threading.Lock(), []

    def work(number: int) -> int:
        assert running.acquire(blocking=False)
        time.sleep(0.001)
        order.append(number)
        running.release()
        return number * number

    executions = [stream.submit(lambda number=number: work(number)) for number in range(20)]
    assert [execution.result() for execution in executions] == [number**2 for number in range(20)]
    assert order == list(range(20))
    for before, after in itertools.pairwise(executions):
        assert before.started <= before.ended <= after.started


def test_an_exception_belongs_to_its_work_alone(stream: Stream) -> None:
    failing = stream.submit(lambda: [][1])
    assert stream.submit(lambda: 5).result() == 5
    with pytest.raises(IndexError):
        failing.result()


def test_a_closed_stream_refuses_and_has_done_what_it_took(stream: Stream) -> None:
    done: list[int] = []
    stream.submit(lambda: done.append(1))
    stream.close()
    stream.close()
    assert done == [1]
    with pytest.raises(DeviceError, match="closed"):
        stream.submit(lambda: None)


def test_only_the_thread_stream_leaves_the_caller_free() -> None:
    inline, beside = InlineStream(), ThreadStream()
    assert inline.submit(threading.get_ident).result() == threading.get_ident()
    gate = threading.Event()
    waiting = beside.submit(gate.wait)
    assert not waiting.done()  # the caller got here while the work waits
    gate.set()
    assert waiting.result() is True
    assert beside.submit(threading.get_ident).result() != threading.get_ident()
    beside.close()


def test_an_idle_stream_keeps_no_result_alive(stream: Stream) -> None:
    class Result:
        pass

    kept = weakref.ref(stream.submit(Result).result())
    stream.submit(lambda: None).result()
    gc.collect()
    assert kept() is None
