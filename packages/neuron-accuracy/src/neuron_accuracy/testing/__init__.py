# SPDX-License-Identifier: Apache-2.0
"""Holding a module against its reference in a test."""
