# SPDX-License-Identifier: Apache-2.0
"""Needs playwright, which no package of ours requires: `nox -s browser` makes an environment for it."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]
