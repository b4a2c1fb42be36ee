"""Every error of this folder, as a tree.

ExperimentError           (a ValueError)
├── UnknownTrace          a trace or column that is not packaged
└── Stalled               a simulated batcher that leaves requests waiting for ever
"""


class ExperimentError(ValueError):
    """Root of every error raised by `servax.experiments`."""


class UnknownTrace(ExperimentError):
    """A trace, or a column of it, is not among the packaged ones."""


class Stalled(ExperimentError):
    """A batcher under simulation neither launches nor says when it will."""
