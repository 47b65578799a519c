# SPDX-License-Identifier: Apache-2.0
"""Outcomes as one HTML page that needs no network."""
