# SPDX-License-Identifier: Apache-2.0
"""Tasks that need no download: items as JSON lines, and what lm-eval is to do with them as YAML."""
