"""Versions of a model follow one another: who holds the handle of an old one is served by the latest."""

from typing import Self

from ..batching.dispatcher import Dispatcher


class Succession:
    """The part of a model that knows which version took its place, and its lane in the dispatcher.

    Attributes:
        lane: index in the dispatcher.
    """

    lane: int

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._successor: Self | None = None
        self._left = False

    @property
    def queue(self) -> Dispatcher:
        """Where its requests wait, with those of other models."""
        return self._dispatcher

    @property
    def left(self) -> bool:
        """Whether it gave its lane back, which may be another model's by now."""
        return self._left

    def load(self) -> tuple[int, int]:
        """Rows that wait and rows that run, with those of a later version."""
        waiting = running = 0
        model: Succession | None = self
        while model is not None:
            own = model.own_load()
            waiting, running = waiting + own[0], running + own[1]
            model = model._next()
        return waiting, running

    def own_load(self) -> tuple[int, int]:
        """Rows of this version that wait, and those that run."""
        if self._left:
            return 0, 0
        waiting, running = self._dispatcher.load(self.lane)
        return waiting.rows, running

    @property
    def latest(self) -> Self:
        """The version that takes requests: this one, or the last of those that took its place."""
        model = self
        while (later := model._next()) is not None:  # each is newer than the one before: this ends
            model = later
        return model

    def _next(self) -> Self | None:
        """The next version that has not left, or the last one."""
        later = self._successor
        while later is not None and later._left and later._successor is not None:
            later = later._successor
        self._successor = later  # or the versions of a year would follow one another
        return later

    def give_way(self, successor: Self) -> None:
        """From now on requests to this handle are the successor's; those let in are answered here."""
        self._successor = successor

    def leave(self) -> bool:
        """Give the lane back if nothing of this version waits or runs; whether that was so."""
        self._left = self._left or self._dispatcher.drop_lane(self.lane)
        return self._left
