"""What a ladder does to observed sizes, rung by rung, and which rung is missing."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import DoesNotFit
from .ladder import Ladder
from .observed import Observed, observed


@dataclass(frozen=True, slots=True)
class RungReport:
    """One rung's share of the traffic.

    Args:
        rung: The size padded to.
        share: Share of the inputs that use it, from 0 to 1.
        mean_padding: 1 - real / padded over those inputs together; 0 without inputs.
        worst_padding: The largest 1 - size / rung that any size of this rung can meet.
        worst_size: The size with that padding: one above the rung below.
        seen_padding: The largest 1 - size / rung that was observed; 0 without inputs.
    """

    rung: int
    share: float
    mean_padding: float
    worst_padding: float
    worst_size: int
    seen_padding: float


@dataclass(frozen=True, slots=True)
class LadderReport:
    """A ladder against observed sizes.

    Args:
        rungs: One report a rung, rising.
        waste: 1 - real / padded over all inputs.
        worth_adding: The size that, as one more rung, would save most; None if none would save.
        saving: The share of the padded elements it would save.
    """

    rungs: tuple[RungReport, ...]
    waste: float
    worth_adding: int | None
    saving: float

    def __str__(self) -> str:
        lines = ["   rung   share    mean   worst (at size)"]
        lines += [
            f"{r.rung:7d} {r.share:6.1%} {r.mean_padding:7.1%} {r.worst_padding:7.1%} ({r.worst_size})"
            for r in self.rungs
        ]
        lines.append(f"waste {self.waste:.1%}")
        if self.worth_adding is not None:
            lines.append(f"one more rung at {self.worth_adding} would save {self.saving:.1%} of the work")
        return "\n".join(lines)


def report(ladder: Ladder, sizes: Observed) -> LadderReport:
    """How the observed sizes use a ladder.

    Raises:
        TraceError: if nothing was observed.
        DoesNotFit: if a size is above the ladder's limit.
    """
    values, counts = observed(sizes)
    if values[-1] > ladder.limit:
        raise DoesNotFit(f"Observed sizes are at most the limit of {ladder.limit}; got {values[-1]}.")
    rungs = np.array(ladder.rungs)
    group = np.searchsorted(rungs, values)
    total = counts.sum()
    reports: list[RungReport] = []
    best = (0.0, 0)
    for place, rung in enumerate(ladder.rungs):
        mine, weight = values[group == place], counts[group == place]
        lowest = ladder.rungs[place - 1] + 1 if place else 1
        real, padded = float(mine @ weight), float(weight.sum() * rung)
        reports.append(
            RungReport(
                rung=rung,
                share=float(weight.sum() / total),
                mean_padding=1 - real / padded if padded else 0.0,
                worst_padding=1 - lowest / rung,
                worst_size=lowest,
                seen_padding=float(1 - mine[0] / rung) if len(mine) else 0.0,
            )
        )
        best = max(best, _best_split(mine, weight, rung), key=lambda pair: pair[0])
    padded = float(counts @ rungs[group])
    return LadderReport(
        tuple(reports), waste_of(ladder.rungs_for, values, counts), best[1] or None, best[0] / padded
    )


def waste_of(
    rungs_for: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    values: NDArray[np.int64],
    counts: NDArray[np.float64],
) -> float:
    """Padding waste, 1 - real / padded, of counted sizes under a rule from size to padded size."""
    return 1 - float(values @ counts) / float(rungs_for(values) @ counts)


def _best_split(values: NDArray[np.int64], counts: NDArray[np.float64], rung: int) -> tuple[float, int]:
    """The elements saved, and the size, of the best new rung below this one."""
    if not len(values):
        return 0.0, 0
    saved = np.cumsum(counts) * (rung - np.maximum(values, 1))
    place = int(saved.argmax())
    return float(saved[place]), int(max(values[place], 1)) if saved[place] > 0 else 0
