# SPDX-License-Identifier: Apache-2.0
"""Comparing what two runs say of the next token."""
