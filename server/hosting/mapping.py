"""Any number of items at once: planned together while earlier ones run, and answered in their order."""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax

from ...bucketing import Bucket, Planner
from ..batching.admission import Load, half_full
from ..batching.pins import pin_of_call
from ..batching.together import as_run
from ..errors import Overloaded, PayloadTooLarge, TooManyRows
from .door import Door
from .model import Model

# Few at first, so that the device soon has work; with more than the last no plan gets better.
_FIRST, _MOST = 256, 4096
# For a queue that other callers fill, in all; and at a time, since their requests may be through earlier.
_PATIENCE_S, _PAUSE_S = 30.0, 0.5

Item = Mapping[str, Any]


class _Known(NamedTuple):
    """An item that waits to be planned: its place among all, itself, and its sizes on the varying axes."""

    place: int
    item: Item
    sizes: tuple[int, ...]


class _Piece(NamedTuple):
    """What is sent as one request, and the bucket that it was planned into, by the planner of that time."""

    known: Sequence[_Known]
    planned: tuple[Planner, Bucket] | None = None


def map_items(model: Model, items: Iterable[Item]) -> list[Any]:
    """The model's output tree for each item, in order; see `Server.map`."""
    mapping = _Mapping(model)
    source, window = iter(items), _FIRST
    try:
        while mapping.read(source, window):
            mapping.send()
            window = min(2 * window, _MOST)
        mapping.send()
        return mapping.finish()
    finally:
        mapping.cancel()


class _Mapping:
    """Items on their way: known, made into pieces, flying, answered."""

    def __init__(self, model: Model) -> None:
        self._model, self._door = model, Door(model.servable)
        self._queue = model.queue
        self._treedef = model.servable.outputs.treedef
        # Enough to fill several batches; two of them, which may fly, leave other callers half of the queue.
        most = max(1, self._queue.limits.rows // 4)
        self._step = min(model.max_request_rows, 4 * model.servable.most_items, most)
        self._known: list[_Known] = []
        self._pieces: deque[_Piece] = deque()
        self._flying: deque[tuple[_Piece, Future[list[list[Any]]]]] = deque()
        self._rows = 0
        self._patience_s = _PATIENCE_S
        self._answers: list[Any] = []

    def read(self, source: "Iterable[Item]", window: int) -> bool:
        """Take so many more items and plan them with those that were left; False if they were the last."""
        if (latest := self._model.latest) is not self._model:
            self._model, self._door = latest, Door(latest.servable)
        read, first = list(itertools.islice(source, window)), len(self._answers)
        items, sizes = self._door.check(read, first)
        self._known += map(_Known, itertools.count(first), items, sizes)
        self._answers += [None] * len(read)
        more = len(read) == window
        self._plan(more=more)
        return more

    def _plan(self, *, more: bool) -> None:
        known, planner = self._known, self._model.batcher.planner
        if planner is None or pin_of_call() is not None:
            begins = range(0, len(known), self._step)
            self._pieces += [_Piece(known[begin : begin + self._step]) for begin in begins]
            self._known = []
            return
        # The device thread's own planner follows the costs, and hopes, which would cost a whole window here.
        cost = self._model.cost
        runs, left = planner.with_cost(cost.seconds).whole(
            [one.sizes for one in known],
            more=more and len(known) < 2 * _MOST,
            untried=[bucket for bucket in planner.grid if cost.hopes(bucket)],
        )
        self._pieces += [_Piece([known[row] for row in run.rows], (planner, run.bucket)) for run in runs]
        self._known = [known[row] for row in left]

    def send(self) -> None:
        """Have all pieces fly; waits for answers where there is no room for more."""
        while self._pieces:
            known = self._pieces[0].known
            rows = len(known)
            if rows > self._step or (rows > 1 and self._crowds(known, Load())):
                self._halve(self._pieces.popleft())
            elif self._flying and self._rows + rows > 2 * self._step:
                self._collect(min(self._step, self._rows // 2))
            elif self._flying and self._crowds(known, self._queue.load()[0]):
                self._collect(self._rows - 1)  # of the oldest piece: what others sent goes on meanwhile
            elif not self._sent(self._pieces.popleft()):
                self._collect(self._rows // 2)

    def _sent(self, piece: _Piece) -> bool:
        """Send a piece; False if that has to wait for an answer to one that flies."""
        try:
            with nullcontext() if piece.planned is None else as_run(*piece.planned):
                future = self._model.run_threaded([one.item for one in piece.known])
        except (TooManyRows, PayloadTooLarge):
            # More than the queue may hold at once.
            if len(piece.known) == 1:
                raise
            self._halve(piece)
        except Overloaded as error:
            self._pieces.appendleft(piece)
            if not self._flying:
                self._pause(error)
            return False
        else:
            self._flying.append((piece, future))
            self._rows += len(piece.known)
        return True

    def _pause(self, error: Overloaded) -> None:
        """Wait for others, none of whose requests says when it is through; raises once that took too long."""
        seconds = min(error.retry_after_s, _PAUSE_S)
        self._patience_s -= seconds
        if self._patience_s < 0:
            raise error
        time.sleep(seconds)

    def _crowds(self, known: Sequence[_Known], load: Load) -> bool:
        """Whether these, beside what waits, would leave others less than half of the queue."""
        limits = self._queue.limits
        elements = 0 if limits.elements is None else sum([math.prod(one.sizes) for one in known])
        arrays = () if limits.bytes is None else [array for one in known for array in one.item.values()]
        load.add(len(known), elements, sum([array.nbytes for array in arrays]))
        return half_full(limits, load)

    def _halve(self, piece: _Piece) -> None:
        """Send a piece as two, which are planned anew when they wait."""
        middle = len(piece.known) // 2
        self._pieces.extendleft((_Piece(piece.known[middle:]), _Piece(piece.known[:middle])))

    def _collect(self, most: int) -> None:
        """Take the answers of the oldest pieces, until at most so many rows fly."""
        done, rows = 0, self._rows
        while rows > most:
            rows -= len(self._flying[done][0].known)
            done += 1
        if done:
            wait([self._flying[done - 1][1]])  # wakes once: they end about in this order
        for _ in range(done):
            piece, future = self._flying.popleft()
            self._rows -= len(piece.known)
            for one, row in zip(piece.known, future.result(), strict=True):
                self._answers[one.place] = jax.tree.unflatten(self._treedef, row)

    def finish(self) -> list[Any]:
        """All answers, once they are there."""
        self._collect(0)
        return self._answers

    def cancel(self) -> None:
        """Nobody waits for what flies."""
        for _, future in self._flying:
            future.cancel()
