"""When a device counts as broken, and when it is tried again."""

import math
import threading

from hypothesis import given
from hypothesis import strategies as st
from servax.server.batching.breaker import Breaker, Circuit
from servax.server.batching.devices import Devices
from servax.server.batching.faults import FaultPolicy


@given(st.lists(st.one_of(st.sampled_from(["fail", "work"]), st.floats(0, 10)), max_size=60))
def test_the_breaker_opens_after_failures_in_a_row_and_tries_with_longer_pauses(events):
    policy = FaultPolicy(open_after=3, backoff_s=1.0, most_backoff_s=8.0, gone_after=2)
    breaker, now_s, row, trials = Breaker(policy), 0.0, 0, 0
    for event in events:
        if event == "fail":
            if breaker.circuit is Circuit.HALF_OPEN:
                trials += 1
            row += 1
            opened = breaker.failed(now_s, "broken")
            assert opened == (row == policy.open_after)
            if breaker.circuit is Circuit.OPEN:
                assert now_s < breaker.next_s() <= now_s + policy.most_backoff_s or not opened
        elif event == "work":
            assert breaker.worked() == (row >= policy.open_after)
            row = trials = 0
        else:
            now_s += event
            due = breaker.next_s() <= now_s
            assert breaker.try_now(now_s) == due
            assert not breaker.try_now(now_s), "one trial at a time"
        assert breaker.shut_out == (row >= policy.open_after)
        assert breaker.spotless == (row == 0)
        assert breaker.gone == breaker.error().lasting == (trials >= policy.gone_after)
        assert (breaker.circuit is Circuit.HALF_OPEN) <= (breaker.next_s() == math.inf)


def test_of_several_broken_devices_callers_hear_of_the_one_that_may_recover():
    devices = Devices(2, 1.0, FaultPolicy(open_after=1, gone_after=1), threading.Lock())
    for one in devices.each:
        one.breaker.failed(0.0, "broken")
    assert "retry once it recovers" in str(devices.error())
    for one in devices.each:
        assert one.breaker.try_now(100.0)
        one.breaker.failed(100.0, "broken")
        hope = one is devices.each[0]
        assert (devices.error().lasting, "restart it" in str(devices.error())) == (not hope, not hope)
