# SPDX-License-Identifier: Apache-2.0
"""Compilers: ``inductor`` (default on the CPU) and ``fx`` (interpreter of the pure graph, for debugging)."""
