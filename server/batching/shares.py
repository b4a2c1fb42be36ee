"""How device time is shared among priorities: strictly by urgency, or by weights. Pure bookkeeping.

Weights follow start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a launch moves the tag of each
priority on by the device seconds it used over its weight, and the smallest tag goes first. So under full
load seconds are in the ratio of the weights; what one does not use goes to the others, and one that was idle
goes next but saves up no credit.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from ..errors import ConfigError
from .request import PRIORITIES, Row


def parse_weights(text: str) -> dict[int, float] | None:
    """Weights out of ``"strict"`` (None) or ``"1=8,5=2,9=1"``; priorities that are not named have 1.

    Raises:
        ConfigError: on anything else.
    """
    if text.strip() == "strict":
        return None
    weights = {}
    try:
        for part in text.split(","):
            priority, _, weight = part.partition("=")
            weights[int(priority)] = float(weight)
    except ValueError:
        raise ConfigError(
            f"priorities are 'strict' or weights such as '1=8,5=2,9=1'; got {text!r}: correct it"
        ) from None
    check_weights(weights)
    return weights


def written_weights(weights: Mapping[int, float] | None) -> str:
    """As `parse_weights` reads them."""
    if weights is None:
        return "strict"
    return ",".join(f"{priority}={weight:g}" for priority, weight in weights.items())


def check_weights(weights: Mapping[int, float]) -> None:
    """Refuse weights that are none.

    Raises:
        ConfigError: naming the priority.
    """
    for priority, weight in weights.items():
        if priority not in PRIORITIES or not 0 < weight < math.inf:
            raise ConfigError(
                f"weights are finite numbers above 0 of the priorities {PRIORITIES[0]} to {PRIORITIES[-1]}; "
                f"got {weight} for {priority}: correct it"
            )


class Shares:
    """The tag of each priority.

    Args:
        weights: by priority; those not named have 1.
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        check_weights(weights)
        self._weights = {priority: weights.get(priority, 1.0) for priority in PRIORITIES}
        self._tags = dict.fromkeys(PRIORITIES, 0.0)
        self._now = 0.0
        self._pace_s = 1.0

    def starts(self) -> dict[int, float]:
        """The tag from which each priority goes on now."""
        return {priority: max(tag, self._now) for priority, tag in self._tags.items()}

    def step(self, row: Row) -> float:
        """By how much a row is predicted to move its priority's tag on."""
        return self._pace_s * math.prod(row.sizes) / self._weights[row.request.priority]

    def charge(self, rows: Sequence[Row], seconds: float, waiting: Iterable[int]) -> None:
        """Rows were launched in a run of so many device seconds; these priorities had rows waiting."""
        elements = [math.prod(row.sizes) for row in rows]
        total = sum(elements)
        if not total or not seconds > 0:
            return
        self._pace_s = seconds / total
        starts = self.starts()
        served = {row.request.priority for row in rows}
        self._now = max(self._now, min(starts[priority] for priority in {*served, *waiting}))
        for priority in served:
            self._tags[priority] = starts[priority]
        for row, size in zip(rows, elements, strict=True):
            priority = row.request.priority
            self._tags[priority] += self._pace_s * size / self._weights[priority]
