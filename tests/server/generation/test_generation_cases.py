"""The generation rows of the case list that need no device: on an engine over whole numbers."""

import numpy as np
import pytest
from servax.server.errors import TooLong
from servax.server.generation.errors import PoolFault, SlotFault
from servax.server.generation.pages import PagePool
from servax.server.generation.prefix import Namespace, PrefixCache
from servax.server.generation.seam import NULL_PAGE, SINK_PAGE
from servax.server.generation.slots import Slots
from servax.server.generation.stop import StopScanner


def test_G1_an_in_flight_slot_is_not_given_out_again():
    slots = Slots(1)
    slot = slots.take()
    slots.launched(slot)
    with pytest.raises(SlotFault, match=r"released once its steps were read; 1 of slot 0 were not"):
        slots.release(slot)
    with pytest.raises(SlotFault, match="all 1 slots are in use"):
        slots.take()
    slots.landed(slot)
    slots.release(slot)
    with pytest.raises(SlotFault, match="released once; slot 0 is free"):
        slots.release(slot)
    assert slots.take() == slot


def test_G1_64_streams_with_the_next_step_prepared_and_many_padded_prefills(bench):
    bench = bench(pages=600, rows=16)
    callers = [
        bench.ask(list(range(2, 3 + i % 13)), max_tokens=9 + i % 5, ignore_eos=True) for i in range(64)
    ]
    bench.run()
    assert all(caller.ids == bench.alone(caller) for caller in callers)
    assert len(bench.programs.log) < 64 * 4
    bench.settle()


def test_G2_a_request_that_ends_and_is_aborted_in_one_step_gives_its_pages_back_once(bench):
    bench = bench()
    one = bench.ask([3, 4, 5], max_tokens=1)
    bench.turn()
    bench.desk.cancel(one.who)
    bench.turn(2)
    assert one.over
    assert not one.who.pages
    two = bench.ask([3, 4, 5], max_tokens=1)
    bench.run(two)
    bench.desk.cancel(two.who)  # it is over: nothing happens
    assert not bench.desk._news.cancelled
    assert two.ids == bench.alone(two)
    bench.settle()


def test_G2_a_shared_prefix_outlives_one_of_its_holders(bench):
    bench = bench()
    prompt = list(range(2, 14))
    first = bench.ask([*prompt, 20], max_tokens=20, ignore_eos=True)
    bench.turn(3)
    second = bench.ask([*prompt, 21], max_tokens=4, ignore_eos=True)
    bench.turn(2)
    assert second.who.pages[:3] == first.who.pages[:3]
    bench.run(second)
    assert bench.books.pool.refs(first.who.pages[0]) == 1
    bench.run(first)
    assert first.ids == bench.alone(first)
    assert second.deltas[-1].usage.cached_tokens == 12
    bench.settle()


def test_G2_a_table_that_points_at_a_returned_page_is_noticed(bench):
    bench = bench()
    one = bench.ask([3, 4, 5], max_tokens=9)
    bench.turn(2)
    bench.books.pool.release(one.who.pages)
    bench.books.pool.take(1)
    with pytest.raises(PoolFault, match="a table points at held pages only"):
        bench.books.table.inputs([one.who.slot], 1, bench.books.pool)


@pytest.mark.parametrize("turns", range(8))
def test_G3_an_abort_at_any_moment_leaves_nothing_behind(bench, turns):
    bench = bench(buckets=((1, 4),))
    prompt = list(range(2, 24))
    warm = bench.ask(prompt[:9], max_tokens=1)
    bench.run(warm)
    one = bench.ask(prompt, max_tokens=9, ignore_eos=True)
    if turns:
        bench.turn(turns)
    bench.desk.cancel(one.who)
    bench.turn()
    assert one.error.reason == "cancelled"
    again = bench.ask(prompt, max_tokens=9, ignore_eos=True)
    bench.run(again)
    assert again.ids == bench.alone(again)
    # Whatever is published was computed: the rule would give another text otherwise.
    bench.settle()


def test_G3_500_aborts_at_random_times(bench):
    rng, bench = np.random.default_rng(0), bench(pages=30)
    for i in range(500):
        prompt = rng.integers(2, 5, rng.integers(1, 20)).tolist()
        one = bench.ask(prompt, max_tokens=12, ignore_eos=True)
        bench.turn(int(rng.integers(1, 6)))
        bench.desk.cancel(one.who)
        if i % 50 == 49:
            after = bench.ask(prompt, max_tokens=12, ignore_eos=True)
            bench.run(after)
            assert after.ids == bench.alone(after)
    bench.settle()


def constant(_):
    return 7


@pytest.mark.parametrize("hasher", [hash, constant])
def test_G4_nothing_is_shared_between_namespaces_or_texts(hasher):
    pool = PagePool(40, 2)
    cache = PrefixCache(pool, hasher=hasher)
    spaces = [Namespace(), Namespace(adapter="x"), Namespace(salt="x"), Namespace(adapter="y")]
    texts = [np.array(t, np.int32) for t in ([1, 2, 3, 4], [1, 2, 4, 3], [3, 4, 1, 2], [3, 4, 3, 4])]
    held = {}
    for space in spaces:
        for which, text in enumerate(texts):
            found = cache.match(text, space)
            assert len(found) == which % 2  # the first block of texts 1 and 3 is that of the text before
            pages = cache.take(2)
            first = found[0] if found else cache.publish(pages[0], None, space, text[:2])
            cache.publish(pages[1], first, space, text[2:])
            held[space, which] = pages
    for space in spaces:
        for which, text in enumerate(texts):
            assert cache.match(text, space)[-1].page == held[space, which][1]


@pytest.mark.parametrize("hasher", [hash, constant])
def test_G4_texts_under_salts_and_a_constant_hash_are_right(bench, hasher):
    bench = bench(pages=200)
    bench.books.cache._hash = hasher
    prompt = list(range(2, 15))
    callers = []
    for salt, adapter in ((None, None), ("x", None), (None, "x"), (None, "y"), ("x", "x")):
        for tail in (30, 31):
            callers.append(
                bench.ask([*prompt, tail], salt=salt, adapter=adapter, max_tokens=8, ignore_eos=True)
            )
            bench.run(callers[-1])
            assert callers[-1].deltas[-1].usage.cached_tokens == (12 if tail == 31 else 0)
    assert all(caller.ids == bench.alone(caller) for caller in callers)
    bench.settle()


def test_G5_a_prompt_of_whole_pages_hits_but_for_its_last_token(bench):
    bench = bench()
    prompt = list(range(2, 14))
    first, second = (bench.ask(prompt, max_tokens=6, ignore_eos=True) for _ in range(2))
    bench.run(first, second)
    third = bench.ask(prompt, max_tokens=6, ignore_eos=True)
    bench.run(third)
    assert first.ids == second.ids == third.ids == bench.alone(first)
    assert third.deltas[-1].usage.cached_tokens == 11  # the last page is copied, its last token computed
    bench.settle()


def test_G6_eight_requests_in_a_pool_for_less(bench):
    bench = bench(pages=18, rows=8)  # 16 usable
    callers = [bench.ask([2 + i, 3, 4, 5, 6], max_tokens=16, ignore_eos=True) for i in range(8)]
    full = False
    while not all(caller.over for caller in callers):
        bench.turn()
        full |= bench.books.cache.available == 0
    assert full
    assert bench.books.preemptions
    assert all(caller.ids == bench.alone(caller) for caller in callers)
    bench.settle()


def test_G6_one_request_that_needs_17_pages_of_16_is_refused_at_once(bench):
    bench = bench(pages=18, max_tokens=512)
    with pytest.raises(TooLong, match="at most 65 tokens, what the page pool holds; got 5 and 61"):
        bench.ask([2, 3, 4, 5, 6], max_tokens=61)
    one = bench.ask([2, 3, 4, 5, 6], max_tokens=60, ignore_eos=True)
    bench.run(one)
    assert one.ids == bench.alone(one)
    again = bench.ask(one.prompt + one.ids[:59], max_tokens=1)  # all 16 pages cached, and none to copy to
    bench.run(again)
    assert again.ids == one.ids[59:]
    bench.settle()


def test_G7_padded_rows_read_the_null_page_and_write_to_the_sink(bench):
    bench = bench(pages=8, rows=8)
    for _ in range(250):
        one = bench.ask([5, 6, 7, 8, 9], max_tokens=4, ignore_eos=True)
        bench.run(one)
        assert one.ids == bench.alone(one)
    assert len(bench.programs.log) >= 1000
    assert (bench.programs._pool[NULL_PAGE] < 0).all()
    inputs = bench.books.table.inputs([], 8, bench.books.pool)
    assert (inputs["page_table"] == NULL_PAGE).all()
    assert not inputs["ints"][:, 2].any()
    assert SINK_PAGE != NULL_PAGE
    bench.settle()


def test_G8_stop_strings_across_token_borders():
    scanner = StopScanner(["beta gamma"])
    assert [scanner.push(part) for part in ("alpha be", "ta ga", "mma delta")] == ["alpha ", "", ""]
    assert scanner.found == "beta gamma"
    scanner = StopScanner(["beta gamma"])
    sent = [scanner.push(part) for part in ("alpha ", "beta", " ", "delta")]
    assert sent == ["alpha ", "", "", "beta delta"]
    assert scanner.found is None
    scanner = StopScanner(["beta gamma"])
    assert scanner.push("a beta") + scanner.flush() == "a beta"


def test_G8_a_stop_string_in_a_stream(bench):
    bench = bench()
    free = bench.ask([5, 6, 7], max_tokens=20, ignore_eos=True)
    bench.run(free)
    stop = free.text[6:9]
    one = bench.ask([5, 6, 7], max_tokens=20, ignore_eos=True, stop=(stop,))
    bench.run(one)
    assert one.text == free.text[: free.text.index(stop)]
    assert one.deltas[-1].finish_reason == "stop"
    assert one.deltas[-1].stop_reason == stop
    near = free.text[6:8] + ("a" if free.text[8] != "a" else "b")
    held = bench.ask([5, 6, 7], max_tokens=20, ignore_eos=True, stop=(near,))
    bench.run(held)
    assert held.text == free.text
    bench.settle()


@pytest.mark.parametrize("beside", [0, 2, 7])
def test_G9_a_seed_gives_one_text_whatever_is_beside(bench, beside):
    bench = bench()
    draw = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    one = bench.ask([5, 6, 7], seed=7, **draw)
    others = [bench.ask([5, 6, 7], **draw) for _ in range(beside)]
    bench.run()
    assert one.ids == bench.alone(one)
    assert len({tuple(other.ids) for other in [one, *others]}) == beside + 1
    decodes = [rows for key, rows in bench.programs.log if key.kind == "decode"]
    assert decodes[0] == beside + 1  # seeds do not split a batch
    bench.settle()


def test_G11_a_client_that_leaves_frees_slot_and_pages_within_two_steps(bench):
    bench = bench(pages=600, max_tokens=2200)
    neighbour = bench.ask([9, 8, 7], max_tokens=40, ignore_eos=True)
    one = bench.ask([5, 6, 7], max_tokens=2000, ignore_eos=True)
    while len(one.ids) < 3:
        bench.turn()
    before = len(bench.programs.log)
    bench.desk.cancel(one.who)
    slot = one.who.slot
    for _ in range(3):
        bench.turn()
    rows = [rows for key, rows in bench.programs.log[before:] if key.kind == "decode"]
    assert rows == [1] * 3
    assert one.who.slot is None
    assert not one.who.pages
    assert slot in bench.books.slots._free
    bench.run(neighbour)
    assert neighbour.ids == bench.alone(neighbour)
    bench.settle()


def test_G12_logits_that_are_not_finite_fail_only_their_row(bench):
    bench = bench()
    callers = [bench.ask([5, 6, 7 + i], max_tokens=9, ignore_eos=True) for i in range(4)]
    bench.programs.poison = lambda held: held[:3] == [5, 6, 9] and len(held) == 7
    bench.run()
    assert callers[2].error.reason == "model"
    assert len(callers[2].ids) == 4
    for i in (0, 1, 3):
        assert callers[i].ids == bench.alone(callers[i])
    bench.settle()


def test_G12_text_that_raises_fails_only_its_row(bench):
    bench = bench()
    callers = [bench.ask([5, 6, 7 + i], max_tokens=9, ignore_eos=True) for i in range(4)]

    class Broken:
        count = 0

        def push(self, ids):
            self.count += 1
            if self.count == 5:
                raise ZeroDivisionError("no such text")
            return "x"

    callers[2].who.detokenizer = Broken()
    bench.run()
    assert "ZeroDivisionError: no such text" in str(callers[2].error)
    assert all(callers[i].ids == bench.alone(callers[i]) for i in (0, 1, 3))
    bench.settle()


def test_G13_nobody_waits_for_the_slowest(bench):
    bench = bench(pages=300, rows=8, max_tokens=600)
    short = [bench.ask([5, 6, 2 + i], max_tokens=5, ignore_eos=True) for i in range(7)]
    long = bench.ask([5, 6, 30], max_tokens=500, ignore_eos=True)
    later = [bench.ask([5, 6, 40 + i], max_tokens=5, ignore_eos=True) for i in range(8)]
    bench.turn(6)
    assert all(caller.done for caller in short)
    bench.turn(2)
    assert sum(bool(caller.ids) for caller in later) == 7
    bench.turn(12)
    assert all(caller.done for caller in later)
    assert not long.done
    bench.run(long)
    assert all(caller.ids == bench.alone(caller) for caller in [*short, long, *later])
    bench.settle()
