"""A language model as Python sees it: start, warm up, generate, stream, drain."""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Unpack

import jax

from ...jit_cache.store import Store
from ..batching.clock import Clock, MonotonicClock
from ..batching.request import DEFAULT_PRIORITY, PRIORITIES
from ..batching.shares import check_weights, written_weights
from ..context import client_of_call
from ..errors import BadRequest, ConfigError
from .calls import Options, ThreadSink, checked
from .chunking import Bucket
from .desk import Desk, Event, LoopSink
from .door import Bounds, Door, Prompt, deadline, fresh_seed
from .engine import Engine, StepRecord
from .handle import TextHandle
from .host import Host
from .output import Delta
from .params import SamplingParams
from .pool_plan import PoolPlan, plan_pool
from .prefix import Namespace
from .programs import Key, Programs
from .seam import LanguageModel
from .sequence import Generation, Sink
from .setup import Setup, build
from .worker import OnProgress


class GenerationServer(Host, TextHandle):
    """Serves one language model from one device, by continuous batching over a paged KV pool.

    Use it as a context manager, or call `start`, `wait_ready` and `close`.

    Args:
        model: see `LanguageModel`.
        name: the name it is served by; by default the model's own.
        pages: of the KV pool; by default `max_rows` sequences of 1,024 tokens, or of the model's limit.
        page_size: tokens in a page.
        max_rows: sequences that run at once.
        prefill_chunk: most tokens of prompts read between two tokens of a running text; by default 64 on
            CPU and 512 elsewhere.
        prefill_buckets: `(rows, chunk)` of the prefill programs; made from `prefill_chunk` if left out.
        mixed_buckets: `(rows, tokens)` of the programs that read prompts' tokens beside one of each row.
        decode_rows: rows of the decode programs; powers of two up to `max_rows` if left out.
        decode_steps: decode steps in one launch where nobody can join or leave; 1 for never more.
        draft_tokens: tokens guessed ahead of a text and checked in one step, where up to `draft_rows` texts
            run and that is predicted to pay, see `drafting`; 0 for none.
        draft_rows: see `draft_tokens`.
        depth: steps in flight; 2 launches the next one before the last one is read.
        max_waiting: requests that wait at most; `client_rows` of them of one client.
        client_rows: see `max_waiting`; None for no bound.
        priority_weights: shares of the tokens that are computed, by priority, such as ``{1: 8, 5: 2}``; those
            not named have 1. They decide who joins next. None for strict order.
        timeout_s: most seconds that any request may take; a caller may ask for less.
        stall_s: a device that finishes no step for so long is taken for hung: `live` and `ready` turn false
            and those who wait are told.
        prefix_cache: share the pages of equal beginnings.
        max_logprobs: most likely tokens that may be reported at each place.
        max_logit_bias: entries that `logit_bias` may have.
        max_stop_ids: tokens that may end a text, the model's own included.
        seal: forbid tracing in the whole process once warm.
        on_step: called with each program's record, in the device thread.
        on_progress: called with the model's name and each step of the warm-up.
        store: where programs are kept between starts; None keeps none.
        memory_bytes: memory that weights, programs and pool may take, or a function that tells when the
            warm-up begins; the pool gets fewer pages if they do not fit. None plans nothing.
        on_plan: told the model's name and the plan before anything is allocated.
        clock: source of time, for tests.

    Raises:
        ConfigError: on an impossible setting.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str | None = None,
        pages: int | None = None,
        page_size: int = 64,
        max_rows: int = 32,
        prefill_chunk: int | None = None,
        prefill_buckets: Sequence[tuple[int, int]] | None = None,
        mixed_buckets: Sequence[tuple[int, int]] | None = None,
        decode_rows: Sequence[int] | None = None,
        decode_steps: int = 1,
        draft_tokens: int = 0,
        draft_rows: int = 4,
        depth: int = 2,
        max_waiting: int = 1024,
        client_rows: int | None = None,
        priority_weights: Mapping[int, float] | None = None,
        timeout_s: float | None = None,
        stall_s: float = 120.0,
        prefix_cache: bool = True,
        max_logprobs: int = 20,
        max_logit_bias: int = 300,
        max_stop_ids: int = 16,
        seal: bool = False,
        on_step: Callable[[StepRecord], None] | None = None,
        on_progress: OnProgress | None = None,
        store: Store | None = None,
        memory_bytes: int | Callable[[], int] | None = None,
        on_plan: Callable[[str, PoolPlan], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if getattr(jax.config, "jax_debug_nans", False):
            raise ConfigError(
                "NaN debugging runs a step again with arguments that were donated; jax_debug_nans is on: "
                "switch it off to serve"
            )
        check_weights(priority_weights or {})
        self.model = model
        self._clock = clock if clock is not None else MonotonicClock()
        self._timeout_s = timeout_s
        self._setup = Setup(
            pages=pages,
            page_size=page_size,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            prefill_buckets=None if prefill_buckets is None else tuple(Bucket(*b) for b in prefill_buckets),
            mixed_buckets=None if mixed_buckets is None else tuple(Bucket(*b) for b in mixed_buckets),
            decode_rows=None if decode_rows is None else tuple(decode_rows),
            decode_steps=decode_steps,
            draft_tokens=draft_tokens,
            draft_rows=draft_rows,
            depth=depth,
            prefix_cache=prefix_cache,
            priorities=written_weights(priority_weights),
            tops=max_logprobs,
            biases=max_logit_bias,
            stop_ids=max_stop_ids,
        )
        self.limits = MappingProxyType({**model.limits, "batch": max_rows})
        self._memory_bytes, self._on_plan = memory_bytes, on_plan
        self._on_step, self._make_programs = on_step, functools.partial(Programs, store=store)
        self.plan: PoolPlan | None = None
        desk = Desk(self._clock, max_waiting, stall_s, client_rows)
        engine, self._keys, bounds = self._built(desk)
        super().__init__(
            name if name is not None else model.name,
            engine,
            self._keys,
            desk,
            self._prepare,
            seal=seal,
            on_progress=on_progress,
        )
        self.models: Mapping[str, GenerationServer] = MappingProxyType({self.name: self})
        self._door = Door(model, bounds)
        self._order = itertools.count()

    def _built(self, desk: Desk) -> tuple[Engine, list[Key], Bounds]:
        return build(self.model, self._setup, desk, self._clock, self._on_step, self._make_programs)

    def _prepare(self) -> tuple[Engine, list[Key]]:
        """Plan the memory, then put the weights on the device; in the compile thread."""
        if self._memory_bytes is not None:
            most = self._memory_bytes
            budget = most if isinstance(most, int) else most()
            programs = self.engine.programs
            plan = plan_pool(programs, self._keys, budget_bytes=budget, depth=self._setup.depth)
            if plan.pages < programs.shapes.pages:
                self._setup = replace(self._setup, pages=plan.pages)
                self.engine, self._keys, bounds = self._built(self._desk)
                self._door = Door(self.model, bounds)
            self.plan = plan
            if self._on_plan is not None:
                self._on_plan(self.name, plan)
        self.engine.programs.pin(self._keys)
        self.engine.programs.place()
        return self.engine, self._keys

    @property
    def options(self) -> Mapping[str, Any]:
        """What is in force, such as the pages of the pool; plain values."""
        programs = [str(key) for key in self._keys]  # they tell the buckets
        known = {name: value for name, value in asdict(self._setup).items() if not isinstance(value, tuple)}
        pages = self.engine.programs.shapes.pages
        named = {name: value for name, value in known.items() if value is not None}
        return {**named, "pages": pages, "timeout_s": self._timeout_s, "programs": programs}

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Delta:
        """Continue a prompt, blocking.

        Args:
            prompt: a text, or token ids.
            params: see `SamplingParams`.
            options: see `Options`.

        Returns:
            The whole text as one delta.

        Raises:
            BadRequest, Overloaded, DeadlineExceeded, ModelError, Unavailable: as their names say.
        """
        sink = ThreadSink()
        one = self._post(prompt, params, sink, options, streams=False)
        try:
            return checked(sink.events.get())
        finally:
            self._desk.cancel(one)  # an interrupt: nobody waits any more

    def iterate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Delta]:
        """Continue a prompt, delta by delta, for threads; as `generate` otherwise. Close it to cancel."""
        sink = ThreadSink()
        one = self._post(prompt, params, sink, options, streams=True)
        return self._deltas(sink, one)

    def _deltas(self, sink: ThreadSink, one: Generation) -> Iterator[Delta]:
        try:
            while True:
                delta = checked(sink.events.get())
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._desk.cancel(one)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> Delta:
        """`generate` for asyncio; cancelling the task frees slot and pages within one step."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()

        def settle(event: Event) -> None:
            if not future.done():
                future.set_result(event)

        sink = LoopSink(asyncio.get_running_loop(), settle)
        one = self._post(prompt, params, sink, options, streams=False)
        try:
            return checked(await future)
        finally:
            self._desk.cancel(one)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[Delta]:
        """Continue a prompt, delta by delta, for asyncio; leaving the iterator frees slot and pages."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        sink = LoopSink(asyncio.get_running_loop(), events.put_nowait)
        one = self._post(prompt, params, sink, options, streams=True)
        try:
            while True:
                delta = checked(await events.get())
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self._desk.cancel(one)

    def _post(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        sink: Sink,
        options: Options,
        *,
        streams: bool,
    ) -> Generation:
        self.require_ready()
        priority = options.get("priority", DEFAULT_PRIORITY)
        if priority not in PRIORITIES:
            raise BadRequest(f"priority is 1 to 9; got {priority}")
        params = params if params is not None else SamplingParams()
        stop_ids = self._door.stop_ids(params)
        ids = self._door.ids(prompt)
        one = Generation(
            ids,
            params,
            sink=sink,
            order=next(self._order),
            most=self._door.most(len(ids), params),
            seed=fresh_seed(params),
            stop_ids=stop_ids,
            detokenizer=self.model.tokenizer.stream(skip_special=params.skip_special),
            priority=priority,
            deadline_s=deadline(self._clock.now(), self._timeout_s, options.get("timeout_s")),
            namespace=Namespace(salt=options.get("salt")),
            streams=streams,
            client=client_of_call(),
        )
        self._desk.post(one)
        return one
