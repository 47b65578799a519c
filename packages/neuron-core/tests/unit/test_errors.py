# SPDX-License-Identifier: Apache-2.0
"""Errors keep their facts, also across processes, and point at what works."""

import pickle

import pytest

from neuron_core import errors


def test_config_error_names_setting_value_and_hint() -> None:
    error = errors.ConfigError("tensor_parallel_size", 5, "must divide 9 heads; 3 works")
    assert str(error) == "tensor_parallel_size=5: must divide 9 heads; 3 works"
    assert (error.setting, error.value, error.hint) == (
        "tensor_parallel_size",
        5,
        "must divide 9 heads; 3 works",
    )


def test_config_error_survives_the_executor_pipe() -> None:
    error = errors.ConfigError("block_size", "x", "16 works")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.ConfigError
    assert str(copy) == str(error)
    assert copy.hint == "16 works"


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("CheckpointError", ValueError),
        ("CapacityError", ValueError),
        ("DeviceError", RuntimeError),
        ("CompileError", Exception),
        ("UncompiledShapeError", Exception),
        ("CacheError", Exception),
    ],
)
def test_every_error_is_a_neuron_error_and_the_builtin_callers_expect(
    name: str, builtin: type[Exception]
) -> None:
    assert issubclass(getattr(errors, name), errors.NeuronError)
    assert issubclass(getattr(errors, name), builtin)


def test_unknown_name_hint_prefers_the_nearest_and_else_lists_all() -> None:
    valid = ("prefill_buckets", "decode_buckets")
    assert errors.unknown_name_hint("prefil_bucket", valid) == "did you mean 'prefill_buckets'?"
    assert errors.unknown_name_hint("zzz", valid) == "valid names are decode_buckets, prefill_buckets"
    assert errors.nearest_name("zzz", valid) is None
