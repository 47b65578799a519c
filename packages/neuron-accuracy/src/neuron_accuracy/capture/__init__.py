# SPDX-License-Identifier: Apache-2.0
"""Tensors of a run on disk: what to take, how it is written, how it is read."""
