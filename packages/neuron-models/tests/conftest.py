# SPDX-License-Identifier: Apache-2.0
"""Loads the test driver by path, because test folders are not packages."""

import importlib.util
from pathlib import Path

import pytest
import torch

# These models are tiny; threads that wait for each other on a busy machine cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def driver():
    spec = importlib.util.spec_from_file_location("models_test_driver", Path(__file__).parent / "driver.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
