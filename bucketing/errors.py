"""Every error of this folder, as a tree.

BucketingError            (a ValueError)
├── LadderError           rungs that are not strictly rising positive integers
├── SchemeError           a scheme's parameters, or its text form
├── GridError             axes, buckets or limits of a grid
│   └── CoverageError     an admissible shape that no bucket holds and no split reaches
├── DoesNotFit            a size or shape beyond what the ladder or grid holds
├── CostError             seconds that are NaN, infinite or negative
├── FitError              a fit without data, or a budget that nothing meets
├── PlanError             a waiting list that cannot be planned as given
├── PaddingError          arrays that do not fit the buffer they are written to
├── PackingError          lengths that do not fit a packed row
└── TraceError            observations of traffic that are not sizes, counts or times
"""


class BucketingError(ValueError):
    """Root of every error raised by `servax.bucketing`."""


class LadderError(BucketingError):
    """The rungs of a ladder are not strictly rising positive integers."""


class SchemeError(BucketingError):
    """A scheme got parameters, or a text form, that it cannot make a ladder of."""


class GridError(BucketingError):
    """The axes, buckets or limits of a grid contradict each other."""


class CoverageError(GridError):
    """An admissible shape has neither a bucket nor a split into buckets."""


class DoesNotFit(BucketingError):
    """A size or shape lies beyond the largest rung or bucket."""


class CostError(BucketingError):
    """A measured or predicted time is NaN, infinite or negative."""


class FitError(BucketingError):
    """A fit has no data, or no ladder or grid meets its budget."""


class PlanError(BucketingError):
    """The waiting list or its costs cannot be planned."""


class PaddingError(BucketingError):
    """Arrays do not fit the buffer they are to be written into."""


class PackingError(BucketingError):
    """Lengths do not fit the rows they are to be packed into."""


class TraceError(BucketingError):
    """Observed traffic holds something that is not a size, a count or a time."""
