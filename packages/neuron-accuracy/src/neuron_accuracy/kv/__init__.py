# SPDX-License-Identifier: Apache-2.0
"""Comparing KV caches, per layer and head."""
