"""What `servax fit` computes: the best ladder for the sizes of a trace, beside what others would take."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...bucketing import (
    Ladder,
    LadderFit,
    LadderReport,
    bounded_waste,
    fit_curve,
    geometric,
    linear,
    powers_of_two,
    report,
    single,
)
from ..errors import ConfigError

Sizes = NDArray[np.int64]
# Below this the halves of a trace say nothing about each other.
_FEWEST_TO_HALVE = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """One scheme on this trace.

    Args:
        scheme: Its name.
        programs: How many rungs it has.
        waste: 1 - real / padded over the whole trace.
        held_out: The same over the second half, fitted schemes being fitted on the first; None for a
            trace too short to halve.
        compile_s: Programs times seconds a program.
    """

    scheme: str
    programs: int
    waste: float
    held_out: float | None
    compile_s: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the command found out."""

    axis: str
    requests: int
    limit: int
    ladder: Ladder
    report: LadderReport
    compared: tuple[Compared, ...]
    compile_s: float
    next_waste: float | None
    next_compile_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "axis": self.axis,
            "requests": self.requests,
            "limit": self.limit,
            "ladder": list(self.ladder.rungs),
            "scheme": f"explicit:{self.ladder}",
            "programs": len(self.ladder),
            "waste": self.report.waste,
            "held_out_waste": self.compared[0].held_out,
            "compile_s": self.compile_s,
            "rungs": [asdict(rung) for rung in self.report.rungs],
            "schemes": [asdict(one) for one in self.compared],
            "one_more": None
            if self.next_waste is None
            else {"waste": self.next_waste, "compile_s": self.next_compile_s},
        }


def fitted(
    axis: str, sizes: Sizes, programs: int, *, limit: int | None, align: int, compile_seconds: float
) -> Fitted:
    """Fit a ladder to sizes and compare it with other schemes.

    Args:
        axis: What the sizes are called.
        sizes: `(n,)`, in order of arrival.
        programs: The most rungs.
        limit: The last rung; None takes the largest size.
        align: Rungs below the limit are multiples of it.
        compile_seconds: Of one program.

    Raises:
        ConfigError: if a size is above the limit.
    """
    limit = int(sizes.max()) if limit is None else limit
    if above := int((sizes > limit).sum()):
        raise ConfigError(
            f"Every {axis} must be at most the limit of {limit}; {above} of {len(sizes)} are above it, the "
            f"largest is {sizes.max()}. Raise --limit, or cut them in the trace as the server would."
        )
    curve = fit_curve(sizes, programs + 1, limit=limit, align=align)
    # With fewer sizes than programs the last one or two ladders are equally good: take the smallest.
    best = min(curve[:programs], key=lambda one: (one.cost, len(one.ladder)))
    more = [one.waste for one in curve if len(one.ladder) == len(best.ladder) + 1 and one.cost < best.cost]
    compared = [_compared_fit(sizes, one, limit, align, compile_seconds) for one in _shown(curve, best)]
    for name, ladder in _others(limit, len(best.ladder), int(sizes.min())):
        held = _waste(ladder, sizes[len(sizes) // 2 :]) if len(sizes) >= _FEWEST_TO_HALVE else None
        compared.append(
            Compared(name, len(ladder), _waste(ladder, sizes), held, len(ladder) * compile_seconds)
        )
    return Fitted(
        axis=axis,
        requests=len(sizes),
        limit=limit,
        ladder=best.ladder,
        report=report(best.ladder, sizes),
        compared=tuple(compared),
        compile_s=len(best.ladder) * compile_seconds,
        next_waste=more[0] if more else None,
        next_compile_s=compile_seconds,
    )


def _shown(curve: Sequence[LadderFit], best: LadderFit) -> list[LadderFit]:
    """The chosen fit first, then the one with half the programs."""
    count = len(best.ladder)
    return [best, *(one for one in curve if len(one.ladder) == count // 2)]


def _others(limit: int, programs: int, smallest: int) -> list[tuple[str, Ladder]]:
    """What others would take: powers of two, and each rule with about as many programs."""
    schemes = [
        powers_of_two(),
        single(),
        linear(max(1, -(-limit // programs))),
        bounded_waste(25.0, smallest),
    ]
    if programs > 1 and smallest < limit:
        growth = max((limit / smallest) ** (1 / (programs - 1)), 1.001)
        schemes.insert(1, geometric(round(growth, 3), 1, smallest))
    return [(scheme.name, scheme.ladder(limit)) for scheme in schemes]


def _compared_fit(sizes: Sizes, one: LadderFit, limit: int, align: int, compile_seconds: float) -> Compared:
    count, middle, held = len(one.ladder), len(sizes) // 2, None
    if len(sizes) >= _FEWEST_TO_HALVE:
        on_first = fit_curve(sizes[:middle], count, limit=limit, align=align)[-1]
        held = _waste(on_first.ladder, sizes[middle:])
    return Compared(f"fitted:{count}", count, one.waste, held, count * compile_seconds)


def _waste(ladder: Ladder, sizes: Sizes) -> float:
    return 1 - float(sizes.sum()) / float(ladder.rungs_for(sizes).sum())
