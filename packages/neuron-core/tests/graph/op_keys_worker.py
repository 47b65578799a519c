# SPDX-License-Identifier: Apache-2.0
"""Prints the graph key of a small graph per op, with the sources as they are in this process's path."""

import json
import sys

import torch
from torch import nn

from neuron_core import ops
from neuron_core.graphs.capture import capture
from neuron_core.graphs.compilers.fx import FxCompiler
from neuron_core.graphs.key import graph_key
from neuron_core.graphs.program import Part, TensorSpec


class Norm(nn.Module):
    def forward(self, x, weight):
        return ops.rms_norm(x, weight, 1e-5)


class Gate(nn.Module):
    def forward(self, x, weight):
        return ops.silu_mul(x)


class Both(nn.Module):
    def forward(self, x, weight):
        return ops.silu_mul(ops.rms_norm(x, weight, 1e-5))


class Plain(nn.Module):
    def forward(self, x, weight):
        return x * weight


def key_of(module):
    part = Part("part", module, ("x", "weight"), ("y",))
    specs = (TensorSpec.contiguous((4, 8), torch.float32), TensorSpec.contiguous((8,), torch.float32))
    return graph_key(capture(part, specs), FxCompiler(), ()).digest


if __name__ == "__main__":
    print(json.dumps({cls.__name__: key_of(cls()) for cls in (Norm, Gate, Both, Plain)}))
    print(ops.__file__, file=sys.stderr)
