"""A fake engine, tokenizer and models whose answers can be worked out by hand; for tests of transports."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .errors import BadTensor, Closed, NonFiniteInput, TooLong, TooManyRows
from .seam import TensorSpec

Row = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Spec:
    """A tensor's name, dtype and per-item shape; implements `TensorSpec`."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]


def check_row(row: Row, inputs: Sequence[TensorSpec], limits: Mapping[str, int], finite: bool) -> None:
    """Raises `BadTensor`, `TooLong` or `NonFiniteInput` if a row is not what the specs declare."""
    if set(row) != {spec.name for spec in inputs}:
        raise BadTensor(
            f"A row needs inputs {[s.name for s in inputs]}, got {sorted(row)}; send exactly those."
        )
    for spec in inputs:
        array = row[spec.name]
        if array.dtype != spec.dtype or array.ndim != len(spec.shape):
            raise BadTensor(
                f"Input {spec.name!r} must be {spec.dtype}{list(spec.shape)}, "
                f"got {array.dtype}{list(array.shape)}; convert it."
            )
        for size, axis in zip(array.shape, spec.shape, strict=True):
            if isinstance(axis, int) and size != axis:
                raise BadTensor(f"Input {spec.name!r} needs size {axis}, got {size}; reshape it.")
            if isinstance(axis, str) and size > limits.get(axis, size):
                raise TooLong(f"{axis} of {spec.name!r} is at most {limits[axis]}, got {size}; shorten it.")
        if finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NonFiniteInput(f"Input {spec.name!r} must be finite, got NaN or infinity; clean it.")


@dataclass
class FakeModel:
    """A model that is a plain function of one row.

    Attributes:
        run: called once a row; its answer is the row's answer.
        calls: the rows of every `submit` that reached the "device".
        options: the `(priority, timeout_s)` of those calls.
        error: raised by the next calls instead of running, while it is set.
        entered: set once a held call waits for the device.
        abandoned: set once a held call was cancelled.
    """

    name: str
    run: Callable[[Row], dict[str, np.ndarray]]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    version: str = "1"
    max_request_rows: int = 64
    allow_nonfinite: bool = False
    ready: bool = True
    error: Exception | None = None
    calls: list[list[Row]] = field(default_factory=list)
    options: list[tuple[int, float | None]] = field(default_factory=list)
    closed: bool = False
    entered: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    _gate: "Future[None] | None" = None

    def hold(self) -> None:
        """Makes `submit` wait until `release`, as a busy device would."""
        self._gate = Future()
        self.entered.clear()
        self.abandoned.clear()

    def release(self) -> None:
        """Lets the held calls run; from any thread."""
        if self._gate is not None:
            self._gate.set_result(None)
            self._gate = None

    async def submit(
        self, rows: Sequence[Row], *, priority: int = 0, timeout_s: float | None = None
    ) -> list[dict[str, np.ndarray]]:
        """See `ModelHandle.submit`."""
        if self.closed:
            raise Closed("A closed model takes no request, got one; use another replica.")
        if len(rows) > self.max_request_rows:
            raise TooManyRows(
                f"A request holds at most {self.max_request_rows} rows, got {len(rows)}; split it."
            )
        for row in rows:
            check_row(row, self.inputs, self.limits, not self.allow_nonfinite)
        if not rows:
            return []
        if self.error is not None:
            raise self.error
        self.calls.append(list(rows))
        self.options.append((priority, timeout_s))
        if (gate := self._gate) is not None:  # read once: another thread may release it at any time
            self.entered.set()
            try:
                await asyncio.shield(asyncio.wrap_future(gate))
            except asyncio.CancelledError:
                self.abandoned.set()
                raise
        return [self.run(row) for row in rows]


class FakeEngine:
    """An engine over fake models; `ready`, `live`, `draining`, `done` and `total` are set by the test."""

    def __init__(self, *models: FakeModel) -> None:
        self.models: dict[str, FakeModel] = {model.name: model for model in models}
        self.live = True
        self.draining = False
        self.warm = True
        self.done = self.total = 29
        self.closed_after_s: float | None = None

    @property
    def ready(self) -> bool:
        """True when warm and not draining."""
        return self.warm and not self.draining

    def cool(self, done: int) -> None:
        """Goes back to a warm-up of which `done` programs are finished."""
        self.warm, self.done = False, done
        for model in self.models.values():
            model.ready = False

    def heat(self) -> None:
        """Finishes the warm-up."""
        self.warm, self.done = True, self.total
        for model in self.models.values():
            model.ready = True

    def status(self) -> dict[str, Any]:
        """See `Engine.status`."""
        state = "draining" if self.draining else "ready" if self.warm else "warming"
        return {"state": state, "done": self.done, "total": self.total, "warm": self.warm, "failed": {}}

    async def aclose(self, drain_s: float) -> None:
        """Marks everything closed at once."""
        self.draining = True
        self.closed_after_s = drain_s
        for model in self.models.values():
            model.closed = True


def counting_embedder(name: str = "toy", *, length: int = 16) -> FakeModel:
    """`ids: int32[length]` to `embedding: float32[4]` = (count, sum, first, last) of the ids."""

    def run(row: Row) -> dict[str, np.ndarray]:
        ids = row["ids"]
        return {"embedding": np.array([len(ids), ids.sum(), ids[0], ids[-1]], np.float32)}

    return FakeModel(
        name,
        run,
        inputs=(Spec("ids", np.dtype(np.int32), ("length",)),),
        outputs=(Spec("embedding", np.dtype(np.float32), (4,)),),
        limits={"length": length, "batch": 8},
    )


def doubler(name: str = "double", dtype: Any = np.float32, shape: tuple[int | str, ...] = (8,)) -> FakeModel:
    """`x` to `y = x + x` and `n` = the number of values in x, as int64."""
    kind: np.dtype[Any] = np.dtype(dtype)
    return FakeModel(
        name,
        lambda row: {"y": row["x"] + row["x"], "n": np.array(row["x"].size, np.int64)},
        inputs=(Spec("x", kind, shape),),
        outputs=(Spec("y", kind, shape), Spec("n", np.dtype(np.int64), ())),
        limits={axis: 64 for axis in shape if isinstance(axis, str)} | {"batch": 8},
    )


class FakeTokenizer:
    """One token a word: 10 + the word's length, between 1 (start) and 2 (end)."""

    vocab_size = 1000

    def __init__(self, max_tokens: int = 16) -> None:
        self.max_tokens = max_tokens

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, int32, never cut."""
        return [np.array([1, *(10 + min(len(w), 900) for w in t.split()), 2], np.int32) for t in texts]

    def truncate(self, ids: np.ndarray, max_tokens: int, side: Literal["left", "right"]) -> np.ndarray:
        """Cuts words at that side so that `max_tokens` are left, keeping the start and end tokens."""
        if len(ids) <= max_tokens:
            return ids
        words, room = ids[1:-1], max(0, max_tokens - 2)
        kept = words[:room] if side == "right" else words[len(words) - room :]
        return np.concatenate([ids[:1], kept, ids[-1:]])
