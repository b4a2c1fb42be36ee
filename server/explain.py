"""Which bucket a request takes, and why; what the grid did so far. For people, on a snapshot of a model.

A model is looked at from any thread while its device thread goes on, so everything is copied first.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..bucketing import Bucket, CostModel, Grid, Planner
from .batching.batcher import Policy
from .errors import BadRequest, NotReady

_MOST_ROWS = 4096
_REASONS = {
    "full": "full, so that waiting could not make them better",
    "window": "when a row had waited its time",
    "deadline": "when a row could wait no longer",
    "idle": "since the device was free and no wait was worth more",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A bucket that holds one of the request's items.

    Attributes:
        bucket: such as `8x64`.
        rows: rows of the request that one run of it takes.
        runs: runs that the whole request takes with this bucket alone.
        seconds: of one run, measured or predicted.
        total_s: of all those runs.
        measured: whether `seconds` was measured.
        padding: share of the elements of those runs that is padding, 0 to 1.
        chosen: whether the plan uses it.
    """

    bucket: str
    rows: int
    runs: int
    seconds: float
    total_s: float
    measured: bool
    padding: float
    chosen: bool


def explain(
    grid: Grid,
    measured: Mapping[Bucket, float],
    rows: int,
    sizes: Sequence[int],
    planner: Planner | None = None,
) -> dict[str, Any]:
    """The plan for a request that comes alone, and what every other bucket would cost.

    Args:
        grid: the buckets that may run.
        measured: seconds of those that ran.
        rows: rows of the request.
        sizes: of each row, in the order of the grid's item axes.
        planner: what plans; None for rows that are padded.

    Raises:
        DoesNotFit: if no bucket holds such a row; the nearest is named.
        BadRequest: if there is no row, or too many to plan for a look.
    """
    if not 1 <= rows <= _MOST_ROWS:
        raise BadRequest(f"A shape has 1 to {_MOST_ROWS} rows, got {rows}; choose a number in that range.")
    cost = CostModel()
    for bucket, seconds in measured.items():
        cost.observe(bucket, seconds)
    planner = Planner(grid, cost, window=_MOST_ROWS) if planner is None else planner.with_cost(cost)
    runs = planner.plan([tuple(sizes)] * rows)
    chosen = {run.bucket for run in runs}
    elements = math.prod(sizes)
    candidates = []
    for bucket in grid.candidates(1, tuple(sizes)):
        most = planner.most_rows(bucket, sizes)
        seconds, count = cost.seconds(bucket), math.ceil(rows / most)
        candidates.append(
            Candidate(
                str(bucket),
                min(rows, most),
                count,
                seconds,
                seconds * count,
                bucket in measured,
                1 - rows * elements / (count * bucket.elements),
                bucket in chosen,
            )
        )
    candidates.sort(key=lambda one: one.total_s)
    total_s = sum(cost.seconds(run.bucket) for run in runs)
    computed = sum(run.bucket.elements for run in runs)
    return {
        "rows": rows,
        "sizes": dict(zip(grid.item_axes, sizes, strict=True)),
        "runs": [{"bucket": str(run.bucket), "rows": len(run.rows)} for run in runs],
        "seconds": total_s,
        "padding": 1 - rows * elements / computed,
        "why": _why([str(run.bucket) for run in runs], total_s, candidates),
        "candidates": [asdict(one) for one in candidates],
    }


def _why(runs: Sequence[str], total_s: float, candidates: Sequence[Candidate]) -> str:
    taken = " + ".join(runs) if len(runs) <= 4 else f"{len(runs)} runs"
    others = [one for one in candidates if not (one.chosen and one.runs == len(runs))]
    ms = f"{total_s * 1e3:.3g} ms"
    if not others:
        return f"{taken} costs least: {ms}; no other bucket holds it."
    next_best = others[0]
    times = f"{next_best.runs} x " if next_best.runs > 1 else ""
    other = f"{times}{next_best.bucket}, {next_best.total_s * 1e3:.3g} ms"
    if next_best.total_s < total_s:  # packed rows are planned bucket by bucket, not to the end
        return f"{taken} is planned, each bucket by what a real element costs in it: {ms}; or else {other}."
    return f"{taken} costs least: {ms}; the next best, {other}."


def explain_model(
    model: Any,
    rows: int,
    given: Mapping[str, int],
    totals: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """`explain` for a served model, and when batches leave its queue.

    Args:
        model: a `Model`.
        rows: rows of the request.
        given: size by axis.
        totals: what its buckets did so far, see `Recent.buckets`.

    Raises:
        BadRequest: if an axis is missing, unknown or out of its limits, or the model has no grid.
        NotReady: if no program is warm yet.
    """
    if not hasattr(model, "servable"):
        raise BadRequest(f"A shape is explained for a model with a grid, got {model.name!r}; it has none.")
    planner = model.batcher.planner
    if planner is None:
        raise NotReady(f"Model {model.name!r} has a plan once a program is warm, and none is; retry shortly.")
    grid: Grid = planner.grid
    if set(given) != set(grid.item_axes):
        axes = ", ".join(grid.item_axes) or "none but rows"
        raise BadRequest(f"A shape of {model.name!r} needs the axes {axes}, got {sorted(given)}; name those.")
    for axis, size in given.items():
        if not 1 <= size <= model.limits[axis]:
            raise BadRequest(f"{axis} is 1 to {model.limits[axis]}, got {size}; choose a size in that range.")
    sizes = [given[axis] for axis in grid.item_axes]
    told = explain(grid, measured_of(model.cost), rows, sizes, planner)
    left: Counter[str] = Counter()
    for bucket in {run["bucket"] for run in told["runs"]}:
        left.update((totals or {}).get((model.name, bucket), {}).get("left", {}))
    return {"model": model.name, **told, "leaves": leaves(model.batcher.policy, left)}


def leaves(policy: Policy, left: Mapping[str, int]) -> dict[str, Any]:
    """When a batch leaves the queue, and why those before it did.

    Args:
        policy: of the model.
        left: batches by reason, see `Launch`.
    """
    if not policy.max_wait_s:
        rule = "at once where a device is free; rows gather only while none is"
    else:
        adaptive = "for as long as that is predicted to pay, " if policy.wait == "adaptive" else ""
        rule = (
            f"when its bucket is full, or a free device has waited for more rows, {adaptive}for at most "
            f"{policy.max_wait_s * 1e3:g} ms, or a deadline would be missed"
        )
    told = [f"{count} {_REASONS.get(reason, reason)}" for reason, count in sorted(left.items())]
    return {"rule": rule, "left": dict(left), "why": "; ".join(told) or "none left yet in these buckets"}


def measured_of(cost: CostModel) -> dict[Bucket, float]:
    """A copy of what was measured, while the device thread may be adding to it."""
    while True:
        try:
            return cost.measured()
        except RuntimeError:  # it grew while it was read
            continue


def grid_rows(model: Any, totals: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each bucket of a model: where it stands, what it costs, what it did."""
    report = model.report
    warm = {one.bucket: one for one in list(report.warm)}
    failed = {bucket: str(why) for bucket, why in list(report.failed.items())}
    ready, planned = set(model.cache.ready()), set(model.grid) if model.batcher.planner else set()
    measured = measured_of(model.cost)
    rows = []
    # What a re-fit let go is no bucket of this model any more.
    for bucket in sorted({*(model.fitted or model.servable.grid), *ready}):
        one = warm.get(bucket)
        program = model.cache.find(bucket)
        facts = program.facts if one is None and program is not None else None if one is None else one.facts
        state = "warm" if bucket in ready else "failed" if bucket in failed else "cold"
        seconds = measured.get(bucket, None if one is None else one.run_s)
        rows.append(
            {
                "bucket": str(bucket),
                "sizes": list(bucket.sizes),
                "state": state,
                "planned": bucket in planned,
                "seconds": seconds,
                "source": None if facts is None else facts.source,
                "code_bytes": None if facts is None else facts.code_bytes,
                "temp_bytes": None if facts is None else facts.temp_bytes,
                "error": failed.get(bucket),
                **totals.get((model.name, str(bucket)), {}),
            }
        )
    return rows


def program_rows(model: Any, totals: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each step program of a model that generates text: where it came from, what it did."""
    rows = []
    for one in list(model.report.warm):
        key, facts = one.bucket, one.facts
        if key.rows:
            sizes = {"source": facts.source, "code_bytes": facts.code_bytes, "temp_bytes": facts.temp_bytes}
            used = totals.get((model.name, str(key)), {})
            rows.append({"program": str(key), "seconds": one.run_s, **sizes, **used})
    return rows
