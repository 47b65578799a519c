# SPDX-License-Identifier: Apache-2.0
"""What can be compared: a transformers model, a server, and whatever other packages contribute."""
