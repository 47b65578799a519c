# SPDX-License-Identifier: Apache-2.0
"""Feeding a reference's tensors into a run, to find the module where it parts from it."""
