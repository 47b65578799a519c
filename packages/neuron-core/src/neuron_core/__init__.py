# SPDX-License-Identifier: Apache-2.0
"""Static-shape graphs compiled ahead of time, for AWS Neuron devices and for the CPU."""

__version__ = "0.1.0"
