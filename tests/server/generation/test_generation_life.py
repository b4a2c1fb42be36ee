"""Start, refusals, overload, deadlines and the end of a language model's server."""

import asyncio
import threading

import pytest
from servax.server.batching.clock import ManualClock
from servax.server.errors import (
    BadRequest,
    Closed,
    DeadlineExceeded,
    NotReady,
    Overloaded,
    Unavailable,
)
from servax.server.generation import GenerationServer, SamplingParams
from servax.server.generation.programs import Key

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def test_refusals_at_the_door(serve, tiny):
    server = serve()
    with pytest.raises(BadRequest, match="priority is 1 to 9"):
        server.generate([5], priority=0)
    with pytest.raises(BadRequest, match="timeout_s is above 0"):
        server.generate([5], timeout_s=0.0)
    with pytest.raises(NotReady):
        GenerationServer(tiny).generate([5])
    server.close()
    with pytest.raises(Closed):
        server.generate([5])
    with pytest.raises(Closed):
        server.start()


def test_a_full_queue_and_a_deadline(serve):
    clock = ManualClock()
    server = serve(max_waiting=1, clock=clock)
    step, gate, entered = server.engine.programs.step, threading.Event(), threading.Event()

    def held(key, batch):
        entered.set()
        gate.wait(20)
        return step(key, batch)

    server.engine.programs.step = held

    async def go():
        first = asyncio.ensure_future(server.agenerate([5, 6], LONG, timeout_s=1.0))
        await asyncio.to_thread(entered.wait, 20)
        second = asyncio.ensure_future(server.agenerate([5, 7], GREEDY))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="at most 1 requests wait; 1 do"):
            await server.agenerate([5, 8], GREEDY)
        clock.advance(2.0)
        gate.set()
        with pytest.raises(DeadlineExceeded):
            await first
        assert len((await second).ids) == 12

    asyncio.run(go())


def test_close_drains_then_fails_the_rest(serve, greedy):
    server = serve(check=False)
    iterator = server.iterate([5, 6], ENDLESS)
    first = next(iterator)
    server.close(drain_s=0.0)
    with pytest.raises(Closed):
        for _ in iterator:
            pass
    assert first.ids == greedy([5, 6], 1)
    assert not server.live


def test_a_model_that_does_not_compile_is_named(tiny):
    class Broken:
        def __init__(self, inner):
            self.__dict__.update({name: getattr(inner, name) for name in inner.__dataclass_fields__})
            self.step = lambda *_, **__: 1 / 0

    server = GenerationServer(Broken(tiny), pages=10, max_rows=1).start()
    with pytest.raises(Unavailable, match="ZeroDivisionError"):
        server.wait_ready(60)
    assert server.status()["state"] == "failed"
    server.close()


def test_close_in_the_middle_of_warm_up(tiny):
    begun = threading.Event()
    server = GenerationServer(tiny, pages=11, max_rows=2, on_progress=lambda *_: begun.set()).start()
    with pytest.raises(NotReady, match=r"answers once it is warm; \d+ of 10 programs are"):
        server.generate([5])
    assert begun.wait(60)
    server.close()
    assert not server.live
    assert server.status()["state"] == "closed"
    assert server.status()["error"] is None


def test_sealed_process_generates(serve, greedy):
    expected = greedy([5, 6, 7], 12)
    server = serve(seal=True)
    assert server.generate([5, 6, 7], GREEDY).ids == expected


def test_programs_are_a_fixed_list(serve):
    server = serve()
    kinds = [key.kind for key in server.engine.programs.compiled]
    assert sorted(set(kinds)) == ["copy", "decode", "fill", "mixed", "prefill", "zeros"]
    assert Key("decode", 3, 1) in server.engine.programs.compiled
