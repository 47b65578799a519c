# SPDX-License-Identifier: Apache-2.0
"""Task evaluation by lm-eval, against thresholds and against a reference. Needs the extra ``tasks``."""
