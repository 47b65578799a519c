# SPDX-License-Identifier: Apache-2.0
"""Find where two runs of a model part, and prove that they do not."""

__all__ = ["__version__"]

__version__ = "0.1.0"
