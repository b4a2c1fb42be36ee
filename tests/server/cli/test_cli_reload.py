"""SIGHUP as an operator sends it: new weights under load, and weights that cannot be read."""

import asyncio
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import httpx
import jax
import jax.numpy as jnp
import pytest
import tritonclient.http as triton
from servax.jit_cache import compile_log
from servax.server import errors
from servax.server.cli import reload
from servax.server.cli.counting import compile_counter
from servax.server.cli.late import LateEngine
from servax.server.cli.wiring import Resolved
from servax.server.config import ModelConfig
from servax.server.events import FACTORY
from servax.server.metrics import Metrics
from tritonclient.utils import InferenceServerException

MODEL = """
import pathlib

import numpy as np
import servax


def make():
    weight = np.float32(pathlib.Path(__file__).with_name("weight").read_text())
    return servax.Servable(
        lambda weight, x: x * 0 + weight, weight, inputs={"x": "float32[n]"}, limits={"n": 8}, name="m"
    )
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
_PATIENCE_S = 60.0


@pytest.fixture
def served(tmp_path: Path, environment_of: Any, start_serve: Any) -> Iterator[Any]:
    (tmp_path / "reloaded.py").write_text(MODEL)
    weight = tmp_path / "weight"
    weight.write_text("1")
    running = start_serve(environment_of(tmp_path), "reloaded:make", "--no-store", "--allow-load")
    running.settle_ready()
    with httpx.Client(base_url=running.url, timeout=_PATIENCE_S) as client:
        yield running.process, client, weight, running.lines
    assert running.stop() == 0


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not true():
        assert time.monotonic() < end_s


def sample(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def has_it_loaded(client: httpx.Client, weight: Path) -> None:
    """What a signal does a client may ask for too, where the server allows it."""
    asking = triton.InferenceServerClient(str(client.base_url).removeprefix("http://").rstrip("/"))
    weight.write_text("3")
    asking.load_model("m")  # answered once it serves
    assert client.post("/v2/models/m/infer", json=BODY).json()["outputs"][0]["data"][0] == 3.0
    weight.write_text("none")
    with pytest.raises(InferenceServerException, match=r"the old one stays.*none") as caught:
        asking.load_model("m")
    assert caught.value.status() == "500"
    assert asking.get_model_repository_index()[0]["state"] == "READY"
    asking.close()


def test_W7_new_weights_are_served_without_a_failure_or_a_compile(served: Any) -> None:
    running, client, weight, said = served
    answers: list[float] = []
    stop, failures = threading.Event(), []

    def ask() -> None:
        try:
            while not stop.is_set():
                reply = client.post("/v2/models/m/infer", json=BODY).raise_for_status().json()
                answers.append(reply["outputs"][0]["data"][0])
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    compiles = sample(client, 'servax_compiles_total{phase="warmup"}')
    weight.write_text("2")
    running.send_signal(signal.SIGHUP)
    until(lambda: bool(failures) or answers[-1:] == [2.0])
    weight.write_text("none")
    running.send_signal(signal.SIGHUP)
    until(lambda: sample(client, 'servax_reloads_total{model="m",outcome="failed"}') == 1)
    heard = len(answers)
    until(lambda: bool(failures) or len(answers) > heard)
    stop.set()
    asking.join(_PATIENCE_S)
    assert failures == []
    assert answers == sorted(answers)
    assert set(answers) == {1.0, 2.0}
    assert sample(client, 'servax_reloads_total{model="m",outcome="done"}') == 1
    assert sample(client, 'servax_compiles_total{phase="warmup"}') == compiles > 0
    assert sample(client, 'servax_compiles_total{phase="request"}') == 0
    until(lambda: any("the old one stays" in line and "none" in line for line in said))
    assert any("model loaded anew model=m" in line for line in said)  # at the default level
    has_it_loaded(client, weight)


class _Engine:
    """Serves nothing; a swap waits until the test lets it go on."""

    draining = False
    models: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        self.swapped: list[str] = []
        self.may_end = threading.Event()

    def replace(self, servable: Any, *, timeout_s: float) -> None:
        assert self.may_end.wait(_PATIENCE_S)
        self.swapped.append(servable.name)


def test_one_model_is_loaded_at_a_time_and_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [ModelConfig(model="a:b"), ModelConfig(model="c:d", name="second")]
    monkeypatch.setattr(
        reload, "load", lambda config, **_: Resolved(cast(Any, SimpleNamespace(name=config.name or "first")))
    )
    engine = _Engine()
    reloader = reload.Reloader(cast(Any, engine), configs, {}, Metrics())
    first = reloader.load("second")
    with pytest.raises(errors.Overloaded, match="retry 'second' later"):
        reloader.load("second")
    reloader.ask()  # waits for its turn
    engine.may_end.set()
    first.result(_PATIENCE_S)
    until(lambda: engine.swapped == ["second", "first", "second"])
    reloader.join(_PATIENCE_S)
    with pytest.raises(errors.UnknownModel, match="set its name there"):
        reloader.load("first")  # two models, and this one is not named
    with pytest.raises(errors.LoadFailed, match="is 'first' by now, and 'a:b' was asked for"):
        reloader.load("a:b").result(_PATIENCE_S)
    alone = reload.Reloader(cast(Any, engine), configs[:1], {}, Metrics())
    alone.load("first").result(_PATIENCE_S)
    assert engine.swapped[3:] == ["first"]


def test_a_model_whose_source_is_the_name_of_another_is_told_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [ModelConfig(model="minilm"), ModelConfig(model="minilm", name="minilm-int8", quantize="int8")]
    monkeypatch.setattr(
        reload, "load", lambda config, **_: Resolved(cast(Any, SimpleNamespace(name=config.name or "minilm")))
    )
    engine = _Engine()
    engine.may_end.set()
    reloader = reload.Reloader(cast(Any, engine), configs, {}, Metrics())
    for name in ("minilm", "minilm-int8"):
        reloader.load(name).result(_PATIENCE_S)
    assert engine.swapped == ["minilm", "minilm-int8"]


def test_a_load_that_gets_no_thread_does_not_keep_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reload, "load", lambda config, **_: Resolved(cast(Any, SimpleNamespace(name="first")))
    )
    engine = _Engine()
    engine.may_end.set()
    reloader = reload.Reloader(cast(Any, engine), [ModelConfig(model="a:b")], {}, Metrics())

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start"):
            reloader.load("first")
    reloader.join(_PATIENCE_S)
    reloader.load("first").result(_PATIENCE_S)
    assert engine.swapped == ["first"]


def test_who_waits_for_a_load_hears_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "load", lambda config, **_: Resolved(cast(Any, SimpleNamespace(name="m"))))
    engine, late = _Engine(), LateEngine()
    reloader = reload.Reloader(cast(Any, engine), [ModelConfig(model="a:b")], {}, Metrics())
    late.reloader = reloader

    async def end_meanwhile() -> None:
        asking = asyncio.create_task(late.load("m"))
        await asyncio.sleep(0)
        reloader.ask()  # waits for its turn
        await late.aclose(0.0)
        with pytest.raises(errors.Closed, match="'m' was not loaded"):
            await asking

    asyncio.run(end_meanwhile())
    engine.draining = True
    engine.may_end.set()
    reloader.join(_PATIENCE_S)
    assert engine.swapped == ["m"]  # the signal's turn came after the end


def test_nothing_is_loaded_before_models_are_served_or_while_they_drain() -> None:
    late = LateEngine()
    with pytest.raises(errors.NotReady, match="the model is being loaded"):
        asyncio.run(late.load("m"))
    asyncio.run(late.aclose(0.0))
    with pytest.raises(errors.Closed, match="use another replica"):
        asyncio.run(late.load("m"))


@pytest.mark.parametrize(
    ("loads", "swaps", "outcome", "said"),
    [
        (None, errors.StillAnswers("'m' '2' serves; wait"), "done", "still in memory: 'm' '2' serves"),
        (None, TimeoutError("the disk is slow"), "failed", "the old one stays: the disk is slow"),
        (TimeoutError("the hub is slow"), None, "failed", "the old one stays: the hub is slow"),
    ],
)
def test_a_swap_that_outlasts_our_patience_is_told_from_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loads: Exception | None,
    swaps: Exception | None,
    outcome: str,
    said: str,
) -> None:
    def failing(error: Exception | None, answer: Any) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            if error is not None:
                raise error
            return answer

        return call

    found = Resolved(cast(Any, SimpleNamespace(name="m")))
    monkeypatch.setattr(reload, "load", failing(loads, found))
    metrics, engine = (
        Metrics(),
        SimpleNamespace(draining=False, models={"m": None}, replace=failing(swaps, None)),
    )
    reloader = reload.Reloader(cast(Any, engine), [ModelConfig(model="a:b")], {}, metrics)
    reloader.ask()
    until(lambda: metrics.value("servax_reloads_total", model="m", outcome=outcome) == 1)
    reloader.join(_PATIENCE_S)
    assert said in caplog.text


def test_a_loader_that_asks_for_the_end_ends_its_own_reload_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "load", lambda *_, **__: sys.exit("no"))
    metrics, engine = Metrics(), cast(Any, SimpleNamespace(draining=False, models={}))

    def failed() -> float:
        return metrics.value("servax_reloads_total", model="a:b", outcome="failed")

    reloader = reload.Reloader(engine, [ModelConfig(model="a:b")], {}, metrics)
    for count in (1, 2):
        reloader.ask()
        until(lambda least=count: failed() >= least)
    reloader.join(_PATIENCE_S)


def test_what_a_factory_compiles_is_no_re_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any, **__: Any) -> Resolved:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(5)).block_until_ready()
        return Resolved(cast(Any, SimpleNamespace(name="m")))

    monkeypatch.setattr(reload, "load", make)
    metrics = Metrics()
    engine = cast(Any, SimpleNamespace(draining=False, models={"m": None}, replace=lambda *_, **__: None))
    unsubscribe = compile_log().subscribe(compile_counter(metrics))
    reloader = reload.Reloader(engine, [ModelConfig(model="a:b")], {}, metrics)
    reloader.load("m").result(_PATIENCE_S)
    unsubscribe()
    told = metrics.events.listed()
    assert told
    assert {(one["phase"], one["cause"], one["model"]) for one in told} == {("background", FACTORY, "m")}
