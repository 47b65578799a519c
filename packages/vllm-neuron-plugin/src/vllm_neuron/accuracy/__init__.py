# SPDX-License-Identifier: Apache-2.0
"""Our engine as a subject of neuron-accuracy: what is captured of it, put into it, and asked of it."""
