"""From settings to an engine: sizes, the list of programs, and the parts joined."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ..batching.clock import Clock
from ..batching.shares import parse_weights
from ..errors import ConfigError
from .books import Books
from .chunking import Bucket, default_buckets, default_mixed
from .desk import Desk
from .door import Bounds
from .drafting import Drafting, verify_buckets
from .engine import Engine, StepRecord
from .pages import PagePool
from .prefix import PrefixCache
from .programs import Key, Programs, Shapes
from .rows import RowTable
from .scheduler import Limits
from .seam import FIRST_PAGE, LanguageModel
from .slots import Slots

_DEFAULT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a `GenerationServer`, under the names they have there."""

    pages: int | None
    page_size: int
    max_rows: int
    prefill_chunk: int | None
    prefill_buckets: tuple[Bucket, ...] | None
    mixed_buckets: tuple[Bucket, ...] | None
    decode_rows: tuple[int, ...] | None
    decode_steps: int
    depth: int
    prefix_cache: bool
    priorities: str
    tops: int
    biases: int
    stop_ids: int
    draft_tokens: int = 0
    draft_rows: int = 4

    def __post_init__(self) -> None:
        counts = ("page_size", "max_rows", "prefill_chunk", "decode_steps", "depth", "tops", "stop_ids")
        for name in (*counts, "draft_rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is at least 1; got {value}")
        for name in ("prefill_buckets", "mixed_buckets"):
            for bucket in getattr(self, name) or ():
                if min(bucket) < 1:
                    raise ConfigError(f"{name} have at least 1 row and 1 token; got {tuple(bucket)}")
        if self.biases < 0:
            raise ConfigError(f"max_logit_bias is at least 0; got {self.biases}")
        if self.draft_tokens < 0:
            raise ConfigError(
                f"draft_tokens is at least 0; got {self.draft_tokens}: leave it out for no guesses"
            )
        if self.pages is not None and self.pages <= FIRST_PAGE:
            raise ConfigError(f"pages is more than {FIRST_PAGE}, null and sink page; got {self.pages}")


def build(
    model: LanguageModel,
    setup: Setup,
    desk: Desk,
    clock: Clock,
    on_step: Callable[[StepRecord], None] | None,
    make_programs: Callable[[Any, Shapes], Any] = Programs,
) -> tuple[Engine, list[Key], Bounds]:
    """The engine, not yet warm, its programs in the order of warm-up, and what requests may ask for.

    Raises:
        ConfigError: settings that contradict each other.
    """
    tokens = model.limits["tokens"]
    width = -(-tokens // setup.page_size)
    pages = setup.pages
    if pages is None:
        pages = FIRST_PAGE + setup.max_rows * -(-min(tokens, _DEFAULT_TOKENS) // setup.page_size)
    rows = _ladder(setup)
    buckets, mixed = _buckets(model, setup)
    guessing = _guessing(model, setup)
    # Twice the rows: one whose last step is not read delays no newcomer.
    slots = 2 * setup.max_rows
    bias_places = setup.biases + setup.stop_ids
    tops = min(setup.tops, model.vocab_size)
    shapes = Shapes(pages, setup.page_size, width, slots, bias_places, tops)
    pool = PagePool(pages, setup.page_size)
    books = Books(
        PrefixCache(pool, enabled=setup.prefix_cache),
        Slots(slots),
        RowTable(slots, width=width, biases=bias_places),
        Limits(setup.page_size, setup.max_rows, buckets, setup.decode_steps, mixed, rows),
        rows,
        parse_weights(setup.priorities),
        Drafting(guessing, rows) if guessing else None,
    )
    keys = [Key("zeros"), Key("copy"), Key("fill")]
    keys += [Key("prefill", *bucket) for bucket in buckets] + [Key("mixed", *bucket) for bucket in mixed]
    keys += [Key("decode", size, steps) for steps in sorted({1, setup.decode_steps}) for size in rows]
    keys += [Key("verify", *bucket) for bucket in guessing]
    engine = Engine(books, make_programs(model, shapes), desk, clock, depth=setup.depth, on_step=on_step)
    bounds = Bounds(tokens, pool.size * setup.page_size, tops, setup.biases, setup.stop_ids)
    return engine, keys, bounds


def _buckets(model: LanguageModel, setup: Setup) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
    """Programs that only read prompts, and those that decode as well."""
    budget = _chunk(setup)
    if getattr(model, "mixed_step", None) is None:
        if setup.mixed_buckets:
            raise ConfigError(
                f"mixed_buckets are for a model with mixed_step; {model.name} has none: leave them out"
            )
        return setup.prefill_buckets or default_buckets(budget, setup.max_rows), ()
    mixed = setup.mixed_buckets
    if mixed is None:
        mixed = default_mixed(budget, setup.max_rows)
    if setup.prefill_buckets:
        return setup.prefill_buckets, mixed
    buckets = default_buckets(budget, setup.max_rows)
    return tuple(one for one in buckets if one.rows == 1 or not mixed), mixed


def _guessing(model: LanguageModel, setup: Setup) -> tuple[Bucket, ...]:
    """Programs that check guesses."""
    if not setup.draft_tokens:
        return ()
    if getattr(model, "verify_step", None) is None:
        raise ConfigError(
            f"guesses are checked by a model's verify_step; {model.name} has none: leave draft_tokens out"
        )
    if setup.draft_tokens >= model.limits["tokens"]:
        raise ConfigError(
            f"draft_tokens is less than a text can have, {model.limits['tokens']} tokens; got "
            f"{setup.draft_tokens}: a few are enough, 7 for example"
        )
    return verify_buckets(setup.draft_tokens, min(setup.draft_rows, setup.max_rows))


def _chunk(setup: Setup) -> int:
    """On CPU 128 tokens read a tenth faster than 64, and hold running texts up twice as long."""
    if setup.prefill_chunk is not None:
        return setup.prefill_chunk
    return 64 if jax.default_backend() == "cpu" else 512


def _ladder(setup: Setup) -> tuple[int, ...]:
    if setup.decode_rows is None:
        sizes = {1 << power for power in range(setup.max_rows.bit_length())} | {setup.max_rows}
        return tuple(sorted(size for size in sizes if size <= setup.max_rows))
    rows = tuple(sorted(set(setup.decode_rows)))
    if not rows or rows[0] < 1 or rows[-1] < setup.max_rows:
        raise ConfigError(
            f"decode_rows reach max_rows, {setup.max_rows}, or some step has no program; got {rows}"
        )
    return rows
