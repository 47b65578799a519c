# SPDX-License-Identifier: Apache-2.0
"""The model runner in parts: requests, inputs, graphs, sampling, outputs, and the conductor over them."""
