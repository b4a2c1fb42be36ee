"""How many programs are worth having: run time saved against compile time and memory.

The price of a rung only depends on the rung, so it goes into the dynamic program of `fit` and the best
ladder under prices is exact. A budget is met by raising the prices (a Lagrange multiplier, found by
bisection): every ladder on the way is the best one for what it spends, and ladders between two such
points are not searched.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .errors import FitError
from .fit import LadderFit, Overflow, bounded, fit_curve
from .ladder import Ladder
from .observed import Observed, observed
from .report import waste_of

# Bisection of ten decades of the multiplier: 16 steps leave it within 0.04 %.
_STEPS = 16
# Beyond this many distinct sizes neighbours are merged before the fit, for time.
_DISTINCT = 2048


@dataclass(frozen=True, slots=True)
class Choice:
    """A ladder with its bill.

    Args:
        ladder: The rungs.
        waste: 1 - real / padded elements of the observed items.
        run_s: Seconds the traffic of the horizon takes on this ladder.
        compile_s: Seconds to compile its programs.
        bytes: Memory of its programs.
        next_saving_s: Run seconds over the horizon that one program more would save, before its own
            compile time; 0 if no more sizes were seen.
    """

    ladder: Ladder
    waste: float
    run_s: float
    compile_s: float
    bytes: float
    next_saving_s: float


def choose_programs(
    sizes: Observed,
    *,
    seconds: Callable[[int], float],
    compile_seconds: Callable[[int], float],
    horizon: float = 1.0,
    program_bytes: Callable[[int], float] | None = None,
    seconds_per_byte: float = 0.0,
    budget_seconds: float = math.inf,
    budget_bytes: float = math.inf,
    max_programs: int = 64,
    limit: int | None = None,
    align: int = 1,
    minimum: int = 1,
    overflow: Overflow = "raise",
) -> Choice:
    """The ladder with the least run time plus compile time that keeps within the budgets.

    Without a binding budget it is the exact minimum of
    `horizon * sum(count * seconds(rung)) + sum(compile_seconds(rung) + seconds_per_byte * bytes)`
    over all ladders of at most `max_programs` rungs: a program more is taken only if what it saves
    over the horizon exceeds its price. More than 2,048 distinct sizes are first merged upwards.

    Args:
        sizes: What was observed.
        seconds: Run seconds of one item at a rung; must not fall as rungs rise.
        compile_seconds: Seconds to compile the program of a rung.
        horizon: How many times the observed traffic will run before the ladder is fitted anew.
        program_bytes: Memory of a rung's program; None counts none.
        seconds_per_byte: What a byte held over the horizon is worth.
        budget_seconds: The most compile seconds of all rungs together.
        budget_bytes: The most bytes of all rungs together.
        max_programs: The most rungs.
        limit: The last rung, by default the largest size.
        align: Rungs but the limit are multiples of it.
        minimum: The lowest rung allowed.
        overflow: What to do with sizes above the limit.

    Raises:
        TraceError: if nothing was observed.
        FitError: if even the program of the limit alone exceeds a budget, or a parameter is wrong.
    """
    if not (math.isfinite(horizon) and horizon > 0):
        raise FitError(f"The horizon is a finite number above 0; got {horizon!r}.")
    if not (budget_seconds > 0 and budget_bytes > 0):
        raise FitError(f"Budgets are above 0; got {budget_seconds!r} seconds and {budget_bytes!r} bytes.")
    values, counts, limit = bounded(*observed(sizes), limit, align, overflow)
    held = _thinned(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    memory = program_bytes or (lambda rung: 0.0)

    def spent(fit: LadderFit) -> tuple[float, float]:
        return sum(map(compile_seconds, fit.ladder)), sum(map(memory, fit.ladder))

    def curve(multiplier: float) -> tuple[LadderFit, ...]:
        def price(rung: int) -> float:
            own = compile_seconds(rung) + seconds_per_byte * memory(rung)
            share = compile_seconds(rung) / budget_seconds + memory(rung) / budget_bytes
            return (own + multiplier * share) / horizon

        # The shape of the traffic fixes D; prices are per pass over it.
        return fit_curve(
            held, max_programs, limit=limit, align=align, minimum=minimum, cost=seconds, price=price
        )

    def within(fit: LadderFit) -> bool:
        compile_s, held_bytes = spent(fit)
        return compile_s <= budget_seconds and held_bytes <= budget_bytes

    def bill(fit: LadderFit) -> float:
        compile_s, held_bytes = spent(fit)
        return horizon * fit.cost + compile_s + seconds_per_byte * held_bytes

    fits = curve(0.0)
    best = min(fits, key=bill)
    if not within(best):
        best = _squeezed(fits, curve, within, bill, fits[0])
    return _billed(best, fits, horizon, spent(best), dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _squeezed(
    fits: tuple[LadderFit, ...],
    curve: Callable[[float], tuple[LadderFit, ...]],
    within: Callable[[LadderFit], bool],
    bill: Callable[[LadderFit], float],
    alone: LadderFit,
) -> LadderFit:
    if not within(alone):
        raise FitError(
            f"The limit {alone.ladder.limit} needs a program, and that one alone exceeds the budget. "
            "Raise the budget or lower the limit."
        )
    found = [fit for fit in fits if within(fit)]
    scale = max(bill(alone), 1e-9)
    low, high = 1e-6 * scale, 1e4 * scale
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        tried = curve(middle)
        found += [fit for fit in tried if within(fit)]
        cheapest = min(tried, key=lambda fit: fit.cost + fit.price)
        low, high = (low, middle) if within(cheapest) else (middle, high)
    return min(found, key=bill)


def _billed(
    best: LadderFit,
    fits: tuple[LadderFit, ...],
    horizon: float,
    spent: tuple[float, float],
    counted: dict[int, float],
) -> Choice:
    more = [fit.cost for fit in fits if len(fit.ladder) == len(best.ladder) + 1]
    saving = max(0.0, best.cost - more[0]) * horizon if more else 0.0
    waste = waste_of(best.ladder.rungs_for, *observed(counted))
    return Choice(best.ladder, waste, best.cost * horizon, *spent, saving)


def _thinned(counted: dict[int, float]) -> dict[int, float]:
    """Counts merged upwards into at most `_DISTINCT` of the sizes, dense where the traffic is."""
    if len(counted) <= _DISTINCT:
        return counted
    values = np.array(sorted(counted))
    counts = np.array([counted[value] for value in values.tolist()])
    # Half of the kept sizes follow the elements, half the sizes, so that rare long ones stay apart.
    share = np.cumsum(values * counts) / (values @ counts) + np.arange(1, len(values) + 1) / len(values)
    cell = np.minimum((share / 2 * _DISTINCT).astype(int), _DISTINCT - 1)
    last = np.append(np.flatnonzero(np.diff(cell)), len(values) - 1)
    sums = np.diff(np.cumsum(counts)[last], prepend=0.0)
    return dict(zip(values[last].tolist(), sums.tolist(), strict=True))
