"""servax.bucketing: shapes as pure geometry, with NumPy alone.

Ladders and schemes for one axis, grids of buckets for several, the cost of a bucket, plans that pick
the cheapest buckets for what waits, and the padding or packing that fills them.
"""

from .bucket import Bucket
from .choose import Choice, choose_programs
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
from .fit import LadderFit, fit_curve, fit_ladder
from .fit_grid import GridFit, fit_grid
from .fitted import fitted
from .grid import Grid
from .ladder import Ladder
from .observed import Observed, observed
from .packed_plan import PackedPlanner, packed_grid
from .packing import Packing, StreamingPacker, pack
from .padding import fill_lengths, fill_mask, pad_rows
from .plan import Lateness, Planner, Run, plan
from .report import LadderReport, RungReport, report
from .schemes import (
    Scheme,
    SchemeLike,
    as_scheme,
    bounded_waste,
    exact,
    explicit,
    geometric,
    linear,
    parse_scheme,
    powers_of_two,
    single,
)
from .traffic import DriftDetector, Histogram
from .trees import PaddedBatch, pad_batch, unpad

__all__ = [
    "Bucket",
    "BucketingError",
    "Choice",
    "CostError",
    "CostModel",
    "CoverageError",
    "DoesNotFit",
    "DriftDetector",
    "FitError",
    "Grid",
    "GridError",
    "GridFit",
    "Histogram",
    "Ladder",
    "LadderError",
    "LadderFit",
    "LadderReport",
    "Lateness",
    "Observed",
    "PackedPlanner",
    "Packing",
    "PackingError",
    "PaddedBatch",
    "PaddingError",
    "PlanError",
    "Planner",
    "Run",
    "RungReport",
    "Scheme",
    "SchemeError",
    "SchemeLike",
    "StreamingPacker",
    "TraceError",
    "as_scheme",
    "bounded_waste",
    "choose_programs",
    "elements_prior",
    "exact",
    "explicit",
    "fill_lengths",
    "fill_mask",
    "fit_curve",
    "fit_grid",
    "fit_ladder",
    "fitted",
    "geometric",
    "linear",
    "observed",
    "pack",
    "packed_grid",
    "pad_batch",
    "pad_rows",
    "parse_scheme",
    "plan",
    "powers_of_two",
    "report",
    "single",
    "unpad",
]
