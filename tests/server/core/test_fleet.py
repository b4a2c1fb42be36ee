"""Several servers as one engine: order of warm-up, failures, readiness, names, the end."""

import threading
from types import MappingProxyType

import pytest
from servax.jit_cache import WarmupReport
from servax.server import Server
from servax.server.batching.fake_device import FakeDevice
from servax.server.errors import Closed, ConfigError, NotReady, Unavailable
from servax.server.fake import doubler
from servax.server.fleet import Fleet, wait_out


class Part:
    """A server that gets ready when it is let; notes what was asked of it."""

    def __init__(self, name, log, error=None):
        self.name, self.log, self.error = name, log, error
        self.models = MappingProxyType({name: doubler(name)})
        self.reports = {name: WarmupReport(3)}
        self.gate, self.entered = threading.Event(), threading.Event()
        self.live, self.ready, self.draining, self.state = True, False, False, "new"

    @property
    def warm(self):
        return self.ready

    def start(self):
        self.log.append(f"start {self.name}")
        self.state = "warming"

    def wait_ready(self, timeout_s):
        self.entered.set()
        assert self.gate.wait(20)
        if self.error is not None:
            self.state = "failed"
            raise self.error
        self.log.append(f"ready {self.name}")
        self.ready, self.state = True, "ready"

    def wait_over(self, timeout_s):
        return self.gate.wait(timeout_s)

    @property
    def lost(self):
        return self.state == "failed"

    def status(self):
        failed = {} if self.state != "failed" else {f"{self.name} 1x8": str(self.error)}
        done = 3 if self.ready else 1
        return {"state": self.state, "done": done, "total": 3, "failed": failed, "error": None}

    def close(self, drain_s):
        self.log.append(f"close {self.name}")
        self.gate.set()


@pytest.fixture
def log():
    return []


def test_parts_warm_up_one_after_another(log):
    first, second = Part("a", log), Part("b", log)
    fleet = Fleet(first, second)
    assert set(fleet.models) == {"a", "b"}
    assert set(fleet.reports) == {"a", "b"}
    with pytest.raises(Closed):
        fleet.wait_ready(1)
    fleet.start()
    assert first.entered.wait(20)
    assert log == ["start a"]
    status = fleet.status()
    assert (status["state"], status["done"], status["total"]) == ("warming", 2, 6)
    with pytest.raises(NotReady, match="2 of 6 programs are warm"):
        fleet.wait_ready(0.0)
    first.gate.set()
    second.gate.set()
    fleet.wait_ready(20)
    assert log == ["start a", "ready a", "start b", "ready b"]
    assert fleet.ready
    assert fleet.warm
    assert fleet.status()["state"] == "ready"
    second.live = False
    assert not fleet.live
    fleet.close()
    assert sorted(log[-2:]) == ["close a", "close b"]
    assert fleet.status()["state"] == "closed"
    assert not fleet.ready
    fleet.close()
    with pytest.raises(Closed):
        fleet.start()


def test_W2_one_that_fails_leaves_the_others_serving(log):
    first, second = Part("a", log, error=Unavailable("no such kernel")), Part("b", log)
    first.gate.set()
    second.gate.set()
    fleet = Fleet(first, second).start()
    with pytest.raises(Unavailable, match="no such kernel"):
        fleet.wait_ready(20)
    assert second.ready
    assert not fleet.ready
    assert fleet.live
    assert fleet.status()["state"] == "failed"
    assert fleet.status()["failed"] == {"a 1x8": "no such kernel"}
    assert fleet.wait_over(20)
    assert not fleet.lost, "the other serves"
    fleet.close()


def test_W2_a_fleet_of_which_none_gets_ready_is_lost(log):
    parts = [Part(name, log, error=Unavailable("no such kernel")) for name in "ab"]
    fleet = Fleet(*parts).start()
    assert not fleet.lost
    for part in parts:
        part.gate.set()
    with pytest.raises(Unavailable):
        wait_out(fleet)
    assert fleet.lost
    fleet.close()


def test_names_are_distinct(log):
    with pytest.raises(ConfigError, match="distinct names; got \\['a', 'a'\\]"):
        Fleet(Part("a", log), Part("a", log))
    with pytest.raises(ConfigError):
        Fleet()


def test_closing_in_the_middle_of_a_warm_up_starts_no_more(log):
    first, second = Part("a", log), Part("b", log)
    second.gate.set()
    fleet = Fleet(first, second).start()
    assert first.entered.wait(20)
    fleet.close(drain_s=0.0)
    assert "start b" not in log
    assert "close b" in log


def test_real_servers_in_a_fleet(doubling):
    parts = [Server(doubling(name=name), compile_program=FakeDevice().compile) for name in ("one", "two")]
    with Fleet(*parts) as fleet:
        assert fleet.ready
        assert fleet.status()["done"] == fleet.status()["total"] > 0
    assert fleet.draining
    assert all(part.status()["state"] == "closed" for part in parts)
