# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-neuron``, and what it shares with ``neuron compile``."""
