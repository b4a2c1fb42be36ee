"""When a call is tried again, and when not: on a clock that only sleeps move, over a transport that obeys."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.server.client import AsyncClient, BadAnswer, Budget, Client, ManualClock, Retry, Unreachable
from servax.server.client.errors import error_of, retry_after_s
from servax.server.errors import (
    ConfigError,
    DeadlineExceeded,
    ModelError,
    NotReady,
    Overloaded,
    ServerError,
    TooLong,
    Unauthorized,
    Unavailable,
    UnknownPath,
)

Answer = httpx.Response | Exception
GOOD = {"data": [{"id": "toy"}]}


def good() -> httpx.Response:
    return httpx.Response(200, json=GOOD)


def busy(reason: str = "overloaded", status: int = 429, **headers: str) -> httpx.Response:
    body = {"error": {"message": "The queue is full; wait.", "code": reason}}
    return httpx.Response(status, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


class Script:
    """Gives prepared answers, one a request; each request takes so many seconds."""

    def __init__(self, answers: Sequence[Answer | Callable[[], Answer]], seconds: float = 0.0) -> None:
        self.clock = ManualClock()
        self.answers, self.seconds = list(answers), seconds
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.clock.advance(self.seconds)
        answer = self.answers.pop(0)
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, **options: Any) -> Client:
        options.setdefault("jitter", lambda: 0.5)
        return Client("http://servax", transport=httpx.MockTransport(self), clock=self.clock, **options)


def test_a_busy_server_is_asked_again_when_it_said() -> None:
    script = Script([busy(retry_after="3"), busy(retry_after="1"), good()])
    with script.client() as client:
        assert client.models() == ["toy"]
    # Never earlier than asked; behind that, half of a backoff of at most 0.1 s, then 0.2 s.
    assert script.clock.slept == [pytest.approx(3.05), pytest.approx(1.1)]
    assert len({request.headers["x-request-id"] for request in script.requests}) == 1


def test_without_advice_the_backoff_doubles_and_is_spread() -> None:
    script = Script([busy()] * 3 + [good()])
    with script.client(retry=Retry(base_s=1.0)) as client:
        client.models()
    assert script.clock.slept == [0.5, 1.0, 2.0]


def test_starting_and_draining_servers_are_asked_again() -> None:
    script = Script([busy("not_ready", 503), busy("closed", 503), good()])
    with script.client() as client:
        assert client.models() == ["toy"]


def test_the_tries_are_bounded_and_the_error_tells_of_them() -> None:
    script = Script([busy(retry_after="1", x_request_id="served")] * 4)
    with script.client() as client, pytest.raises(Overloaded, match="The queue is full") as caught:
        client.models()
    assert len(script.requests) == 4
    assert caught.value.request_id == "served"
    assert caught.value.retry_after_s == 1.0
    assert "4 tries" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "too_long", TooLong),
        (401, "unauthorized", Unauthorized),
        (500, "model", ModelError),
        (504, "deadline", DeadlineExceeded),
    ],
)
def test_what_no_retry_cures_is_raised_at_once(status: int, reason: str, kind: type[ServerError]) -> None:
    script = Script([busy(reason, status)])
    with script.client() as client, pytest.raises(kind):
        client.models()
    assert script.clock.slept == []


def test_no_retry_is_begun_that_would_come_too_late() -> None:
    script = Script([busy(retry_after="5")])
    with script.client(timeout_s=5.0) as client, pytest.raises(Overloaded) as caught:
        client.models()
    assert script.clock.slept == []
    assert "after the deadline" in caught.value.__notes__[0]


def test_a_wait_longer_than_the_client_allows_is_the_callers() -> None:
    script = Script([busy(retry_after="31")])
    with script.client() as client, pytest.raises(Overloaded) as caught:
        client.models()
    assert (script.clock.slept, caught.value.retry_after_s) == ([], 31.0)


def test_the_deadline_holds_over_all_tries() -> None:
    script = Script([httpx.ConnectError("refused")] * 4, seconds=2.0)
    with script.client(timeout_s=3.0) as client, pytest.raises((Unreachable, DeadlineExceeded)):
        client.models()
    assert len(script.requests) == 2
    left = [request.extensions["timeout"]["read"] for request in script.requests]
    assert left[0] == 3.0
    assert left[1] < 1.0


def test_a_broken_connection_is_tried_again_and_a_timeout_is_not() -> None:
    script = Script([httpx.RemoteProtocolError("closed"), httpx.ConnectError("refused"), good()])
    with script.client() as client:
        assert client.models() == ["toy"]
    script = Script([httpx.ReadTimeout("late")])
    with script.client() as client, pytest.raises(DeadlineExceeded, match="within timeout_s"):
        client.models()


def test_calls_share_a_budget_that_successes_refill() -> None:
    policy = Retry(attempts=10, budget=3, refund=1.0)
    script = Script([busy()] * 4 + [good(), busy(), good()])
    with script.client(retry=policy) as client:
        with pytest.raises(Overloaded) as caught:
            client.models()
        assert "budget" in caught.value.__notes__[0]
        assert len(script.requests) == 4
        client.models()
        client.models()
    assert not script.answers


def test_a_body_that_drips_ends_at_the_deadline() -> None:
    script = Script([])

    class Drip(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            for _ in range(10):
                script.clock.advance(1.0)
                yield b" "

    script.answers.append(httpx.Response(200, stream=Drip()))
    with script.client(timeout_s=3.0) as client, pytest.raises(DeadlineExceeded):
        client.models()
    assert script.clock.now() == 4.0


def test_the_asynchronous_client_does_the_same() -> None:
    script = Script([busy(retry_after="3"), httpx.ConnectError("refused"), good()])

    async def go() -> list[str]:
        async def handle(request: httpx.Request) -> httpx.Response:
            return script(request)

        transport = httpx.MockTransport(handle)
        async with AsyncClient(
            "http://servax", transport=transport, clock=script.clock, jitter=lambda: 0.5
        ) as client:
            return await client.models()

    assert asyncio.run(go()) == ["toy"]
    assert script.clock.slept == [pytest.approx(3.05), pytest.approx(0.1)]


def test_an_asynchronous_call_ends_at_its_deadline() -> None:
    async def go() -> None:
        async def never(request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

        async with AsyncClient(
            "http://servax", transport=httpx.MockTransport(never), timeout_s=0.05
        ) as client:
            with pytest.raises(DeadlineExceeded):
                await client.models()

    asyncio.run(go())


@given(st.floats(0, 0.999), st.integers(1, 12), st.none() | st.floats(0, 40))
def test_a_wait_is_never_shorter_than_asked_nor_longer_than_allowed(
    draw: float, tries: int, asked: float | None
) -> None:
    policy = Retry(attempts=12, base_s=0.1, longest_s=20.0)
    error = Unavailable("starting")
    error.retry_after_s = asked
    wait_s = policy.wait_s(tries, error, lambda: draw)
    if tries == 12 or (asked is not None and asked > 20.0):
        assert wait_s is None
    else:
        assert wait_s is not None
        assert (asked or 0.0) <= wait_s <= (asked or 0.0) + min(20.0, 0.1 * 2 ** (tries - 1))


@given(st.lists(st.booleans(), max_size=60))
def test_a_budget_is_never_overdrawn(successes: list[bool]) -> None:
    budget = Budget(Retry(budget=2.0, refund=0.5))
    taken = 0
    for good_one in successes:
        if good_one:
            budget.refund()
        else:
            taken += budget.take()
    assert 0.0 <= budget.left <= 2.0
    assert taken <= 2 + 0.5 * sum(successes)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "-7"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        (
            {
                "date": "Wed, 21 Oct 2026 07:28:00 GMT",
                "retry-after": "Wed, 21 Oct 2026 07:28:09 GMT",
            },
            9.0,
        ),
    ],
)
def test_advice_is_seconds_or_a_date(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, b"<html>upstream", Unavailable),
        (502, b"", Unreachable),
        (404, b"{}", UnknownPath),
        (429, b'{"error": "slow down"}', Overloaded),
        (418, b"[1]", ServerError),
        (500, json.dumps({"error": "x", "reason": "model"}).encode(), ModelError),
        (503, json.dumps({"error": {"message": "x", "code": "not_ready"}}).encode(), NotReady),
        (500, b"[" * 100_000, ServerError),
    ],
)
def test_an_error_has_the_class_of_its_reason_or_of_its_status(
    status: int, body: bytes, kind: type[ServerError]
) -> None:
    assert isinstance(error_of(status, {}, body), kind)


def test_waiting_for_a_server_that_starts() -> None:
    warming = {"ready": False, "message": "1 of 2 programs are done (warming)"}
    ready = {"ready": True, "state": "ready"}
    script = Script(
        [httpx.ConnectError("refused"), httpx.Response(503, json=warming), httpx.Response(200, json=ready)]
    )
    with script.client() as client:
        assert client.wait_ready(60.0)["state"] == "ready"
    script = Script([lambda: httpx.Response(503, json=warming)] * 100)
    with script.client() as client, pytest.raises(NotReady, match="1 of 2 programs"):
        client.wait_ready(10.0)
    assert script.clock.now() == pytest.approx(10.0)


def test_what_is_no_answer_is_said_to_be_none() -> None:
    with (
        Script([httpx.Response(200, text="<html>")]).client() as client,
        pytest.raises(BadAnswer, match="URL"),
    ):
        client.models()


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://host", "http://"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="client needs"):
        Client(url)


@pytest.mark.parametrize("options", [{"timeout_s": 0.0}, {"timeout_s": float("nan")}])
def test_times_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ServerError):
        Client(**options)
    with pytest.raises(ConfigError):
        Retry(attempts=0)
