"""What is warm when a server says that it is ready, and what its probes say on the way."""

import asyncio
import threading
import time

import httpx
import numpy as np
import pytest
from servax.jit_cache import CompileError, Servable, WarmupError
from servax.jit_cache.store import Store
from servax.server import NotReady, Server
from servax.server.batching.clock import ManualClock
from servax.server.batching.fake_device import FakeDevice
from servax.server.fleet import wait_out
from servax.server.hosting.programs import Programs
from servax.server.http.asgi import create_app
from servax.server.metrics import Metrics


def test_W1_a_grid_of_24_is_listed_and_compiled_once(tmp_path, compiles):
    servable = Servable(
        lambda x: x * 2,
        inputs={"x": "float32[length]"},
        limits={"batch": 8, "length": 256},
        scheme={"batch": [1, 2, 4, 8], "length": [8, 16, 32, 64, 128, 256]},
    )
    with Server(servable, store=Store.open(tmp_path / "store", trial=None)) as server:
        warm = server.model().report.warm
        assert {one.facts.source for one in warm} == {"compiled"}
    assert len({one.bucket for one in warm}) == len(servable.grid) == 24
    assert all(one.facts.compile_s > 0 and one.facts.code_bytes > 0 and one.run_s > 0 for one in warm)
    before = compiles.count
    with Server(servable, store=Store.open(tmp_path / "store", trial=None)) as server:
        again = server.model().report.warm
        assert {one.facts.source for one in again} == {"store"}
        assert len(again) == 24
        assert all(one.facts.ready_s > 0 for one in again)
        server.model().grid.check_coverage({"length": 256})
        assert np.array_equal(server(np.ones(200, np.float32)), np.full(200, 2.0))
    assert compiles.count == before


def test_W2_a_server_is_lost_once_no_model_can_get_ready(doubling):
    def fails(servable, bucket, leaves):
        raise CompileError(f"bucket {bucket} has no kernel")

    good = FakeDevice()

    def fails_once(servable, bucket, leaves):
        if bucket == servable.grid.buckets[0]:
            raise CompileError(f"bucket {bucket} has no kernel")
        return good.compile(servable, bucket, leaves)

    for make, lost, words in ((fails, True, "0 of 4 are: 4 buckets: "), (fails_once, False, "3 of 4 are: ")):
        server = Server(doubling(batch=2, length=16), compile_program=make).start()
        try:
            with pytest.raises(WarmupError, match=words):
                wait_out(server)
            assert server.wait_over(0.0)
            assert server.lost == lost
            assert server.status()["state"] == "failed"
            check_nobody_is_told_to_come_again(server)
        finally:
            server.close()


def check_nobody_is_told_to_come_again(server):
    with pytest.raises(NotReady, match=r"failed, which is not tried again: mend .* has no kernel") as caught:
        server.model().run_threaded([{"x": np.ones(3, np.float32)}])
    assert caught.value.lasting
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}

    async def answers():
        transport = httpx.ASGITransport(app=create_app(server, texts={}, metrics=Metrics()))
        async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
            infer = f"/v2/models/{server.model().name}/infer"
            gets = ("/v2/health/ready", "/v2/health/warm", f"/v2/models/{server.model().name}/ready")
            return [await client.post(infer, json=body), *[await client.get(one) for one in gets]]

    infer, *probes = asyncio.run(answers())
    assert infer.json()["reason"] == "not_ready"
    assert "mend the model and restart the server" in infer.json()["error"]
    for answer in (infer, *probes):
        assert answer.status_code == 503
        assert "retry-after" not in answer.headers


def test_a_model_of_which_padding_is_refused_is_lost():
    mean = Servable(
        lambda x: {"y": x.mean(axis=1)}, inputs={"x": "float32[length]"}, limits={"batch": 2, "length": 16}
    )
    server = Server(mean, programs=Programs(check_padding=True)).start()
    try:
        with pytest.raises(WarmupError, match="padding must not change an answer"):
            wait_out(server)
        assert server.lost
    finally:
        server.close()


def test_a_check_that_breaks_says_loudly_that_padding_is_unchecked(monkeypatch, caplog):
    def broken(*_, **__):
        raise TypeError("of our own making")

    monkeypatch.setattr("servax.server.hosting.preparing.require_safe", broken)
    double = Servable(lambda x: x * 2, inputs={"x": "float32[]"}, limits={"batch": 2})
    with Server(double, programs=Programs(check_padding=True)):
        found = [one for one in caplog.records if "served unchecked: TypeError: of our" in one.getMessage()]
    assert [one.levelname for one in found] == ["WARNING"]
    assert found[0].exc_info


class Steps:
    """Programs of a fake device, each made when it is let."""

    def __init__(self, clock, run_s):
        def run(bucket, inputs):
            clock.advance(run_s)
            return [inputs["x"] * 2]

        self.device = FakeDevice(run)
        self.permits = threading.Semaphore(0)

    def __call__(self, servable, bucket, leaves):
        assert self.permits.acquire(timeout=30.0)
        return self.device.compile(servable, bucket, leaves)


def test_W3_probes_through_load_warm_up_and_drain(doubling):
    clock, run_s = ManualClock(), 0.004
    steps, changed, reached = Steps(clock, run_s), threading.Condition(), []

    def note(name, step):
        with changed:
            reached.append(step.done)
            changed.notify_all()

    server = Server(doubling(batch=2, length=16), compile_program=steps, clock=clock, on_progress=note)
    app = create_app(server, texts={}, metrics=Metrics())

    def probe(what):
        async def go():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
                begin_s = time.monotonic()
                reply = await client.get(f"/v2/health/{what}")
                return reply, time.monotonic() - begin_s

        reply, took_s = asyncio.run(go())
        assert what != "live" or (reply.status_code == 200 and took_s < 2.0)  # 0.1 s on a quiet machine
        return reply

    probe("live")
    assert probe("ready").status_code == 503
    server.start()
    try:
        for done in range(4):
            probe("live")
            ready = probe("ready")
            assert (ready.status_code, ready.json()["done"], ready.json()["total"]) == (503, done, 4)
            steps.permits.release()
            with changed:
                assert changed.wait_for(lambda done=done: reached and reached[-1] > done, 30.0)
        server.wait_ready(30.0)
        assert probe("ready").status_code == 200
        # Every program ran before: the first request is like any other.
        assert {run.bucket for run in steps.device.runs} == set(server.model().grid)
        took_s = []
        for _ in range(20):
            begin_s = clock.now()
            assert server([1.0]) == [2.0]
            took_s.append(clock.now() - begin_s)
        assert took_s[0] <= 2 * np.median(took_s)
        # From the start of the drain on nobody is sent here, while those let in are answered.
        steps.device.hold()
        last = server.model().run_threaded([{"x": np.ones(3, np.float32)}])
        assert steps.device.held.wait(30.0)
        closing = threading.Thread(target=server.close)
        closing.start()
        while not server.draining:
            time.sleep(0)
        assert probe("ready").status_code == 503
        probe("live")
        steps.device.release()
        assert last.result(30.0)[0][0].tolist() == [2.0, 2.0, 2.0]
        closing.join(30.0)
    finally:
        steps.permits.release(8)
        steps.device.release()
        server.close()
