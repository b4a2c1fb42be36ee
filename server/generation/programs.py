"""The programs of a language model: a fixed set, compiled ahead of time.

`decode` runs rows of one token, `prefill` rows of a chunk, `mixed` rows of one token with further tokens of
prompts beside them and `verify` rows of one token with guesses behind it, each with the sampler compiled in;
`copy` copies pages, `fill` writes one slot's token counts and `zeros` makes the state. The state, KV pool and
last tokens, goes from program to program and is donated to each; parameters are arguments that all share.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from ...jit_cache import CompileError, ProgramFacts
from ...jit_cache.store import Store
from . import rows as r
from .errors import StateFault
from .recipes import Maker, Recipe
from .sampler import choose, count
from .seam import NULL_PAGE, SINK_PAGE, LanguageModel
from .verify import verify

COPIES = 8
State = dict[str, Any]
Batch = Mapping[str, Any]


class Key(NamedTuple):
    """Names a program.

    Attributes:
        kind: `decode`, `prefill`, `mixed`, `verify`, `copy`, `fill` or `zeros`.
        rows: rows of the batch.
        chunk: tokens a row (prefill, verify), steps (decode), or tokens beside those of the rows (mixed).
    """

    kind: str
    rows: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        sign = "+" if self.kind == "mixed" else "x"
        return self.kind if not self.rows else f"{self.kind} {self.rows}{sign}{self.chunk}"

    @property
    def tokens(self) -> int:
        """That one launch computes, padding included."""
        return self.rows + self.chunk if self.kind == "mixed" else self.rows * self.chunk


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes that are the same in all programs.

    Attributes:
        pages: of the pool, null and sink page included.
        page_size: tokens in a page.
        width: entries in a row of the page table.
        slots: rows of the state beside the sink.
        biases: entries of a row's logit bias.
        tops: most likely tokens that are reported.
    """

    pages: int
    page_size: int
    width: int
    slots: int
    biases: int
    tops: int


@dataclass
class Programs:
    """Compiles and runs them. One thread may run them; compiling may happen in another.

    Args:
        model: whose.
        shapes: sizes.
        store: where executables are kept between starts; None keeps none.
        compiled: executables.
        facts: what the compiler said of each.
        alias_bytes: of its arguments that each updates in place.
    """

    model: LanguageModel
    shapes: Shapes
    store: Store | None = None
    compiled: dict[Key, Any] = field(default_factory=dict)
    facts: dict[Key, ProgramFacts] = field(default_factory=dict)
    alias_bytes: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._maker = Maker(self.store)
        self.params: Any = None
        self.state: State | None = None
        self.kv_bytes = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state_shapes()["kv"])
        )

    def state_shapes(self) -> State:
        """Shapes of the donated state: `kv`, `last` int32 `(slots + 1,)`, `seen` `(slots + 1, vocab)`."""
        one = self.shapes
        return {
            "kv": self.model.kv_shapes(pages=one.pages, page_size=one.page_size),
            "last": jax.ShapeDtypeStruct((one.slots + 1,), jnp.int32),
            "seen": jax.ShapeDtypeStruct((one.slots + 1, self.model.vocab_size), jnp.int32),
        }

    # -- compile thread -----------------------------------------------------------------------------

    def place(self) -> None:
        """Put the weights on the device, once."""
        if self.params is None:
            self.params = jax.device_put(self.model.params)

    def pin(self, keys: Sequence[Key]) -> None:
        """Say which programs are going to be made, so that storing one does not evict another."""
        for key in keys:
            self._maker.key(str(key), self.recipe(key))

    def compile(self, key: Key) -> float:
        """Load or compile one program; seconds that it took.

        Raises:
            CompileError: it does not compile, or would copy the pool at each step.
        """
        if key in self.compiled:
            return self.facts[key].ready_s
        made = self._maker.make(str(key), self.recipe(key), functools.partial(self._check, key))
        self.compiled[key], self.facts[key], self.alias_bytes[key] = made
        return made.facts.ready_s

    def recipe(self, key: Key) -> Recipe:
        """What a program is traced from."""
        state = self.state_shapes()
        sizes = {"rows": key.rows, "chunk": key.chunk} if key.rows else {}
        if key.kind == "zeros":
            # One computation a leaf would let the compiler share a buffer between equal ones.
            return Recipe(functools.partial(_zeros, state), (), (), sizes)
        if key.kind == "copy":
            pages = jax.ShapeDtypeStruct((COPIES,), jnp.int32)
            return Recipe(_copy, (state, pages, pages), (0,), sizes)
        if key.kind == "fill":
            row = jax.ShapeDtypeStruct((self.model.vocab_size,), jnp.int32)
            return Recipe(_fill, (state, jax.ShapeDtypeStruct((), jnp.int32), row), (0,), sizes)
        if key.kind == "decode":
            run = functools.partial(_decode, self.model.step, self.shapes.tops, key.chunk)
        elif key.kind == "prefill":
            run = functools.partial(_prefill, self.model.step, self.shapes.tops)
        elif key.kind == "verify":
            run = functools.partial(verify, cast(Any, self.model).verify_step, self.shapes.tops)
        else:
            run = functools.partial(_mixed, cast(Any, self.model).mixed_step, self.shapes.tops)
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.model.params)
        return Recipe(run, (params, state, self._batch_shapes(key)), (1,), sizes)

    def _check(self, key: Key, executable: Any) -> int:
        """Alias bytes; a pool that is not updated in place would be copied at each step."""
        memory = executable.memory_analysis()
        if memory is None or key.kind == "zeros":
            return 0
        alias = int(memory.alias_size_in_bytes)
        if alias < self.kv_bytes:
            raise CompileError(
                f"a program updates the KV pool of {self.kv_bytes} bytes in place; {key} aliases {alias}: "
                f"return the pool from step with the shapes and dtypes it came with"
            )
        return alias

    def _batch_shapes(self, key: Key) -> Batch:
        one, rows = self.shapes, key.rows
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "ints": ((rows, r.INTS), jnp.int32),
            "floats": ((rows, r.FLOATS), jnp.float32),
            "page_table": ((rows, one.width), jnp.int32),
            "bias_ids": ((rows, one.biases + 1), jnp.int32),
            "bias": ((rows, one.biases), jnp.float32),
        }
        shapes |= {name: (shape, jnp.int32) for name, shape in r.token_shapes(key).items()}
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}

    # -- device thread ------------------------------------------------------------------------------

    def reset(self) -> None:
        """A state of zeros; the old one is let go first, since both may not fit."""
        self.state = None
        self.install(self.compiled[Key("zeros")]())

    def install(self, state: State) -> None:
        """Take a state.

        Raises:
            StateFault: two of its arrays share a buffer, which a program that is given both cannot donate.
        """
        leaves = jax.tree.leaves(state)
        places = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.nbytes]
        if len(set(places)) < len(places):
            raise StateFault("each array of a donated state has a buffer of its own; two share one: copy it")
        self.state = state

    @property
    def lost(self) -> bool:
        """Whether a failed launch took the state with it."""
        return self.state is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def step(self, key: Key, batch: Batch) -> Any:
        """Launch a decode or prefill program; what the sampler chose, not yet computed."""
        out, self.state = self.compiled[key](self.params, self.state, batch)
        return out

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, `(source, target)` each."""
        for begin in range(0, len(pairs), COPIES):
            some = pairs[begin : begin + COPIES]
            source = np.full(COPIES, NULL_PAGE, np.int32)
            target = np.full(COPIES, SINK_PAGE, np.int32)
            source[: len(some)], target[: len(some)] = zip(*some, strict=True)
            self.state = self.compiled[Key("copy")](self.state, source, target)

    def fill(self, slot: int, prompt: np.ndarray, text: np.ndarray) -> None:
        """Write the token counts of a slot whose sequence has penalties."""
        vocab = self.model.vocab_size
        row = np.bincount(text, minlength=vocab) + (np.bincount(prompt, minlength=vocab) << 16)
        self.state = self.compiled[Key("fill")](self.state, np.int32(slot), row.astype(np.int32))


def _zeros(shapes: State) -> State:
    return {
        name: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), part)
        for name, part in shapes.items()
    }


def _fill(state: State, slot: jax.Array, row: jax.Array) -> State:
    return {**state, "seen": jax.lax.dynamic_update_index_in_dim(state["seen"], row, slot, axis=0)}


def _copy(state: State, source: jax.Array, target: jax.Array) -> State:
    def put(i: jax.Array, kv: Any) -> Any:
        def one(pool: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_index_in_dim(pool, source[i], axis=1)
            return jax.lax.dynamic_update_slice_in_dim(pool, page, target[i], axis=1)

        return jax.tree.map(one, kv)

    return {**state, "kv": jax.lax.fori_loop(0, source.shape[0], put, state["kv"])}


def _forward(
    step: Callable[..., Any], tops: int, params: Any, state: State, batch: Batch, **tokens: jax.Array
) -> tuple[Any, State]:
    ints = batch["ints"]
    logits, kv = step(
        params,
        state["kv"],
        **tokens,
        page_table=batch["page_table"],
        context_lengths=ints[:, r.CONTEXT],
        chunk_lengths=ints[:, r.LENGTH],
    )
    chosen = choose(logits, state["seen"], dict(batch), tops)
    slots, samples = ints[:, r.SLOT], ints[:, r.SAMPLE] > 0
    sink = jnp.int32(state["last"].shape[0] - 1)
    last = state["last"].at[jnp.where(samples, slots, sink)].set(chosen.tokens)
    return chosen, {"kv": kv, "last": last, "seen": count(state["seen"], chosen.tokens, ints)}


def _prefill(
    step: Callable[..., Any], tops: int, params: Any, state: State, batch: Batch
) -> tuple[Any, State]:
    chosen, state = _forward(step, tops, params, state, batch, ids=batch["ids"])
    return jax.tree.map(lambda leaf: leaf[None], chosen), state


def _mixed(step: Callable[..., Any], tops: int, params: Any, state: State, batch: Batch) -> tuple[Any, State]:
    """A row's own token is given, or -1 for the one that was chosen for it last."""
    chosen_last = jnp.take(state["last"], batch["ints"][:, r.SLOT], mode="clip")
    ids = jnp.where(batch["ids"] < 0, chosen_last, batch["ids"])
    further = batch["further"]
    tokens = {"ids": ids, "further_ids": further[0], "further": further[1:], "reads": batch["reads"]}
    chosen, state = _forward(step, tops, params, state, batch, **tokens)
    return jax.tree.map(lambda leaf: leaf[None], chosen), state


def _decode(
    step: Callable[..., Any], tops: int, steps: int, params: Any, state: State, batch: Batch
) -> tuple[Any, State]:
    """Several steps, each fed by the token that the one before chose; outputs `(steps, rows, ...)`."""
    advance = np.zeros((1, r.INTS), np.int32)
    advance[0, [r.CONTEXT, r.STEP]] = 1

    def one(carry: tuple[State, jax.Array], _: None) -> tuple[tuple[State, jax.Array], Any]:
        state, ints = carry
        ids = jnp.take(state["last"], ints[:, r.SLOT], mode="clip")[:, None]
        chosen, state = _forward(step, tops, params, state, {**batch, "ints": ints}, ids=ids)
        return (state, ints + advance * (ints[:, r.LENGTH : r.LENGTH + 1] > 0).astype(jnp.int32)), chosen

    if steps == 1:
        (state, _), chosen = one((state, batch["ints"]), None)
        return jax.tree.map(lambda leaf: leaf[None], chosen), state
    (state, _), chosen = jax.lax.scan(one, (state, batch["ints"]), None, length=steps)
    return chosen, state
