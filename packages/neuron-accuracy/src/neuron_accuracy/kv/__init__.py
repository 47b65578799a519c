# SPDX-License-Identifier: Apache-2.0
"""KV caches of two runs held against each other: what is wrong, in which layer, head, block and position."""
