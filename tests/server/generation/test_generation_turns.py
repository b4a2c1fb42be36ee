"""Who goes next: priorities with shares or in order, and clients beside each other."""

import pytest
from servax.server.errors import Overloaded


def test_weights_share_the_tokens_among_priorities(bench):
    """Three priorities that never run dry: tokens in the ratio 4 : 2 : 1, and none starves."""
    bench = bench(pages=200, rows=4, priorities="1=4,5=2,9=1", max_tokens=64)
    for turn in range(120):
        for priority in (9, 5, 1):
            bench.ask([5, 6, 7 + turn % 40], priority=priority, max_tokens=6, ignore_eos=True)
    done = {1: 0, 5: 0, 9: 0}
    while len(bench.books.waiting) > 200 or not sum(done.values()):
        bench.turn()
        done = {
            priority: 120
            - sum(one.priority == priority for one in (*bench.books.waiting, *bench.books.running.values()))
            for priority in done
        }
    total = sum(done.values())
    assert [round(7 * done[priority] / total) for priority in (1, 5, 9)] == [4, 2, 1]
    bench.settle()


def test_strict_priorities_join_in_order(bench):
    bench = bench(rows=1)
    late = [bench.ask([5, 6], priority=priority, max_tokens=3, ignore_eos=True) for priority in (9, 5, 1)]
    bench.run(late[2])
    assert not late[0].ids
    bench.run(late[1])
    assert not late[0].over
    bench.settle()


def test_one_client_leaves_room_for_others(bench):
    bench = bench(rows=1, client_rows=2)
    flood = [bench.ask([5, 6], client="a", max_tokens=3, ignore_eos=True) for _ in range(2)]
    with pytest.raises(Overloaded, match="at most 2 requests of one client wait; 2 do") as refused:
        bench.ask([5, 6], client="a")
    assert refused.value.cause == "client"
    other = bench.ask([5, 6], client="b", max_tokens=3, ignore_eos=True)
    nobody = [bench.ask([5, 6], max_tokens=3, ignore_eos=True) for _ in range(5)]
    bench.turn()  # the first one runs
    flood.append(bench.ask([5, 6], client="a", max_tokens=3, ignore_eos=True))
    with pytest.raises(Overloaded, match="one client"):
        bench.ask([5, 6], client="a")
    bench.run(*flood, other, *nobody)
    assert all(caller.done for caller in (*flood, other, *nobody))
    bench.settle()
