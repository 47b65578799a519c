# SPDX-License-Identifier: Apache-2.0
"""Whether tokens are drawn as the parameters of a request say."""
