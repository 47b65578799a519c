# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_neuron.cli``."""

from vllm_neuron.cli.main import main

main()
