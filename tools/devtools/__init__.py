# SPDX-License-Identifier: Apache-2.0
"""What `tools/dev.py` is made of: one module per step of the set-up, standard library only."""
