# SPDX-License-Identifier: Apache-2.0
"""Comparing captures: where two runs part."""
