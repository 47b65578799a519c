# SPDX-License-Identifier: Apache-2.0
"""``python -m neuron_core.cli``."""

from neuron_core.cli.main import main

main()
