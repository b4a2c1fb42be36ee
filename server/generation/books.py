"""The engine's books: which sequences wait and run, and what of memory and slots each holds.

One thread owns them. Nothing here touches the device: `carry_out` turns a plan into host arrays to launch
and `settle` books what was read, so the whole of scheduling can be tested without one.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .drafting import Draft, Drafting, drafter
from .errors import PoolFault
from .launches import Launch, Launcher, Member
from .line import Line
from .pages import PagePool
from .prefix import Entry, PrefixCache
from .rows import CONTEXT, STEP, RowTable
from .scheduler import Limits, Plan, Running, Waiting, plan
from .sequence import Generation, State
from .slots import Slots


@dataclass(slots=True)
class Work:
    """What a plan asks of the device, in this order.

    Attributes:
        copies: pages to copy, `(source, target)`.
        fills: token counts to write: slot, prompt, text.
        launches: programs to run.
        failed: newcomers that could not be booked, and why; then nothing is launched.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    fills: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    failed: list[tuple[Generation, Exception]] = field(default_factory=list)


class Books:
    """Sequences, pages, prefixes, slots and rows of one engine.

    Args:
        cache: pages and their prefix cache.
        slots: places in the state.
        table: per-row data by slot.
        limits: of the scheduler.
        decode_rows: sizes of the decode programs, rising.
        weights: of priorities, for who joins next; None for strict order.
        drafting: decides when guesses are checked; None checks none.
    """

    def __init__(
        self,
        cache: PrefixCache,
        slots: Slots,
        table: RowTable,
        limits: Limits,
        decode_rows: Sequence[int],
        weights: Mapping[int, float] | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.cache, self.slots, self.table, self.limits = cache, slots, table, limits
        self.pool: PagePool = cache.pool
        self._launcher = Launcher(table, slots, self.pool, decode_rows)
        self.waiting = Line(weights)
        self.running: dict[int, Generation] = {}
        self.preemptions = 0
        self.drafting = drafting

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def add(self, one: Generation) -> None:
        """A newcomer, or one that gave its pages up."""
        if self.drafting is not None and one.drafter is None:
            one.drafter = drafter(one.prompt, one.params, one.most, self.drafting.length)
        self.waiting.add(one)

    def check_idle(self) -> None:
        """Compare pages and slots with what they were at the start.

        Raises:
            PoolFault: something was lost.
        """
        self.pool.check([one.pages for one in self.running.values()])
        if self.idle and self.cache.available != self.pool.size:
            raise PoolFault(
                f"all {self.pool.size} pages can be taken when nothing runs; {self.cache.available} can be"
            )

    # -- decide -------------------------------------------------------------------------------------

    def plan(self) -> tuple[Plan, dict[int, list[Entry]]]:
        """The next step, and the prefixes found for those it admits; changes nothing."""
        found: dict[int, list[Entry]] = {}
        short = self.cache.available < len(self.running)
        decided = plan(
            [self._running(one, short) for one in self.running.values()],
            self._waiting(found),
            queued=bool(self.waiting),
            available=self.cache.available,
            slots=self.slots.free,
            limits=self.limits,
        )
        if self.drafting is not None and not (decided.chunks or decided.preempt or decided.admit):
            self._draft(decided)
        return decided, found

    def _draft(self, decided: Plan) -> None:
        """Check guesses instead of choosing one token of each, if that pays and there are pages for them."""
        ones = [self.running[key] for key in decided.decode]
        draft = self._drafted(ones, decided.steps)
        if draft is None or any(one.flying for one in ones):
            return
        missing = {
            one.rank[1]: self.pool.pages_for(one.context + 1 + len(guess)) - len(one.pages)
            for one, guess in zip(ones, draft.guesses, strict=True)
        }
        if sum(max(count, 0) for count in missing.values()) <= self.cache.available:
            decided.grow = {key: count for key, count in missing.items() if count > 0}
            decided.steps, decided.draft = 1, draft

    def _drafted(self, ones: Sequence[Generation], steps: int) -> Draft | None:
        if self.drafting is None or not 0 < len(ones) <= self.drafting.rows:
            return None
        return self.drafting.choose([one.drafter for one in ones], [one.left for one in ones], steps)

    def awaits(self) -> bool:
        """Whether the next step is better decided once the last one was read: guesses need its tokens."""
        if self.drafting is None:
            return False
        ones = [one for one in self.running.values() if one.left > 0]
        reading = any(one.context < one.target for one in ones)
        steps = self.limits.steps
        if self.waiting or any(one.left < steps for one in ones):
            steps = 1
        return not reading and self._drafted(ones, steps) is not None

    def _running(self, one: Generation, short: bool) -> Running:
        refs = self.pool.refs
        # A row lacks at most one page, so nobody need give way while there is one for each.
        returns = sum([refs(page) == 1 for page in one.pages]) if short else 0
        return Running(one.rank[1], one.rank, one.context, one.target, one.left, len(one.pages), returns)

    def _waiting(self, found: dict[int, list[Entry]]) -> Iterator[Waiting]:
        size = self.limits.page_size
        for one in self.waiting:
            if one.flying:
                yield Waiting(one.rank[1], one.rank, 1, 1, ready=False)
                return
            tokens = one.tokens()
            room = len(tokens) + (one.left > 1)
            entries = self.cache.match(tokens, one.namespace)
            start, copied = len(entries) * size, 0
            if start >= len(tokens):
                # The last token must be computed, in a page of one's own: copy it if there is one to spare.
                if self.pool.pages_for(room) < self.pool.size:
                    start, copied = len(tokens) - 1, 1
                else:
                    entries = entries[:-1]
                    start = len(entries) * size
            found[one.rank[1]] = entries
            idle = sum([self.pool.refs(entry.page) == 0 for entry in entries])
            yield Waiting(one.rank[1], one.rank, len(tokens), room, len(entries), idle, copied, start)

    # -- carry out ----------------------------------------------------------------------------------

    def carry_out(self, decided: Plan, found: dict[int, list[Entry]], work: Work) -> None:
        """Book a plan, and write into `work` what to launch for it."""
        for key in decided.preempt:
            self.preempt(self.running[key])
        first = itertools.islice(self.waiting, len(decided.admit))
        newcomers = {one.rank[1]: one for one in first}
        # Found prefixes are held before anything is taken, which may evict what nobody holds.
        shared = {key: self.cache.adopt(found[key]) for key in decided.admit}
        for key, count in decided.grow.items():
            self._grow(self.running[key], count)
        for key in decided.admit:
            self.waiting.remove(newcomers[key])
            try:
                self._admit(newcomers[key], found[key], shared[key], work)
            except Exception as error:  # of this one alone; what was decided names it, so decide again
                work.failed.append((newcomers[key], error))
        if work.failed:
            return
        launcher = self._launcher
        parts = [(self.running[chunk.key], chunk) for chunk in decided.chunks]
        decoding = [self.running[key] for key in decided.decode]
        self.waiting.charge(
            [(one, chunk.length) for one, chunk in parts] + [(one, decided.steps) for one in decoding]
        )
        if decided.bucket is not None and decided.mixed:
            work.launches.append(launcher.mixed(decided.bucket, parts, decoding))
            return
        if decided.bucket is not None:
            work.launches.append(launcher.prefill(decided.bucket, parts))
        if decided.draft is not None:
            work.launches.append(launcher.verify(decided.draft.bucket, decoding, decided.draft.guesses))
        elif decoding:
            work.launches.append(launcher.decode(decoding, decided.steps))

    def _grow(self, one: Generation, count: int) -> None:
        begin = len(one.pages)
        one.pages += self.cache.take(count)
        self.table.set_pages(one.place, one.pages[begin:], self.pool, begin)

    def _admit(self, one: Generation, entries: list[Entry], shared: list[int], work: Work) -> None:
        # First, so that whoever ends it after a failure below finds what it holds.
        one.move(State.RUNNING)
        self.running[one.rank[1]], one.pages = one, shared
        tokens, size = one.tokens(), self.limits.page_size
        start = len(shared) * size
        source = None
        if start >= len(tokens):
            source, shared, entries, start = shared[-1], shared[:-1], entries[:-1], len(tokens) - 1
        fresh = self.cache.take(self.pool.pages_for(len(tokens) + (one.left > 1)) - len(shared))
        if source is not None:
            work.copies.append((source, fresh[0]))
            self.cache.release([source])
        one.pages, one.entries, one.published = [*shared, *fresh], list(entries), True
        one.context = one.read = start
        one.target = len(tokens)
        if one.cached is None:
            one.cached = start
        slot = one.slot = self.slots.take()
        self.table.join(slot, one.params, one.seed, sorted(one.stop_ids))
        self.table.set_pages(slot, one.pages, self.pool)
        self.table.ints[slot, CONTEXT] = start
        self.table.ints[slot, STEP] = len(one.text)
        if one.params.penalized:
            work.fills.append((slot, one.prompt, np.asarray(one.text, np.int32)))
        self.cache.hit_tokens += start

    # -- come back ----------------------------------------------------------------------------------

    def landed(self, member: Member, taken: int | None = None) -> None:
        """A step that names a sequence was read, or will never be.

        Args:
            member: of that step.
            taken: tokens that stand, where it checked guesses; the others are taken back.
        """
        one = member.who
        one.flying -= 1
        one.pending -= member.chosen
        slot = one.place
        self.slots.landed(slot)
        if one.state is not State.RUNNING:
            self._leave(one)
        elif one.epoch == member.epoch:
            one.read = member.read
            if taken is not None:
                # No other step names it, or guesses could not have been checked.
                one.context = one.read = member.read - member.chosen + taken
                self.table.ints[slot, [CONTEXT, STEP]] = one.context, len(one.text) + taken
                self.waiting.charge([(one, taken - 1)])  # the launch was charged for one

    def publish(self, one: Generation) -> None:
        """Let others find the pages that are full of tokens that were read."""
        size = self.limits.page_size
        if one.state is not State.RUNNING or one.read // size <= len(one.entries) or not one.published:
            return
        tokens = one.tokens()
        # A text may end before the last token of a step of several.
        full = min(one.read, len(tokens)) // size
        while one.published and len(one.entries) < full:
            at = len(one.entries)
            parent = one.entries[-1] if one.entries else None
            block = tokens[at * size : (at + 1) * size]
            entry = self.cache.publish(one.pages[at], parent, one.namespace, block)
            if entry is None:
                one.published = False
            else:
                one.entries.append(entry)

    def end(self, one: Generation, state: State) -> None:
        """Give a sequence its final state; its pages are free at once, its slot when no step names it."""
        if one.state is State.WAITING:
            self.waiting.remove(one)
        one.move(state)
        self._let_go(one)

    def preempt(self, one: Generation) -> None:
        """Take a running sequence's pages; it waits, in its old place, and is computed again."""
        self.preemptions += 1
        one.move(State.WAITING)
        one.epoch += 1
        self._let_go(one)
        one.context = one.read = 0
        self.add(one)

    def _let_go(self, one: Generation) -> None:
        self.running.pop(one.rank[1], None)
        # Steps in flight may still write to these pages; whoever gets them is launched later.
        self.cache.release(one.pages)
        one.pages, one.entries = [], []
        if one.slot is not None:
            self.table.leave(one.slot)
            self._leave(one)

    def _leave(self, one: Generation) -> None:
        if one.slot is not None and not one.flying:
            self.slots.release(one.slot)
            one.slot = None
