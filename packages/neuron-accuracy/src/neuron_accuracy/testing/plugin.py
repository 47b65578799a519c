# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: the fixture ``assert_module_close`` and the marker ``module_accuracy``.

It is loaded in every pytest run of an environment that has this package, so it imports nothing until a test asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["assert_module_close", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "module_accuracy(seeds=10, gates=Gates()): number of inputs and limits of assert_module_close in this test",
    )


@pytest.fixture(name="assert_module_close")
def assert_module_close(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """:func:`neuron_accuracy.testing.modules.assert_module_close`, with the settings of the test's marker."""
    from neuron_accuracy.testing.modules import assert_module_close as check

    marker = request.node.get_closest_marker("module_accuracy")
    if marker is None:
        return check
    if marker.args or not marker.kwargs.keys() <= {"seeds", "gates"}:
        raise pytest.UsageError(
            f"module_accuracy takes seeds= and gates=, not {marker.args or ''}{sorted(marker.kwargs)}"
        )
    return functools.partial(check, **marker.kwargs)
