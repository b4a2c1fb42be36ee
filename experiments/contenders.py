"""The schemes that are compared, each with the parameters an engineer would try."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..bucketing import Ladder, Scheme, bounded_waste, fit_curve, geometric, linear, powers_of_two, single
from .packed import PackingBatcher
from .simulate import Simulated, simulate
from .traces import Trace

Kind = Literal["ladder", "exact", "packing"]
# A length below this costs about what this one does, so nobody compiles for it.
SMALLEST = {"texts": 16, "embed_lengths": 8, "servegen_m-small_draw": 16}
SMALLEST_PROMPT = 128
FIT_MOST = 64
# How many waiting requests a packed row is chosen from.
PACKING_WINDOW = 256


@dataclass(frozen=True, slots=True)
class Contender:
    """One scheme with its parameters, made from the half of a trace that it may see.

    Args:
        scheme: The family, such as `fitted`.
        name: The family with its parameters.
        kind: How it runs: a ladder of sizes, every size its own program, or packed rows.
        ladder: Its rungs; for `packing` the capacities of the packed row, for `exact` only the limit.
        simulated: Whether latency and throughput are simulated, or only the waste computed.
    """

    scheme: str
    name: str
    kind: Kind
    ladder: Ladder
    simulated: bool


def contenders(seen: Trace) -> list[Contender]:
    """All contenders for one trace, of which they see only this half."""
    limit = seen.limit
    smallest = min(SMALLEST.get(seen.name, SMALLEST_PROMPT), max(1, limit // 2))
    whole, doubling = Ladder((limit,)), powers_of_two(smallest).ladder(limit)
    found = [
        Contender("exact", "exact", "exact", whole, True),
        Contender("packing", "packing:single", "packing", whole, True),
        Contender("packing", f"packing:powers_of_two:{smallest}", "packing", doubling, True),
    ]
    shown = {"single", powers_of_two(smallest).name, bounded_waste(25, smallest).name}
    for family, scheme in _rules(limit, smallest):
        ladder = scheme.ladder(limit)
        main = len(ladder) in (8, 13) and family in ("linear", "geometric")
        found.append(Contender(family, scheme.name, "ladder", ladder, main or scheme.name in shown))
    for fit in fit_curve(seen.lengths, FIT_MOST, limit=limit):
        count = len(fit.ladder)
        found.append(Contender("fitted", f"fitted:{count}", "ladder", fit.ladder, count in (8, 13)))
    return _distinct(found)


def _rules(limit: int, smallest: int) -> Iterator[tuple[str, Scheme]]:
    yield "single", single()
    for minimum in (smallest << shift for shift in range((limit // smallest).bit_length())):
        yield "powers_of_two", powers_of_two(minimum)
    yield "powers_of_two", powers_of_two(1)
    for count in (*range(2, 33), 40, 48, 64):
        yield "linear", linear(-(-limit // count))
        growth = (limit / smallest) ** (1 / (count - 1))
        yield "geometric", geometric(round(growth, 4), 1, smallest)
    for percent in (75, 60, 50, 40, 33, 25, 20, 15, 10):
        yield "bounded_waste", bounded_waste(percent, smallest)


def _distinct(found: Sequence[Contender]) -> list[Contender]:
    """The first of those that have the same family and number of programs."""
    kept: dict[tuple[str, int], Contender] = {}
    for one in found:
        kept.setdefault((one.scheme, len(one.ladder)), one)
    return list(kept.values())


def one_row_waste(contender: Contender, trace: Trace) -> float:
    """Padding of one-row prefill: 1 - real / computed tokens, over the whole trace.

    A ladder pads each request to its rung, whatever the load. Packing needs a queue to choose from,
    so its number is that of a device that never runs out of waiting requests.
    """
    if contender.kind == "exact":
        return 0.0
    if contender.kind == "packing":
        return saturated(contender, trace).waste
    return 1 - float(trace.lengths.sum()) / float(contender.ladder.rungs_for(trace.lengths).sum())


def saturated(contender: Contender, trace: Trace) -> Simulated:
    """Packed rows while everything waits from the start."""
    batcher = PackingBatcher(contender.ladder, PACKING_WINDOW)
    return simulate(trace.lengths, np.zeros(len(trace)), batcher, lambda bucket: 1.0)
