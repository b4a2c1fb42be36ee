"""Items, junk and runs for the padding-safety check: what goes into a bucket and what comes out of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import jax.numpy as jnp
import numpy as np

from ..bucketing import Bucket
from .errors import InputError
from .program import Program
from .servable import Servable
from .signature import Input
from .staging import Staging

Item = Mapping[str, np.ndarray]
# Ids of an unknown vocabulary: large enough to differ from each other, small enough for most tables.
_UNKNOWN_IDS = 16


class Filler(Enum):
    """What stands in the padding; the value says it in words."""

    PAD = "the pad value"
    ZERO = "0"
    BIG = "1e4"
    NAN = "NaN"
    RANDOM = "random valid values"


_FLOAT_JUNK = {Filler.ZERO: 0.0, Filler.BIG: 1e4, Filler.NAN: float("nan")}


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: the answers of its real rows, and everything the program returned.

    Attributes:
        rows: for each real row its output leaves, cut to the row's sizes.
        whole: each output leaf, ``(batch, ...)``, padding included.
        bucket: where it ran.
    """

    rows: list[list[np.ndarray]]
    whole: list[np.ndarray]
    bucket: Bucket


class Bench:
    """Runs a servable on numbered items in any bucket, with any filler in the padding.

    Args:
        servable: what to run.
        compile_fn: makes the program of a bucket; each bucket is asked for once.
        items: real items, checked; none means random ones of the declared dtypes.
        ids_below: size of the vocabulary of integer inputs, by input name.
        controls: inputs that keep their pad value in all padding, such as a mask that callers send.
        seed: of everything random.

    Raises:
        InputError: if `ids_below` or `controls` names something that is not an input it can apply to.
    """

    def __init__(
        self,
        servable: Servable,
        compile_fn: Callable[[Bucket], Program],
        items: Sequence[Item],
        ids_below: Mapping[str, int],
        controls: Sequence[str] | None,
        seed: int,
    ) -> None:
        self.servable = servable
        self.signature = servable.signature
        self._compile = compile_fn
        self._items = items
        self._seed = seed
        self._controls = self._find_controls(controls)
        self._ids = {one.name: self._pool(one, ids_below) for one in self.signature.inputs if _integer(one)}
        self._guessed = set() if items else set(self._ids) - set(ids_below) - self._controls
        self.programs: dict[Bucket, Program] = {}
        if unknown := [name for name in ids_below if name not in self._ids]:
            raise InputError(
                f"ids_below is for the integer inputs {list(self._ids)}; got {unknown}: leave it out"
            )

    def _find_controls(self, given: Sequence[str] | None) -> set[str]:
        names = [one.name for one in self.signature.inputs]
        if given is None:
            return {one.name for one in self.signature.inputs if _boolean(one) or "mask" in one.name}
        if unknown := [name for name in given if name not in names]:
            raise InputError(f"controls are some of the inputs {names}; got {unknown}: leave it out")
        return set(given)

    def _pool(self, one: Input, ids_below: Mapping[str, int]) -> np.ndarray:
        if (below := ids_below.get(one.name)) is not None:
            return np.arange(below, dtype=one.dtype)
        if self._items:
            seen = [np.unique(item[one.name]) for item in self._items]
            return np.unique(np.concatenate([*seen, np.asarray([one.pad], one.dtype)]))
        # A byte is a pixel more often than a word.
        return np.arange(256 if one.dtype == np.uint8 else _UNKNOWN_IDS, dtype=one.dtype)

    def narrow(self) -> bool:
        """Use ids 0 and 1 only, if the vocabulary was guessed; whether anything changed."""
        if not self._guessed:
            return False
        self._ids.update({name: self._ids[name][:2] for name in self._guessed})
        self._guessed = set()
        return True

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket, compiled at its first use."""
        if bucket not in self.programs:
            self.programs[bucket] = self._compile(bucket)
        return self.programs[bucket]

    def item(self, number: int, sizes: Sequence[int]) -> dict[str, np.ndarray]:
        """The item of a number at given sizes."""
        by_axis = dict(zip(self.signature.axes, sizes, strict=True))
        made: dict[str, np.ndarray] = {}
        for place, one in enumerate(self.signature.inputs):
            rng = np.random.default_rng([self._seed, number, place])
            shape = tuple(by_axis[dim] if isinstance(dim, str) else dim for dim in one.dims)
            if self._items:
                made[one.name] = self._given(number, one, shape, rng)
            elif one.name in self._controls:
                made[one.name] = np.ones(shape, one.dtype)
            else:
                made[one.name] = self._random(one, shape, rng)
        return made

    def _given(self, number: int, one: Input, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        array = self._items[number % len(self._items)][one.name]
        if number >= len(self._items) and one.name not in self._controls:
            array = rng.permuted(array.reshape(-1)).reshape(array.shape)
        # Cut, or begin again, until it has the wanted size: every value is one that was given.
        for axis, size in enumerate(shape):
            array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
        return array

    def _random(self, one: Input, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        if one.name in self._ids:
            return rng.choice(self._ids[one.name], shape)
        if _boolean(one):
            return rng.integers(0, 2, shape).astype(np.bool_)
        return rng.standard_normal(shape).astype(one.dtype)

    def fillers(self) -> list[Filler]:
        """The fillers that differ from the pad value for some input."""
        free = [one for one in self.signature.inputs if one.name not in self._controls]
        if any(one.name not in self._ids for one in free):
            return [*_FLOAT_JUNK, Filler.RANDOM]
        return [
            *([Filler.ZERO] if any(one.pad != 0 for one in free) else []),
            *([Filler.RANDOM] if free else []),
        ]

    def sources(self) -> list[str]:
        """Inputs whose padding takes junk."""
        return [one.name for one in self.signature.inputs if one.name not in self._controls]

    def run(
        self, bucket: Bucket, items: Sequence[Item], filler: Filler = Filler.PAD, only: str | None = None
    ) -> Ran:
        """Pad items as the server does, put junk into the padding (of one input only, if named) and run.

        Raises:
            CompileError: if the bucket does not compile.
            OutputError: if the model returns what its signature does not allow.
        """
        program = self.program(bucket)
        sizes = [self.signature.item_sizes(item) for item in items]
        arrays = Staging(self.signature, bucket).fill(items, sizes)
        if filler is not Filler.PAD:
            for one in self.signature.inputs:
                if one.name not in self._controls and only in (None, one.name):
                    self._junk(one, arrays[one.name], [item[one.name] for item in items], filler)
        # Copied: an output may share its memory with an input.
        whole = [np.array(leaf) for leaf in program(arrays)]
        outputs = self.servable.outputs
        outputs.check_batch(whole, bucket.rows)
        return Ran(outputs.cut(whole, sizes), whole, bucket)

    def _junk(self, one: Input, out: np.ndarray, items: Sequence[np.ndarray], filler: Filler) -> None:
        real = np.zeros(out.shape, np.bool_)
        for row, item in enumerate(items):
            corner: tuple[int | slice, ...] = (row, *map(slice, item.shape))
            real[corner] = True
        if (one.name in self._ids and filler is not Filler.ZERO) or filler is Filler.RANDOM:
            junk = self._random(one, out.shape, np.random.default_rng([self._seed, 1 << 20]))
        else:
            junk = np.full(out.shape, _FLOAT_JUNK[filler]).astype(out.dtype)
        out[~real] = junk[~real]


def _integer(one: Input) -> bool:
    return bool(jnp.issubdtype(one.dtype, jnp.integer))


def _boolean(one: Input) -> bool:
    return one.dtype == np.bool_
