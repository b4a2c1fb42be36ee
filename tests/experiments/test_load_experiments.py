"""The experiments on load, small: their checks hold and their keys are there."""

import asyncio

import pytest
from servax.experiments import overhead, overload, soak
from servax.experiments.errors import ExperimentError
from servax.experiments.noop import rss_bytes


def test_the_soak_accounts_for_every_request() -> None:
    found = soak.soak(6000, threads=2, seed=1)
    assert found["requests"] == sum(found["outcomes"].values()) == 6000
    assert {pair.split(": ")[0] for pair in found["outcomes"]} == set(soak.KINDS)
    assert found["failed_compiles"] > 0
    assert not any(found["left"].values())


def test_the_soak_sees_what_must_not_be_seen() -> None:
    books = soak.Books()
    books.note("good", "model")
    with pytest.raises(ExperimentError, match="strangely"):
        soak._checked(books, 1, [1, 1], {"waiting_rows": 0}, True, 0)


def test_O1_overload_in_small() -> None:
    found = overload.measure(times=4.0, seconds=1.5, timeout_s=0.4, queue_rows=1000)
    assert found["refused"] > 0
    assert found["goodput"] > 0.3  # a busy test machine; the experiment itself says how much more it is
    assert found["recovery_ms"] < 400


def test_O3_impatient_customers_in_small() -> None:
    found = overload.impatient(3.0, 1.5, told=True)
    assert found["goodput"] > 0.2  # a busy test machine, as above
    assert found["in_vain"] < 0.8
    assert found["recovery_ms"] < 1000


def test_overhead_measures_in_one_process() -> None:
    assert overhead.inprocess(4096)["rps"] > 1000
    assert 10 < overhead.added_latency_us(50) < 50_000


@pytest.mark.parametrize(("kind", "client"), [("http", overhead.http_rps), ("grpc", overhead.grpc_rps)])
def test_overhead_talks_to_both_servers(kind: str, client: object) -> None:
    assert asyncio.iscoroutinefunction(client)
    for name in (kind, f"{kind}_bare"):
        assert overhead._measured(name, client, 0.3) > 10  # type: ignore[arg-type]


def test_memory_is_read_in_bytes() -> None:
    assert 1e7 < rss_bytes() < 1e12
