"""Queue limits as arithmetic, and the books behind them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.server.batching.admission import Load, QueueLimits, admit
from servax.server.batching.ledger import Ledger
from servax.server.batching.request import Request, Row, State
from servax.server.errors import ConfigError, Overloaded, PayloadTooLarge, TooManyRows


@pytest.mark.parametrize("limits", [{"rows": 0}, {"elements": 0}, {"bytes": 0}, {"rows": -1, "bytes": 5}])
def test_limits_let_something_wait(limits):
    with pytest.raises(ConfigError, match="at least 1"):
        QueueLimits(**limits)


@pytest.mark.parametrize(
    ("limits", "what", "waiting"),
    [
        (QueueLimits(rows=64), "64 rows; 64 wait", Load(64, 0, 0)),
        (QueueLimits(elements=640), "640 elements; 640 wait", Load(64, 640, 0)),
        (QueueLimits(bytes=2560), "2560 bytes; 2560 wait", Load(64, 640, 2560)),
    ],
)
def test_O2_a_full_queue_says_which_limit_and_when_to_retry(ask, limits, what, waiting):
    before = waiting.copy()
    with pytest.raises(
        Overloaded, match=rf"holds at most {what} and the request has .*: retry after 2 s"
    ) as info:
        admit(limits, waiting, ask(10), retry_after_s=2.0)
    assert info.value.retry_after_s == 2.0
    assert info.value.http_status == 429
    assert waiting == before


def test_exactly_the_limit_is_admitted(ask):
    admit(QueueLimits(rows=3, elements=30, bytes=120), Load(2, 20, 80), ask(10))


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (QueueLimits(rows=1), TooManyRows),
        (QueueLimits(elements=9), TooManyRows),
        (QueueLimits(bytes=39), PayloadTooLarge),
    ],
)
def test_what_never_fits_is_not_worth_a_retry(ask, limits, error):
    for load in (Load(), Load(1, 9, 39)):
        with pytest.raises(error, match=r"the request alone has .*: send several"):
            admit(limits, load, ask(5, 5))


def test_a_refusal_changes_no_count(ask):
    ledger = Ledger(QueueLimits(rows=2))
    ledger.add_lane()
    ledger.admit(ask(5, 5))
    with pytest.raises(Overloaded):
        ledger.admit(ask(5))
    assert ledger.load == Load(2, 10, 40)
    assert (ledger.waiting, len(ledger.live)) == ([2], 1)


def test_O4_only_as_many_less_urgent_ones_give_way_as_needed(ask):
    ledger = Ledger(QueueLimits(rows=4))
    ledger.add_lane()
    low = [ask(5, priority=9) for _ in range(4)]
    for request in low:
        assert not ledger.admit(request)
    victims = ledger.admit(ask(5, 5, priority=1), lambda: reversed(low))
    assert victims == [low[3], low[2]]


def test_O4_nobody_gives_way_if_that_is_not_enough(ask):
    ledger = Ledger(QueueLimits(rows=3))
    ledger.add_lane()
    low = ask(5, priority=9)
    ledger.admit(low)
    ledger.admit(ask(5, 5, priority=1))
    with pytest.raises(Overloaded):
        ledger.admit(ask(5, 5, priority=2), lambda: [low])
    assert low in ledger.live


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_counts_follow_the_rows(lengths, data):
    """Launch the rows in pieces, end the request at any point: all counts return to zero."""
    ledger = Ledger(QueueLimits())
    ledger.add_lane()
    request = Request([{} for _ in lengths], [(n,) for n in lengths], arrived_s=0.0, sink=None)
    ledger.admit(request)
    rows = [Row(request, index) for index in range(len(lengths))]
    launched = 0
    while launched < len(rows) and data.draw(st.booleans()):
        piece = rows[launched : launched + data.draw(st.integers(1, len(rows) - launched))]
        ledger.launch(0, piece)
        launched += len(piece)
        assert ledger.load.rows == ledger.waiting[0] == len(rows) - launched
        assert ledger.load.elements == sum(lengths[launched:])
        assert ledger.running == [launched]
    dropped = ledger.end(request, State.CANCELLED)
    assert dropped == len(rows) - launched
    assert ledger.load == Load()
    assert not ledger.live
    assert ledger.idle == (launched == 0)
    ledger.land(rows[:launched])
    assert ledger.idle
