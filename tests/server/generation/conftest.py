import itertools

import numpy as np
import pytest
from servax import models
from servax.server.batching.clock import ManualClock
from servax.server.errors import ServerError
from servax.server.generation import GenerationServer, SamplingParams
from servax.server.generation.chunking import Bucket
from servax.server.generation.desk import Desk
from servax.server.generation.door import Door, fresh_seed
from servax.server.generation.fake import FakeModel, FakePrograms, next_token
from servax.server.generation.prefix import Namespace
from servax.server.generation.programs import Programs
from servax.server.generation.sequence import Generation
from servax.server.generation.setup import Setup, build


class Caller:
    """Remembers what a sequence was sent."""

    def __init__(self):
        self.deltas, self.error = [], None

    def deliver(self, event):
        assert not self.over, "nothing comes after the end"
        if isinstance(event, ServerError):
            self.error = event
        else:
            self.deltas.append(event)

    @property
    def done(self):
        return bool(self.deltas) and self.deltas[-1].finish_reason is not None

    @property
    def over(self):
        return self.error is not None or self.done

    @property
    def ids(self):
        return [token for delta in self.deltas for token in delta.ids]

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)


class Eager:
    """A pace at which checking guesses always pays, and three of them more than any other number."""

    def note(self, key, seconds):
        pass

    def of(self, key):
        return 1.0 if key.kind == "decode" else 1e-3 / min(key.chunk, 4)


class Bench:
    """An engine over whole numbers, turned by hand: one turn is one step."""

    def __init__(
        self,
        *,
        pages=64,
        page_size=4,
        rows=8,
        depth=2,
        steps=1,
        buckets=None,
        mixed=((8, 8), (2, 3)),
        cache=True,
        priorities="strict",
        client_rows=None,
        draft=0,
        **model,
    ):
        self.model = FakeModel(**model)
        setup = Setup(
            pages=pages,
            page_size=page_size,
            max_rows=rows,
            prefill_chunk=32,
            prefill_buckets=tuple(Bucket(*b) for b in buckets or ((1, 16), (1, 4), (8, 4))),
            mixed_buckets=tuple(Bucket(*b) for b in mixed),
            decode_rows=None,
            decode_steps=steps,
            depth=depth,
            prefix_cache=cache,
            priorities=priorities,
            tops=3,
            biases=4,
            stop_ids=4,
            draft_tokens=draft,
        )
        self.clock = ManualClock()
        self.desk = Desk(self.clock, 100_000, client_rows=client_rows)
        self.records = []
        self.engine, _, bounds = build(
            self.model, setup, self.desk, self.clock, self.records.append, FakePrograms
        )
        self.programs = self.engine.programs
        self.books, self.door = self.engine.books, Door(self.model, bounds)
        self._order = itertools.count()
        if draft:
            self.books.drafting.pace = Eager()

    def ask(
        self,
        prompt,
        *,
        salt=None,
        adapter=None,
        priority=5,
        deadline_s=float("inf"),
        client="",
        **params,
    ):
        params = SamplingParams(**{"temperature": 0.0, **params})
        prompt, caller = self.door.ids(prompt), Caller()
        caller.params, caller.prompt = params, prompt.tolist()
        caller.who = Generation(
            prompt,
            params,
            sink=caller,
            order=next(self._order),
            most=self.door.most(len(prompt), params),
            seed=fresh_seed(params),
            stop_ids=self.door.stop_ids(params),
            detokenizer=self.model.tokenizer.stream(),
            priority=priority,
            deadline_s=deadline_s,
            namespace=Namespace(adapter, salt),
            client=client,
        )
        self.desk.post(caller.who)
        return caller

    def turn(self, count=1):
        for _ in range(count):
            if not self.quiet:  # or it would wait for news
                assert self.engine.turn()

    def run(self, *callers, most=100_000):
        """Turn until these are over, or everything is."""
        for _ in range(most):
            if callers and all(caller.over for caller in callers):
                return
            if not callers and self.quiet:
                return
            self.turn()
        raise AssertionError("no end in sight")

    @property
    def quiet(self):
        news = self.desk._news
        return not self.engine._flights and self.books.idle and not news.added and not news.cancelled

    def settle(self):
        """Run out, and find all pages and slots in their place."""
        self.run()
        self.books.check_idle()
        assert self.books.slots.free == self.books.slots.count
        assert self.books.cache.available == self.books.pool.size
        self.books.cache.clear()
        assert self.books.pool.free == self.books.pool.size

    def alone(self, caller):
        """What the rule gives for a request, with nobody else there."""
        params, tokens, out = caller.params, list(caller.prompt), []
        vocab = self.model.vocab_size
        seed = (params.seed or 0) & 0xFFFFFFFF if params.temperature > 0 else 0
        for step in range(caller.who.most):
            extra = 0
            if params.frequency_penalty:
                counts = np.bincount(out, minlength=vocab) + (
                    np.bincount(caller.prompt, minlength=vocab) << 16
                )
                extra = int((counts * np.arange(1, vocab + 1)).sum() % ((1 << 31) - 1))
            out.append(next_token(tokens, self.model.words, seed + extra, step))
            tokens.append(out[-1])
            if out[-1] in caller.who.stop_ids:
                break
            text = self.model.tokenizer.stream().push(out)
            if any(stop in text for stop in params.stop):
                break
        return out


@pytest.fixture
def bench():
    return Bench


@pytest.fixture
def eager():
    return Eager()


_compiled = {}
_real_compile, _real_place = Programs.compile, Programs.place


def _compile(self, key):
    """Programs of one model and one set of shapes are compiled once in a test run."""
    known = _compiled.setdefault((id(self.model.params), self.shapes), {})
    if key in known:
        self.compiled[key], self.facts[key], self.alias_bytes[key] = known[key]
        return 0.0
    seconds = _real_compile(self, key)
    known[key] = (self.compiled[key], self.facts[key], self.alias_bytes[key])
    return seconds


def _place(self):
    known = _compiled.setdefault((id(self.model.params), self.shapes), {})
    if "params" not in known:
        _real_place(self)
        known["params"] = self.params
    self.params = known["params"]


@pytest.fixture(scope="session")
def tiny():
    return models.tiny()


ROOMY = {"pages": 130, "page_size": 8, "max_rows": 8}
TIGHT = {"pages": 18, "page_size": 8, "max_rows": 8}
COMMON = {
    "prefill_buckets": ((1, 16), (8, 8)),
    "mixed_buckets": ((8, 8),),
    "decode_rows": (1, 3, 8),
    "max_logprobs": 3,
    "max_logit_bias": 4,
    "max_stop_ids": 4,
}


@pytest.fixture
def serve(monkeypatch, request, tiny):
    """Makes a ready server over the tiny model; closed, with all pages back, when the test ends."""
    monkeypatch.setattr(Programs, "compile", _compile)
    monkeypatch.setattr(Programs, "place", _place)

    def make(model=None, *, check=True, **options):
        server = GenerationServer(model or tiny, **{**ROOMY, **COMMON, **options})
        server.start().wait_ready(240)

        def end():
            server.close()
            if check:
                books = server.engine.books
                books.check_idle()
                assert books.slots.free == books.slots.count
                books.cache.clear()
                assert books.pool.free == books.pool.size

        request.addfinalizer(end)
        return server

    return make


@pytest.fixture(scope="session")
def greedy(tiny):
    """The continuation of a prompt by the model's own forward pass, without pages or batches."""
    import jax

    forward = jax.jit(tiny.forward)
    known = {}

    def run(prompt, count, eos=False):
        prompt = tuple(prompt)
        ids = known.setdefault(prompt, [])
        while len(ids) < count:
            whole = np.zeros((1, 128), np.int32)
            held = len(prompt) + len(ids)
            whole[0, :held] = [*prompt, *ids]
            logits = np.asarray(forward(tiny.params, ids=whole, lengths=np.array([held], np.int32)))
            ids.append(int(logits[0, held - 1].argmax()))
        out = ids[:count]
        if eos and 2 in out:
            out = out[: out.index(2) + 1]
        return tuple(out)

    return run


@pytest.fixture
def tight():
    return TIGHT
