# SPDX-License-Identifier: Apache-2.0
"""Static-shape graphs: buckets, capture, passes, keys, the compile cache and the compilers."""
