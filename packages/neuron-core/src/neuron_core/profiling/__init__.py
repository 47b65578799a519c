# SPDX-License-Identifier: Apache-2.0
"""Where the time of an engine goes: recorded, written as a Chrome trace, and added up per bucket."""
