# SPDX-License-Identifier: Apache-2.0
"""Requests side by side, which nobody waits for once the first has failed or the user has had enough."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_parallel"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(work: Callable[[_Item], _Result], items: Sequence[_Item], threads: int) -> list[_Result]:
    """What ``work`` makes of each item, so many at a time; raises what the first of them raised that did.

    Threads of an executor are waited for when Python ends, and a request without an answer may take its whole timeout.
    These are not: after an error or Ctrl-C no other item is begun, and requests in flight are left behind.
    """
    futures: list[Future[_Result]] = [Future() for _ in items]
    left: Iterator[tuple[Future[_Result], _Item]] = iter(list(zip(futures, items, strict=True)))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                pair = next(left, None)
            if pair is None or not pair[0].set_running_or_notify_cancel():
                return
            try:
                pair[0].set_result(work(pair[1]))
            except BaseException as error:
                pair[0].set_exception(error)

    for _ in range(min(threads, len(items))):
        threading.Thread(target=run, daemon=True).start()
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
