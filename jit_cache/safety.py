"""Does padding change an answer? Asked of a servable for each axis before it is served.

Metamorphic testing (Chen et al. 1998): no right answer is known, but two runs must agree. Inside one
bucket they must agree in every value, since the same program does the same arithmetic on a row wherever
it stands (design, section 6); between buckets within a stated tolerance, since sums are ordered anew.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..bucketing import Bucket
from .check import check_item
from .errors import UnsafePaddingError
from .program import Program, compile_program
from .safety_cases import Bench
from .safety_compare import usual_tolerance
from .safety_probes import Probes
from .safety_report import AxisSafety, Finding, SafetyReport
from .servable import Servable

__all__ = ["AxisSafety", "Finding", "SafetyReport", "check_padding", "require_safe"]


def check_padding(
    servable: Servable,
    *,
    items: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    ids_below: Mapping[str, int] | None = None,
    controls: Sequence[str] | None = None,
    trust_pad: bool = False,
    compile_fn: Callable[[Bucket], Program] | None = None,
) -> SafetyReport:
    """Probe every axis of a servable, the batch included, and report which ones may be padded.

    Compiles three small buckets, and two more for each varying axis (one more to pad several at once).

    Args:
        servable: what to check.
        items: real items, without a batch dim; they are cut or repeated to the sizes needed. None means
            random ones of the declared dtypes.
        seed: of everything random.
        tolerance: largest difference between buckets (on several devices: also within one), relative to
            max(1, largest absolute output); an output of low precision gets at least 8 units in its last
            place. None means 1e-5, or more beside weights of low precision.
        ids_below: size of the vocabulary by integer input, such as ``{"ids": 30522}``. An integer input that
            is not named takes the values seen in ``items`` and the pad value, or below 16 (a byte: any).
        controls: inputs that keep their pad value in all padding, such as a mask that callers send. None
            means bool inputs and those with ``mask`` in their name.
        trust_pad: accept a model that tells padding by its declared pad value: no junk is tried.
        compile_fn: makes the program of a bucket, such as a program cache does; by default they are
            compiled here and dropped.

    Raises:
        InputError: if an item does not fit the signature, or the model's answer to the items is NaN.
        CompileError: if the servable does not compile even at sizes of its grid.
        OutputError: if the model returns what its signature does not allow.
    """
    begin = time.perf_counter()
    checked = [
        check_item(servable.signature, one, servable.limits, allow_nonfinite=servable.allow_nonfinite)[0]
        for one in items or []
    ]
    bench = Bench(servable, compile_fn or _compiler(servable), checked, dict(ids_below or {}), controls, seed)
    if tolerance is None:
        tolerance = usual_tolerance(servable.abstract_leaves)
    probes = Probes(bench, tolerance, [] if trust_pad else bench.fillers())
    axes = probes.all_axes()
    return SafetyReport(
        model=servable.name,
        axes=axes,
        tolerance=tolerance,
        programs=len(bench.programs),
        seconds=time.perf_counter() - begin,
        makes_mask=any(made.kind != "positions" for made in servable.signature.made),
    )


def require_safe(servable: Servable, **options: Any) -> SafetyReport:
    """Check the padding of a servable and refuse it if an axis is not safe.

    Args:
        servable: what to check.
        options: everything else that `check_padding` takes.

    Raises:
        UnsafePaddingError: naming each refused axis, the output and place that moved, the difference, the
            probe that moved it and the remedy.
    """
    report = check_padding(servable, **options)
    if not report.ok:
        raise UnsafePaddingError(report.explain())
    return report


def _compiler(servable: Servable) -> Callable[[Bucket], Program]:
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    return lambda bucket: compile_program(servable, bucket, leaves)
