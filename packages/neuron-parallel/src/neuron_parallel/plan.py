# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one server share a model."""

from dataclasses import dataclass

from neuron_core.errors import ConfigError


@dataclass(frozen=True)
class ParallelPlan:
    """The degrees of parallelism of one server; checked once, against a model's sizes, before weights
    load.
    """

    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a degree that is not a positive integer."""
        if self.tensor_parallel_size < 1:
            raise ConfigError("tensor_parallel_size", self.tensor_parallel_size, "must be at least 1; use 1")

    @property
    def world_size(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tensor_parallel_size

    def check_model(self, *, num_heads: int, num_kv_heads: int, intermediate_size: int) -> None:
        """Raise `ConfigError`, with the sizes that work, unless the model's sizes divide over the ranks.

        Query heads and the MLP's intermediate size are split. KV heads are split while there are at least as
        many as ranks and replicated beyond that, so one count must divide the other.
        """
        size = self.tensor_parallel_size
        problems = _problems(size, num_heads, num_kv_heads, intermediate_size)
        if problems:
            working = [
                n
                for n in range(1, num_heads + 1)
                if not _problems(n, num_heads, num_kv_heads, intermediate_size)
            ]
            raise ConfigError("tensor_parallel_size", size, f"{'; '.join(problems)}; use {_either(working)}")


def _problems(size: int, num_heads: int, num_kv_heads: int, intermediate_size: int) -> list[str]:
    found = []
    if num_heads % size:
        found.append(f"does not divide {num_heads} attention heads")
    if num_kv_heads % size and size % num_kv_heads:
        found.append(f"neither divides nor is a multiple of {num_kv_heads} KV heads")
    if intermediate_size % size:
        found.append(f"does not divide the intermediate size {intermediate_size}")
    return found


def _either(values: list[int]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
