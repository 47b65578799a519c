# SPDX-License-Identifier: Apache-2.0
"""All tools over two runs, from the widest view to the narrowest."""
