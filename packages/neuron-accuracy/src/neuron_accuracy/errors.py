# SPDX-License-Identifier: Apache-2.0
"""What makes a comparison impossible. What makes it fail is a `Finding`."""

from neuron_core.errors import NeuronError

__all__ = ["AccuracyError", "CaptureError", "LayoutError", "SubjectError"]


class AccuracyError(NeuronError):
    """Two things cannot be compared; the message names what is wrong and what would do."""


class CaptureError(AccuracyError):
    """A capture cannot be written or read: a limit is reached, a file is missing, truncated or of another format."""


class LayoutError(AccuracyError, ValueError):
    """What ranks hold does not make one tensor under the declared layout."""


class SubjectError(AccuracyError):
    """A run cannot do what was asked of it: a server without log-probabilities, a model without such a module."""
