"""Calls of our own that wait longer than we wait for them."""

import asyncio
from typing import Any

import pytest
from servax.server.rpc.lag import Lag, LagGate


@pytest.mark.parametrize("most_lag_s", [0.1, 1.0, 30.0])
def test_a_wait_shuts_the_gate_before_its_call_is_given_up(most_lag_s: float) -> None:
    async def go() -> None:
        now_s = 100.0
        lag = Lag(lambda: now_s)
        gate = LagGate(lag, most_lag_s)

        async def never(metadata: Any) -> None:
            await asyncio.Event().wait()

        asking = asyncio.create_task(lag.run(never))
        lag.called()
        await asyncio.sleep(0.001)
        assert gate.enter(now_s) is not None
        gate.gone()
        now_s += 1.01 * lag.longest_s
        assert gate.enter(now_s) is None
        asking.cancel()

    asyncio.run(go())


def test_a_call_that_was_given_up_does_not_answer_for_the_next() -> None:
    async def go() -> None:
        lag, asked, over = Lag(), [], asyncio.Event()

        async def ask(metadata: Any) -> None:
            asked.append(metadata)
            if len(asked) < 2:
                lag.called()
                return
            over.set()

        asking = asyncio.create_task(lag.run(ask))
        lag.called()
        await asyncio.wait_for(over.wait(), 10)
        assert asked[0] != asked[1]
        asking.cancel()

    asyncio.run(go())
