# SPDX-License-Identifier: Apache-2.0
"""Servers that embed or classify: their settings, their runner, and the pooling of hidden states."""
