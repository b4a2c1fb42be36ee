"""The host's table of per-row data, by slot, and how a step's inputs are cut from it.

Sampling parameters are columns here, so that they are data of the programs and never shapes. A row is
written once, when its sequence joins; what changes at each step is changed for all rows at once.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .errors import PoolFault
from .pages import PagePool
from .params import SamplingParams
from .seam import NULL_PAGE, SINK_PAGE

SLOT, CONTEXT, LENGTH, STEP, SAMPLE, TOP_K, WANTED, SEED_HIGH, SEED_LOW = range(9)
INTS = 9
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
FLOATS = 6
Inputs = dict[str, np.ndarray]


class Program(Protocol):
    """What of a program's key decides its inputs; see `Key`."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def chunk(self) -> int: ...  # noqa: D102


def token_shapes(key: Program) -> dict[str, tuple[int, ...]]:
    """Inputs of a step, int32, beside the columns of `RowTable`.

    `prefill`: `ids`, a chunk a row. `mixed`: `ids`, a token a row or -1 for the one chosen last, `further`,
    ids, rows (-1 for padding) and places of other tokens of the rows' chunks, and `reads`, the row whose
    further tokens have a past. `verify`: `guesses`, tokens that may follow a row's last one.
    """
    if key.kind == "prefill":
        return {"ids": (key.rows, key.chunk)}
    if key.kind == "mixed":
        return {"ids": (key.rows,), "further": (3, key.chunk), "reads": ()}
    if key.kind == "verify":
        return {"guesses": (key.rows, key.chunk - 1)}
    return {}


def no_tokens(key: Program) -> Inputs:
    """Those inputs with nothing in them."""
    inputs = {name: np.zeros(shape, np.int32) for name, shape in token_shapes(key).items()}
    if "further" in inputs:
        inputs["further"][1] = -1
    return inputs


def all_tokens(key: Program, inputs: Inputs) -> Inputs:
    """Inputs of no rows as of a step that is full to its last place, and writes to the sink's page.

    A step of padding only is no measure: a program may leave out what is padded.
    """
    full = inputs | no_tokens(key)
    full["page_table"][:] = SINK_PAGE
    full["ints"][:, LENGTH] = key.chunk if key.kind in ("prefill", "verify") else 1
    if key.kind == "mixed":
        full["ints"][0, LENGTH] += key.chunk
        full["further"][1:] = np.stack([np.zeros(key.chunk), np.arange(key.chunk)])
    return full


class RowTable:
    """Columns of every slot; the last row is the sink's: no tokens, null pages, greedy.

    Attributes:
        ints: int32 `(slots + 1, INTS)`.
        floats: float32 `(slots + 1, FLOATS)`.
        pages: int32 `(slots + 1, width)`.
        bias_ids: int32 `(slots + 1, biases)`.
        bias: float32 `(slots + 1, biases)`; minus infinity bans a token until `min_tokens`, whose column is
            the last of the ids.
    """

    def __init__(self, slots: int, *, width: int, biases: int) -> None:
        self.sink = slots
        self.ints = np.zeros((slots + 1, INTS), np.int32)
        self.ints[:, SLOT] = np.arange(slots + 1)
        self.floats = np.zeros((slots + 1, FLOATS), np.float32)
        self.floats[:, [TOP_P, REPETITION]] = 1.0
        self.pages = np.full((slots + 1, width), NULL_PAGE, np.int32)
        self._generations = np.zeros((slots + 1, width), np.int64)
        self.bias_ids = np.zeros((slots + 1, biases + 1), np.int32)
        self.bias = np.zeros((slots + 1, biases), np.float32)

    def join(self, slot: int, params: SamplingParams, seed: int, stop_ids: Sequence[int]) -> None:
        """Write a sequence's parameters."""
        ints, floats = self.ints[slot], self.floats[slot]
        ints[CONTEXT:] = 0
        ints[TOP_K] = min(params.top_k, np.iinfo(np.int32).max)
        ints[WANTED] = params.logprobs is not None
        ints[[SEED_HIGH, SEED_LOW]] = np.array(divmod(seed % (1 << 64), 1 << 32), np.uint32).view(np.int32)
        floats[TEMPERATURE], floats[TOP_P], floats[MIN_P] = params.temperature, params.top_p, params.min_p
        floats[REPETITION] = params.repetition_penalty
        floats[PRESENCE], floats[FREQUENCY] = params.presence_penalty, params.frequency_penalty
        self._bias(slot, params, stop_ids)

    def _bias(self, slot: int, params: SamplingParams, stop_ids: Sequence[int]) -> None:
        ids, values = self.bias_ids[slot], self.bias[slot]
        ids[:], values[:] = 0, 0.0
        banned = list(stop_ids) if params.min_tokens else []
        pairs = [*params.logit_bias.items(), *((token, -np.inf) for token in banned)]
        for place, (token, value) in enumerate(pairs):
            ids[place], values[place] = token, value
        ids[-1] = params.min_tokens

    def set_pages(self, slot: int, pages: Sequence[int], pool: PagePool, begin: int = 0) -> None:
        """Write a row's pages from place `begin` on, and null pages behind them."""
        self.pages[slot, begin : begin + len(pages)] = pages
        self.pages[slot, begin + len(pages) :] = NULL_PAGE
        self._generations[slot] = pool.generations[self.pages[slot]]

    def leave(self, slot: int) -> None:
        """Point at no page and ask for nothing any more."""
        self.pages[slot] = NULL_PAGE
        self._generations[slot] = 0
        self.ints[slot, CONTEXT:] = 0
        self.floats[slot] = self.floats[self.sink]
        self.bias[slot] = 0.0

    def inputs(self, slots: Sequence[int], rows: int, pool: PagePool) -> Inputs:
        """Copies of the rows of these slots, then the sink's up to `rows`.

        Raises:
            PoolFault: a row points at a page that was returned since.
        """
        index = np.full(rows, self.sink, np.int32)
        index[: len(slots)] = slots
        pages = self.pages[index]
        stale = (pool.generations[pages] != self._generations[index]) & (pages != NULL_PAGE)
        if stale.any():
            raise PoolFault(f"a table points at held pages only; pages {pages[stale].tolist()} were returned")
        bias = self.bias[index]
        return {
            "ints": self.ints[index],
            "floats": self.floats[index],
            "page_table": pages,
            "bias_ids": self.bias_ids[index],
            "bias": bias,
        }
