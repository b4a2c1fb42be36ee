"""What every request passes first: keys, ids, traces, the client's name and the log."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from servax.server.context import CALL, client_of_call, parse_traceparent
from servax.server.errors import Overloaded
from servax.server.http.asgi import create_app
from servax.server.http.entry import OPEN_PATHS
from servax.server.logs import CHANGES, JsonFormatter, TextFormatter, set_up_logs

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


@pytest.fixture
def keyed(site: Any) -> Any:
    site.app = create_app(site.engine, metrics=site.metrics, api_keys=("k1", "k2"))
    return site


@pytest.fixture
def lines() -> Iterator[Any]:
    """Logs of the command line, as JSON; the process's own set-up comes back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("servax", "servax.changes", "uvicorn")}
    stream = io.StringIO()
    set_up_logs("info", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def infer(site: Any, **headers: str) -> Any:
    return site.call("POST", "/v2/models/double/infer", json={"inputs": [X8]}, headers=headers)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer k3"}, {"authorization": "k1 k2"}])
def test_without_a_key_nothing_is_done(keyed: Any, headers: dict[str, str]) -> None:
    response = infer(keyed, **headers)
    assert (response.status_code, response.json()["reason"]) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert "k1" not in response.json()["error"]
    body = keyed.call("POST", "/v1/embeddings", json={}, headers=headers).json()
    assert body["error"]["type"] == "authentication_error"
    assert not keyed.double.calls


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer k1"}, {"authorization": "bearer k2"}, {"x-api-key": "k2"}]
)
def test_each_key_lets_in(keyed: Any, headers: dict[str, str]) -> None:
    assert infer(keyed, **headers).status_code == 200


def test_probes_metrics_and_the_page_need_no_key(keyed: Any) -> None:
    for path in OPEN_PATHS:
        assert keyed.call("GET", path).status_code == 200, path
    assert keyed.call("GET", "/v1/models").status_code == 401
    assert keyed.call("GET", "/debug/explain").status_code == 401


@pytest.mark.parametrize(("level", "told"), [("debug", 1), ("info", 1), ("warning", 1), ("error", 0)])
def test_what_changed_is_told_at_the_default_level(lines: Any, level: str, told: int) -> None:
    said = io.StringIO()
    set_up_logs(level, "text", said)
    CHANGES.info("m: re-fitted")
    logging.getLogger("servax.other").debug("quiet")
    assert said.getvalue().count("m: re-fitted") == told


def test_a_line_tells_the_status_once(site: Any, lines: Any) -> None:
    said = io.StringIO()
    set_up_logs("info", "text", said)  # `lines` puts things back
    infer(site)
    (line,) = [one for one in said.getvalue().splitlines() if "servax.access" in one]
    assert line.count("200") == 1
    assert " status=200 " in line


def test_the_trace_and_the_id_are_in_every_line(site: Any, lines: Any) -> None:
    assert infer(site, traceparent=PARENT, **{"x-request-id": "r-1"}).status_code == 200
    (line,) = [one for one in lines() if one["logger"] == "servax.access"]
    assert line["request_id"] == "r-1"
    assert line["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert line["parent_id"] == "00f067aa0ba902b7"
    assert len(line["span_id"]) == 16
    assert (line["status"], line["level"], line["client"]) == (200, "info", "127.0.0.1")
    site.double.error = RuntimeError("a fault inside")
    infer(site, **{"x-request-id": "r-2"})
    (fault,) = [one for one in lines() if "exception" in one]
    assert fault["request_id"] == "r-2"
    assert "a fault inside" in fault["exception"]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (PARENT, True),
        (PARENT + "-more", False),
        ("01" + PARENT[2:] + "-more", True),
        ("ff" + PARENT[2:], False),
        ("00-" + "0" * 32 + PARENT[35:], False),
        (PARENT.upper(), False),
        ("", False),
        ("x" * 1000, False),
    ],
)
def test_a_malformed_trace_is_ignored(text: str, good: bool) -> None:
    assert (parse_traceparent(text) is not None) is good


def test_lines_for_people_hold_the_same_facts() -> None:
    record = logging.LogRecord("servax.x", logging.INFO, "", 0, "hello %s", ("you",), None)
    record.bucket = "8x64"
    text = TextFormatter().format(record)
    assert "hello you bucket=8x64" in text
    assert json.loads(JsonFormatter().format(record))["bucket"] == "8x64"


@pytest.mark.parametrize(
    ("header", "sent", "keys", "client"),
    [
        (None, {"x-forwarded-for": "9.9.9.9"}, (), "127.0.0.1"),
        ("X-Forwarded-For", {"x-forwarded-for": "9.9.9.9"}, (), "9.9.9.9"),
        ("X-Forwarded-For", {}, (), "127.0.0.1"),
        (None, {"authorization": "Bearer k1"}, ("k1",), "key:"),
    ],
)
def test_a_client_is_its_key_its_header_or_its_address(
    site: Any, header: str | None, sent: dict[str, str], keys: tuple[str, ...], client: str
) -> None:
    from servax.server.config import HttpConfig

    site.app = create_app(site.engine, config=HttpConfig(client_header=header), api_keys=keys)
    seen: list[str] = []
    before = site.double.run
    site.double.run = lambda row: (seen.append(client_of_call()), before(row))[1]
    assert infer(site, **sent).status_code == 200
    assert seen[0].startswith(client)
    assert "k1" not in seen[0]
    assert CALL.get() is None


def test_what_is_refused_for_want_of_room_is_counted_by_its_cause(site: Any) -> None:
    site.double.error = Overloaded("full", 2.5, "client")
    response = infer(site)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert site.metrics.value("servax_shed_total", model="double", cause="client") == 1
