# SPDX-License-Identifier: Apache-2.0
"""What a step takes beside weights and cache, counted by hand for parts of known sizes."""

import pytest
import torch
from torch import nn

from neuron_core.activations import program_bytes
from neuron_core.graphs.program import Part, Program

T, H, WIDE = 24, 8, 40
FLOAT = 4


class Layer(nn.Module):
    """Makes ``[T, WIDE]`` twice and ``[T, H]`` twice, and writes into its cache."""

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self.up = nn.Linear(H, wide, bias=False)
        self.down = nn.Linear(wide, H, bias=False)

    def forward(self, hidden: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        kv[0].copy_(hidden.view(-1)[: kv.shape[1]])
        return hidden + self.down(torch.relu(self.up(hidden)))


def program(*layers: Layer) -> Program:
    parts = [Part(f"layer.{i}", layer, ("hidden", f"kv.{i}"), ("hidden",)) for i, layer in enumerate(layers)]
    return Program(tuple(parts), ("hidden",))


def specs(layers: int, blocks: int = 5) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    kv = {f"kv.{i}": ((blocks, 16), torch.float32) for i in range(layers)}
    return {"hidden": ((T, H), torch.float32), **kv}


def by_hand(wide: int = WIDE) -> int:
    """The input, what one layer makes, and the answer that may still be read while the next step runs."""
    return FLOAT * T * (H + (wide + wide + H + H) + H)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_layer_at_a_time_is_alive(device: str) -> None:
    with torch.device(device):
        layers = [Layer() for _ in range(3)]
    assert program_bytes(program(*layers), specs(3)) == by_hand()


def test_the_widest_layer_decides_wherever_it_stands() -> None:
    for place in range(3):
        layers = [Layer(100 if index == place else WIDE) for index in range(3)]
        assert program_bytes(program(*layers), specs(3)) == by_hand(100)


def test_the_cache_does_not_count_and_is_not_made() -> None:
    assert program_bytes(program(Layer()), specs(1, blocks=2**40)) == by_hand()


def test_a_value_that_waits_for_a_later_part_counts_while_it_waits() -> None:
    first = Part("first", nn.Linear(H, 1000, bias=False), ("hidden",), ("kept",))
    wide = Part("wide", Layer(), ("hidden", "kv.0"), ("hidden",))
    last = Part("last", nn.Linear(1000, 1, bias=False), ("kept",), ("end",))
    # `kept` is [T, 1000] and alive in `wide`.
    expected = FLOAT * T * (H + 1000 + (WIDE + WIDE + H + H) + 1)
    assert program_bytes(Program((first, wide, last), ("end",)), specs(1)) == expected
