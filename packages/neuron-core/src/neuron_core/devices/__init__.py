# SPDX-License-Identifier: Apache-2.0
"""Devices: where graphs run. The CPU device is the default; Neuron is used where its runtime starts."""
