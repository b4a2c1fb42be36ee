"""The table of states, walked pair by pair."""

import itertools
import math

import numpy as np
import pytest
from servax.server.batching.request import MOVES, IllegalMove, Request, Row, State
from servax.server.errors import ModelError

FINAL = {State.DONE, State.FAILED, State.EXPIRED, State.CANCELLED}
ROUTES = {
    State.WAITING: [],
    State.RUNNING: [State.RUNNING],
    State.DONE: [State.RUNNING, State.DONE],
    **{state: [state] for state in FINAL - {State.DONE}},
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_every_pair_of_states(ask, before, after):
    request = ask(3)
    for state in ROUTES[before]:
        request.move(state)
    if after in MOVES[before]:
        request.move(after)
        assert (request.state, request.over) == (after, after in FINAL)
    else:
        error = request.error
        with pytest.raises(IllegalMove, match=f"{before.value} may become .*got {after.value}"):
            request.move(after)
        assert (request.state, request.over, request.error) == (before, before in FINAL, error)


def test_final_states_lead_nowhere_and_only_they_do():
    assert {state for state, moves in MOVES.items() if not moves} == FINAL
    assert set(MOVES) == set(State)


def test_counts_of_a_new_request(told):
    items = [
        {"x": np.zeros((2, 3), np.float32), "y": np.zeros((), np.int8)},
        {"x": np.zeros((4, 1), np.float32)},
    ]
    request = Request(items, [(2, 3), (4, 1)], arrived_s=7.0, sink=told)
    assert (request.waiting_rows, request.remaining, request.waiting_elements) == (2, 2, 10)
    assert request.nbytes == 24 + 1 + 16
    assert request.deadline_s == math.inf
    assert not request.over


def test_an_error_comes_with_its_state(ask):
    request, error = ask(1), ModelError("no")
    request.move(State.FAILED, error)
    assert request.error is error


def test_rows_know_their_item(ask):
    request = ask(3, 5)
    row = Row(request, 1)
    assert row.sizes == (5,)
    assert row.item is request.items[1]
    assert not row.taken
