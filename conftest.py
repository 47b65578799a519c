# SPDX-License-Identifier: Apache-2.0
"""The marker by which a test says which feature it proves; ``tools/support_matrix.py`` collects them."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known: others are refused."""
    config.addinivalue_line(
        "markers", 'supports(feature, model): what this test proves; model is "llama", "qwen3" or "any"'
    )
