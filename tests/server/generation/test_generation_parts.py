"""Pages, prefixes, stop strings, chunks, states and the scheduler, each alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.server.batching.request import IllegalMove
from servax.server.generation.chunking import Bucket, Prompt, choose, default_buckets, default_mixed
from servax.server.generation.errors import PoolFault
from servax.server.generation.pages import PagePool
from servax.server.generation.params import SamplingParams
from servax.server.generation.prefix import Namespace, PrefixCache
from servax.server.generation.scheduler import Limits, Running, Waiting, plan
from servax.server.generation.sequence import MOVES, Generation, State
from servax.server.generation.stop import StopScanner


def test_states_move_by_the_table_only():
    for before, after in itertools.product(State, State):
        one = Generation(
            np.array([1], np.int32),
            SamplingParams(),
            sink=None,
            order=0,
            most=1,
            seed=0,
            stop_ids=(),
            detokenizer=None,
        )
        one.state = before
        if after in MOVES[before]:
            one.move(after)
            assert one.state is after
        else:
            with pytest.raises(IllegalMove, match=f"{before.value} may become .*; got {after.value}"):
                one.move(after)
            assert one.state is before


def test_pages_are_counted():
    pool = PagePool(6, 4)
    first = pool.take(3)
    pool.share(first[:1])
    before = pool.generations[first].copy()
    with pytest.raises(PoolFault, match="2 were asked, 1 are"):
        pool.take(2)
    pool.release(first)
    assert pool.free == 3
    assert (pool.generations[first] - before).tolist() == [0, 1, 1]
    with pytest.raises(PoolFault, match="nobody holds page"):
        pool.release(first[1:])
    with pytest.raises(PoolFault, match="is free"):
        pool.share(first[1:])
    pool.check([first[:1]])
    with pytest.raises(PoolFault, match="counted once a holder"):
        pool.check([])


def test_the_least_recently_used_prefix_goes_first_and_children_before_parents():
    pool = PagePool(8, 2)
    cache = PrefixCache(pool)
    space = Namespace()
    chains = []
    for text in ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10]):
        tokens, pages, parent = np.array(text, np.int32), cache.take(len(text) // 2), None
        for at, page in enumerate(pages):
            parent = cache.publish(page, parent, space, tokens[2 * at : 2 * at + 2])
        cache.release(pages)
        chains.append(tokens)
    assert cache.available == pool.size
    cache.release(cache.adopt(cache.match(chains[0], space)))  # the first one is younger now
    cache.release(cache.take(2))
    assert [len(cache.match(tokens, space)) for tokens in chains] == [3, 1]
    cache.release(cache.take(3))
    assert [len(cache.match(tokens, space)) for tokens in chains] == [3, 0]
    cache.release(cache.take(4))
    assert [len(cache.match(tokens, space)) for tokens in chains] == [2, 0]


@settings(deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_stop_strings_do_not_depend_on_the_cuts(text, stops, cuts):
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    scanner, out = StopScanner(stops), ""
    bounds = [0, *sorted(cuts), len(text)]
    for begin, end in itertools.pairwise(bounds):
        out += scanner.push(text[begin:end])
        assert expected.startswith(out)
    out += scanner.flush()
    assert out == expected
    assert (scanner.found is not None) == bool(ends)


def test_chunks_are_cut_so_that_buckets_are_filled():
    buckets = default_buckets(128, 32)
    assert buckets == ((1, 16), (1, 64), (1, 128), (2, 64), (8, 16))

    def choice(*left):
        return choose(buckets, (), [Prompt(tokens, False) for tokens in left], 0, ()).bucket

    assert choice(500) == (1, 128)
    assert choice(65) == (1, 64)
    assert choice(5) == (1, 16)
    assert choice(60, 60, 60) == (2, 64)
    assert choice(*[12] * 16) == (8, 16)


def test_prompts_are_read_beside_rows_that_decode():
    mixed = default_mixed(64, 32)
    assert mixed == ((8, 16), (8, 56), (32, 16), (32, 64))

    def choice(decoding, *prompts):
        found = choose(
            (Bucket(1, 8), Bucket(1, 64)), mixed, [Prompt(*one) for one in prompts], decoding, (1, 8, 32)
        )
        return found.bucket, found.mixed, found.lengths

    assert choice(31, (10, False)) == ((32, 16), True, [10])
    assert choice(31, (30, False)) == ((32, 16), True, [17])
    assert choice(20, (64, True), (30, False)) == ((32, 64), True, [64, 2])
    assert choice(20, (30, True), (30, True), (40, False)) == ((32, 64), True, [30, 0, 36])
    assert choice(5, (9, False), (5, False), (1, True)) == ((8, 16), True, [9, 5, 1])
    assert choice(0, (64, False)) == ((1, 64), False, [64])
    assert choice(8, (1, True)) == ((1, 8), False, [1])


BUCKETS = (Bucket(1, 16), Bucket(8, 4))
LIMITS = Limits(4, 8, BUCKETS)
MIXED = Limits(4, 8, BUCKETS, 1, (Bucket(8, 6), Bucket(3, 9)), (1, 8))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_plan_keeps_its_promises(data):
    draw = data.draw
    count = draw(st.integers(0, 8))
    running = []
    for key in range(count):
        target = draw(st.integers(1, 30))
        context = draw(st.integers(0, target + 20))
        pages = -(-max(context, target) // 4) + draw(st.integers(0, 1))
        running.append(
            Running(
                key, (5, key), context, target, draw(st.integers(0, 5)), pages, draw(st.integers(0, pages))
            )
        )
    waiting = [
        Waiting(100 + i, (5, 100 + i), tokens, tokens + 1)
        for i, tokens in enumerate(draw(st.lists(st.integers(1, 30), max_size=5)))
    ]
    available, slots = draw(st.integers(0, 40)), draw(st.integers(0, 8))
    limits = draw(st.sampled_from([LIMITS, MIXED]))
    out = plan(running, iter(waiting), queued=bool(waiting), available=available, slots=slots, limits=limits)
    by_key = {row.key: row for row in running}
    gained = sum(by_key[key].returns for key in out.preempt)
    taken = sum(out.grow.values()) + sum(-(-one.room // 4) for one in waiting if one.key in out.admit)
    assert taken <= available + gained
    assert not set(out.preempt) & set(out.decode)
    assert not set(out.preempt) & {chunk.key for chunk in out.chunks}
    for key in out.decode:
        row = by_key[key]
        assert row.left > 0
        assert row.context >= row.target
        assert row.context + 1 <= 4 * (row.pages + out.grow.get(key, 0))
    assert out.admit == [one.key for one in waiting[: len(out.admit)]]
    assert len(out.admit) <= slots
    assert len(out.admit) + sum(row.left > 0 for row in running) - len(out.preempt) <= 8
    if out.preempt:
        kept = [row.rank for row in running if row.left and row.key not in out.preempt]
        assert not out.admit
        assert all(by_key[key].rank > max(kept, default=(0, 0)) for key in out.preempt)
    if out.mixed:
        assert len(out.chunks) + len(out.decode) <= out.bucket.rows
        assert 0 <= sum(chunk.length - 1 for chunk in out.chunks) <= out.bucket.chunk
        long = [by_key[chunk.key] for chunk in out.chunks if chunk.length > 1 and chunk.key in by_key]
        assert sum(row.context > 0 for row in long) <= 1
    elif out.bucket:
        assert len(out.chunks) <= out.bucket.rows
        assert all(0 < chunk.length <= out.bucket.chunk for chunk in out.chunks)
    ready = [row for row in running if row.left and row.context >= row.target]
    if available >= len(ready):
        assert len(out.decode) == len(ready)  # no running text waits for a prompt
