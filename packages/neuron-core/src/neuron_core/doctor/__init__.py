# SPDX-License-Identifier: Apache-2.0
"""Checks of this machine, its Neuron packages and its settings: what ``neuron doctor`` prints."""
