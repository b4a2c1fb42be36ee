"""servax.bucketing: shapes as pure geometry, with NumPy alone.

Ladders and schemes for one axis, grids of buckets for several, the cost of a bucket, plans that pick
the cheapest buckets for what waits, and the padding or packing that fills them.
"""

from .bucket import Bucket
from .cost import CostModel, elements_prior
from .errors import (
    BucketingError,
    CostError,
    CoverageError,
    DoesNotFit,
    FitError,
    GridError,
    LadderError,
    PackingError,
    PaddingError,
    PlanError,
    SchemeError,
    TraceError,
)
from .grid import Grid
from .ladder import Ladder
from .padding import fill_lengths, fill_mask, pad_rows
from .plan import Lateness, Planner, Run, plan
from .schemes import (
    Scheme,
    bounded_waste,
    exact,
    explicit,
    geometric,
    linear,
    parse_scheme,
    powers_of_two,
    single,
)

__all__ = [
    "Bucket",
    "BucketingError",
    "CostError",
    "CostModel",
    "CoverageError",
    "DoesNotFit",
    "FitError",
    "Grid",
    "GridError",
    "Ladder",
    "LadderError",
    "Lateness",
    "PackingError",
    "PaddingError",
    "PlanError",
    "Planner",
    "Run",
    "Scheme",
    "SchemeError",
    "TraceError",
    "bounded_waste",
    "elements_prior",
    "exact",
    "explicit",
    "fill_lengths",
    "fill_mask",
    "geometric",
    "linear",
    "pad_rows",
    "parse_scheme",
    "plan",
    "powers_of_two",
    "single",
]
