# SPDX-License-Identifier: Apache-2.0
"""The exact inputs of a call, and running them again without the engine."""
