# SPDX-License-Identifier: Apache-2.0
"""The command line ``neuron``; what a command needs is imported when it runs, so that ``--help`` stays fast."""
