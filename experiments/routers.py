"""Routers of a simulated fleet: at random, the less loaded of two, and by length."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from .errors import Stalled
from .fleet import Replica

Draw = Callable[[], float]


class Random:
    """Any replica, equally likely: what a plain service address does over many clients."""

    def pick(self, length: int, up: Sequence[Sequence[Replica]], draw: Draw) -> Replica:
        """A replica of the only band."""
        return _any(_alive(up, 0), draw)


class Two:
    """The one of two random replicas that holds fewer requests (Mitzenmacher, 2001)."""

    def pick(self, length: int, up: Sequence[Sequence[Replica]], draw: Draw) -> Replica:
        """The less loaded of two."""
        return _lesser(_alive(up, 0), draw)


class Bands:
    """Replicas specialise in bands of lengths; inside a band the less loaded of two is taken.

    Args:
        cuts: The longest length of each band, rising.
    """

    def __init__(self, cuts: Sequence[int]) -> None:
        self._cuts = list(cuts)

    def pick(self, length: int, up: Sequence[Sequence[Replica]], draw: Draw) -> Replica:
        """The less loaded of two of the length's band, or of the next larger one that is up."""
        return _lesser(_alive(up, bisect_left(self._cuts, length)), draw)


def _alive(up: Sequence[Sequence[Replica]], band: int) -> Sequence[Replica]:
    for one in up[band:]:
        if one:
            return one
    raise Stalled(f"A request needs a replica that is up and holds its length; band {band} has none.")


def _any(replicas: Sequence[Replica], draw: Draw) -> Replica:
    return replicas[int(draw() * len(replicas))]


def _lesser(replicas: Sequence[Replica], draw: Draw) -> Replica:
    one, two = _any(replicas, draw), _any(replicas, draw)
    return one if one.load <= two.load else two
