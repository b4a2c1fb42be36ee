"""Why a shape takes which bucket, the numbers behind the live page, the options in force."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
import servax
from servax.bucketing import Bucket, CostModel, Grid, PackedPlanner
from servax.server.batching.batcher import Policy
from servax.server.cli.counting import load_counter
from servax.server.errors import BadRequest
from servax.server.explain import explain, leaves
from servax.server.http.asgi import create_app
from servax.server.metrics import Metrics
from servax.server.recent import Recent
from servax.server.settings import read_settings


@pytest.fixture(scope="module")
def real() -> Iterator[Any]:
    servable = servax.Servable(
        lambda params, *, x: {"y": x * params},
        jnp.float32(2),
        inputs={"x": "float32[length]"},
        limits={"length": 32, "batch": 4},
        scheme="powers_of_two:8",
        name="tiny",
    )
    metrics = Metrics()
    server = servax.Server(
        servable, max_wait_s=0.0, on_batch=metrics.batch_record, on_progress=load_counter(metrics, None)
    )
    with server:
        yield server, metrics, create_app(server, metrics=metrics)


def get(app: Any, path: str) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
            return await client.get(path)

    return asyncio.run(go())


def test_B4_the_cheapest_bucket_is_named_and_what_the_others_cost() -> None:
    grid = Grid.parse("8x256 16x256", ("batch", "length"))
    measured = {Bucket(grid.axes, (8, 256)): 0.104, Bucket(grid.axes, (16, 256)): 0.372}
    told = explain(grid, measured, 16, (200,))
    assert [run["bucket"] for run in told["runs"]] == ["8x256", "8x256"]
    assert told["seconds"] == pytest.approx(0.208)
    assert told["why"] == "8x256 + 8x256 costs least: 208 ms; the next best, 16x256, 372 ms."
    assert [(one["bucket"], one["chosen"], one["measured"]) for one in told["candidates"]] == [
        ("8x256", True, True),
        ("16x256", False, True),
    ]
    assert told["padding"] == pytest.approx(1 - 200 / 256)
    with pytest.raises(BadRequest, match="1 to 4096 rows"):
        explain(grid, measured, 0, (200,))


def test_a_plan_that_is_not_the_cheapest_does_not_say_so() -> None:
    grid = Grid.explicit(("batch", "length"), [(1, 40), (1, 80), (1, 256)])
    measured = {Bucket(grid.axes, (1, size)): cost for size, cost in ((40, 0.05), (80, 0.12), (256, 0.14))}
    planner = PackedPlanner(grid, CostModel(), max_segments=8)
    told = explain(grid, measured, 3, (37,), planner)
    assert told["seconds"] == pytest.approx(0.17)
    assert "costs least" not in told["why"]
    assert "1x80 + 1x40 is planned, each bucket by what a real element costs" in told["why"]
    assert "or else 1x256, 140 ms" in told["why"]


def test_a_shape_is_explained(real: Any) -> None:
    _, _, app = real
    told = get(app, "/debug/explain?rows=1&length=9").json()
    assert (told["model"], told["sizes"]) == ("tiny", {"length": 9})
    assert all(one["padding"] >= 0 for one in told["candidates"])
    assert sum(run["rows"] for run in told["runs"]) == 1


def test_it_is_told_why_batches_left(real: Any, eventually: Any) -> None:
    server, _, app = real
    query = "/debug/explain?rows=1&length=9"
    before = get(app, query).json()["leaves"]["left"]
    server(x=np.ones(9, np.float32))
    eventually(lambda: get(app, query).json()["leaves"]["left"] != before)
    told = get(app, query).json()["leaves"]
    new = {why: count - before.get(why, 0) for why, count in told["left"].items()}
    assert sum(new.values()) == 1
    assert set(new) <= {"full", "idle"}
    assert told["rule"] == "at once where a device is free; rows gather only while none is"
    assert any(words in told["why"] for words in ("full, so that", "since the device was free"))


def test_the_rule_by_which_batches_leave_follows_the_policy() -> None:
    fixed = leaves(Policy(max_wait_s=0.005), {})
    assert "when its bucket is full" in fixed["rule"]
    assert "for at most 5 ms" in fixed["rule"]
    assert fixed["why"] == "none left yet in these buckets"
    told = leaves(Policy(max_wait_s=0.005, wait="adaptive"), {"window": 2, "deadline": 1})
    assert "as long as that is predicted to pay" in told["rule"]
    assert told["why"] == "1 when a row could wait no longer; 2 when a row had waited its time"


@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ("length=33", 400, "1 to 32"),
        ("length=0", 400, "1 to 32"),
        ("rows=2", 400, "length"),
        ("length=4&width=2", 400, "width"),
        ("length=x", 400, "whole number"),
        ("length=4&rows=-1", 400, "whole number"),
        ("length=4&rows=0", 400, "rows"),
        ("length=4&model=no", 404, "'no'"),
    ],
)
def test_a_shape_that_is_none_is_refused(real: Any, query: str, status: int, word: str) -> None:
    response = get(real[2], f"/debug/explain?{query}")
    assert response.status_code == status
    assert word in response.json()["error"]["message"]


def test_M3_M4_numbers_behind_the_page(real: Any, eventually: Any) -> None:
    server, metrics, app = real
    before = {key: dict(one) for key, one in metrics.recent.buckets().items()}
    server(x=np.ones(20, np.float32))
    eventually(lambda: metrics.recent.buckets() != before)
    body = get(app, "/debug/grid.json").json()
    assert (body["ready"], body["status"]["state"]) == (True, "ready")
    (model,) = body["models"]
    buckets = {one["bucket"]: one for one in model["buckets"]}
    assert set(buckets) == {str(bucket) for bucket in server.model().servable.grid}
    assert {one["state"] for one in buckets.values()} == {"warm"}
    row = buckets["1x32"]
    old = before.get(("tiny", "1x32"), {"runs": 0, "real": 0, "computed": 0})
    assert (row["runs"] - old["runs"], row["real"] - old["real"]) == (1, 20)
    assert row["computed"] - old["computed"] == 32
    assert row["wasted_s"] == pytest.approx(row["device_s"] * 12 / 32)
    ready = [one for one in body["events"] if one["bucket"]]
    assert {one["bucket"] for one in ready} == set(buckets)
    assert {(one["source"], one["phase"]) for one in ready} == {("compiled", "warmup")}
    assert all(one["cause"] and one["seconds"] > 0 for one in ready)
    assert sum(one["code_bytes"] for one in ready) == sum(one["code_bytes"] for one in buckets.values())
    assert all(len(line) == 120 for line in body["series"].values())
    wasted = metrics.value("servax_batch_wasted_seconds_total", model="tiny", bucket="1x32")
    assert wasted == pytest.approx(row["wasted_s"])
    assert metrics.value("servax_queue_seconds_count", model="tiny") >= 1


def test_Q9_options_set_by_code_are_shown(real: Any) -> None:
    body = get(real[2], "/v2/models/tiny/config").json()
    assert body["options"]["max_wait_ms"] == {"value": 0.0, "source": "code"}
    assert body["options"]["queue.rows"] == {"value": 4096, "source": "code"}
    assert "1x32" in body["buckets"]
    assert get(real[2], "/v2/models/no/config").status_code == 404


def test_Q9_options_are_shown_with_their_source(site: Any) -> None:
    settings = read_settings({"max_wait_ms": 100.0, "api_key": ["hidden"]}, {"SERVAX_DRAIN_S": "3"})
    site.app = create_app(site.engine, settings=settings.listed())
    response = site.call("GET", "/v2/models/toy/config")
    options = response.json()["options"]
    assert options["max_wait_ms"] == {"value": 100.0, "source": "flag"}
    assert options["drain_s"] == {"value": 3.0, "source": "env"}
    assert options["stall_s"] == {"value": 120.0, "source": "default"}
    assert "hidden" not in response.text


def test_a_model_without_a_grid_is_listed_and_not_explained(site: Any) -> None:
    names = [one["name"] for one in site.call("GET", "/debug/grid.json").json()["models"]]
    assert "toy" in names
    assert site.call("GET", "/debug/explain?model=toy&length=1").status_code == 400


def test_seconds_are_kept_for_two_minutes() -> None:
    recent = Recent()
    for second in range(200):
        recent.reply(second + 0.5, 0.010, good=second % 2 == 0)
        recent.batch(second + 0.5, "m", "1x8", rows=3, real=6, computed=8, seconds=0.25)
    recent.waiting(199.9, 7)
    series = recent.series(200.0)
    assert series["requests"] == [1] * 120
    assert sum(series["errors"]) == 60
    assert series["rows"][-1] == 3
    assert series["waiting"][-1] == 7
    assert series["busy"][-1] == 0.25
    assert all(value == pytest.approx(10.0, rel=0.08) for value in series["p99_ms"])
    assert recent.series(500.0)["p50_ms"] == [None] * 120
    assert recent.buckets()["m", "1x8"]["wasted_s"] == pytest.approx(200 * 0.25 * 0.25)


def test_W4_a_batch_in_a_larger_bucket_counts_as_a_cold_hit() -> None:
    from servax.server import BatchRecord

    metrics = Metrics()
    bucket = Bucket(("batch", "length"), (4, 32))
    record = BatchRecord("tiny", bucket, 1, 5, 128, 0.01, "idle", (0.002,), cold=True)
    metrics.batch_record(record)
    assert metrics.value("servax_cold_hits_total", model="tiny", bucket=str(bucket)) == 1
