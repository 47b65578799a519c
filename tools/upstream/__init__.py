# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests, from its source distribution, run against this plugin: `nox -s upstream`."""
