# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: its layout in memory and the arithmetic of blocks and slots."""
