"""The comparison with other servers, without any of them: a fake server, and fake turns."""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from servax.experiments.errors import ExperimentError
from servax.experiments.peers import decode, embed, summary
from servax.experiments.peers.__main__ import chosen
from servax.experiments.peers.environments import MENDS, environment
from servax.experiments.peers.load import Connection, Outcome, closed_loop, open_loop
from servax.experiments.peers.processes import Process, ask_once, free_ports, running
from servax.experiments.peers.shapes import SHAPES, completion
from servax.experiments.peers.table import OURS, PEERS, WORKLOADS, Peer

SERVERS = Path(summary.__file__).parent / "servers"


class Handler(BaseHTTPRequestHandler):
    """Answers every shape with the length of its text; `/refuse` with 429, `/chunked` in chunks."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/completions":
            return self._stream(body)
        status, answer = (429, {}) if self.path == "/refuse" else (200, self._answer(body))
        content = json.dumps(answer).encode()
        self.send_response(status)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (content[:5], content[5:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return None
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = body.get("text") == "hang up"  # without having said so
        return None

    def _answer(self, body: dict) -> object:
        if "inputs" in body:
            return {"outputs": [{"data": [len(body["inputs"][0]["data"][0])]}]}
        if "input" in body:
            return {"data": [{"embedding": [len(body["input"][0])]}]}
        text = body["text"]
        return [[len(text[0])]] if isinstance(text, list) else {"y": [len(text)]}

    def _stream(self, body: dict) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_asked_and_read(name: str, port: int) -> None:
    shape = SHAPES[name]
    status, answer = ask_once(port, shape.request("héllo"), 5.0)
    assert status == 200
    assert shape.vector(json.loads(answer)) == [5]


def test_loads_time_every_request(port: int) -> None:
    requests = [SHAPES["embed"].request("x" * i) for i in range(40)]
    closed = asyncio.run(closed_loop(port, requests, 4))
    by_clock = asyncio.run(open_loop(port, requests, np.linspace(0, 0.1, 40)))
    for outcome in (closed, by_clock):
        assert outcome.answered == 40
        assert outcome.statuses == {200: 40}
        assert 0 < outcome.percentile_ms(50) <= outcome.percentile_ms(99) < 5000
    assert by_clock.wall_s >= 0.1


def test_refused_and_broken_requests_have_no_latency(port: int) -> None:
    refused = SHAPES["embed"].request("x").replace(b"/embed", b"/refuse")
    good = SHAPES["embed"].request("x")
    outcome = asyncio.run(closed_loop(port, [good, refused], 1))
    assert outcome.statuses == {200: 1, 429: 1}
    assert outcome.answered == 1
    assert outcome.percentile_ms(99) == np.inf
    dead = asyncio.run(closed_loop(free_ports(1)[0], [good], 1))
    assert dead.statuses == {0: 1}


def test_chunked_answers_are_joined(port: int) -> None:
    request = SHAPES["embed"].request("abc").replace(b"/embed", b"/chunked")

    async def twice() -> list[tuple[int, bytes]]:
        connection = Connection(port)
        found = [await connection.ask(request) for _ in range(2)]
        connection.close()
        return found

    assert [(status, json.loads(body)) for status, body in asyncio.run(twice())] == [(200, {"y": [3]})] * 2


def test_a_connection_that_the_server_closed_is_opened_again(port: int) -> None:
    async def twice() -> list[int]:
        connection = Connection(port)
        found = [(await connection.ask(SHAPES["embed"].request(text)))[0] for text in ("hang up", "again")]
        connection.close()
        return found

    assert asyncio.run(twice()) == [200, 200]


def test_streams_are_read_to_their_end(port: int) -> None:
    found = asyncio.run(decode.stream(port, completion("m", "hi", 7), "fake"))
    assert found.tokens == len(found.pieces_s) == 7
    assert found.pieces_s == sorted(found.pieces_s)


def fake(rate: float, limit: float) -> Outcome:
    return Outcome(np.full(100, 0.1 if rate <= limit else 0.4), 1.0, {200: 100})


@pytest.mark.parametrize("limit", [0.3, 37.0, 99.0])
def test_the_highest_rate_is_found_by_halving(limit: float) -> None:
    found = embed.highest_rate(lambda rate: fake(rate, limit), 100.0, 250.0, 8)
    assert found is not None or limit < 100 / 2**8
    rate = found[0] if found else 0.0
    assert limit - 100 / 2**8 <= rate <= limit
    assert embed.highest_rate(lambda rate: fake(rate, 0.0), 100.0, 250.0, 5) is None


@pytest.mark.parametrize("kind", ["poisson", "azure_llm_2023_conv"])
def test_arrivals_rise_at_the_rate(kind: str) -> None:
    due = embed.arrivals(kind, 500, 50.0, 0)
    assert len(due) == 500
    assert (np.diff(due) >= 0).all()
    assert 500 / due[-1] == pytest.approx(50, rel=0.2)


def turn(system: str, against: str, count: int, rate: float, clients: int = 16) -> dict:
    return {"system": system, "against": against, "workload": "embed", "mode": "closed", "clients": clients,
            "turn": count, "rate": rate, "p50_ms": 1e3 / rate, "p99_ms": 2e3 / rate, "failed": 0}  # fmt: skip


def test_summary_has_medians_and_ratios_of_adjacent_turns(tmp_path: Path, capsys) -> None:
    turns = [{"system": "servax", "workload": "embed", "mode": "start", "start_s": 2.0, "cosine_min": 1.0}]
    for count, (ours, theirs) in enumerate([(100, 50), (10, 5), (90, 30)]):  # a slow moment slows both
        turns += [turn("servax", "a", count, ours), turn("a", "a", count, theirs)]
    turns += [turn("servax", "b", 0, 80), turn("b", "b", 0, 160)]
    failures = [{"system": "c", "workload": "embed", "mode": "start", "error": "it must start; it did not"}]
    rows = {row["system"]: row for row in summary.summarise([*turns, *failures])}
    assert set(rows) == {"servax", "a", "b"}
    assert rows["a"]["rate"] == 30
    assert rows["a"]["servax_over"] == 2
    assert rows["b"]["servax_over"] == 0.5
    assert rows["servax"]["rate"] == 85
    for row in rows.values():
        assert {"system", "workload", "clients", "rate", "p50_ms", "p99_ms"} <= row.keys()
    summary.print_summary("embed", list(rows.values()), failures)
    assert "c did not run: it must start; it did not" in capsys.readouterr().out
    summary.draw(tmp_path / "figure.png", "embed", list(rows.values()))
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_peers_are_chosen_by_name() -> None:
    for workload in WORKLOADS:
        names = [peer.name for peer in PEERS[workload]]
        assert names[0] == OURS
        assert len(set(names)) == len(names)
        assert [peer.name for peer in chosen(workload, "")] == names
    assert [peer.name for peer in chosen("embed", "mosec")] == [OURS, "mosec"]
    with pytest.raises(ExperimentError, match="one of servax, plain"):
        chosen("embed", "nobody")
    with pytest.raises(ExperimentError, match="embed, offline, decode"):
        chosen("train", "")


@pytest.mark.parametrize("workload", ["embed", "decode"])
def test_a_variant_of_servax_is_a_system_beside_itself(workload: str) -> None:
    ours, half, small = chosen(workload, OURS, "bfloat16, int8")
    assert [one.name for one in (ours, half, small)] == ["servax", "servax bfloat16", "servax int8"]
    assert half.start == (*ours.start, "--dtype", "bfloat16")
    assert small.start == (*ours.start, "--quantize", "int8")
    assert half.shape == small.shape == ours.shape
    assert not half.environment
    with pytest.raises(ExperimentError, match=r"embed are of bfloat16, int8, .* got 'guesses'"):
        chosen("embed", "", "bfloat16,guesses")
    with pytest.raises(ExperimentError, match=r"offline are of nothing, .* got 'int8'"):
        chosen("offline", "", "int8")
    assert chosen("decode", OURS, "int8+guesses")[1].start[-4:] == (
        *("--quantize", "int8"),
        *("--generation-draft-tokens", "7"),
    )


def test_the_table_names_what_exists() -> None:
    for peer in (peer for peers in PEERS.values() for peer in peers):
        for script in (part for part in peer.start if part.startswith("{servers}/")):
            assert (SERVERS / script.removeprefix("{servers}/")).is_file()
        assert not peer.mend or peer.mend in MENDS
        assert bool(peer.install) == bool(peer.environment)
        shape, _, model = peer.shape.partition(":")
        assert not shape or shape in SHAPES or (shape == "completions" and model)
        assert "0.0.0.0" not in peer.start


def test_a_process_is_awaited_paused_and_stopped(tmp_path: Path) -> None:
    code = (
        "import sys, http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_POST(self):\n"
        "        self.send_response(200); self.send_header('content-length', '2'); self.end_headers()\n"
        "        self.wfile.write(b'{}')\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    port, request = free_ports(1)[0], SHAPES["embed"].request("x")
    with running(Process([sys.executable, "-c", code, str(port)], {}, tmp_path / "log")) as process:
        assert process.wait_http(port, request, 30.0) < 30
        with process.paused():
            with pytest.raises(TimeoutError):
                ask_once(port, request, 0.3)
        assert ask_once(port, request, 10.0) == (200, "{}")
    assert process.popen.returncode is not None


def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    code = "import sys; sys.exit('no such model')"
    with running(Process([sys.executable, "-c", code], {}, tmp_path / "log")) as process:
        with pytest.raises(ExperimentError, match="no such model"):
            process.wait_http(free_ports(1)[0], SHAPES["embed"].request("x"), 30.0)


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(
        "servax.experiments.peers.environments._run",
        lambda command, peer: (calls.append(command), (tmp_path / "environments" / "e").mkdir(exist_ok=True)),
    )
    peer = Peer("p", ("x",), environment="e", install=(("one",), ("two", "three")))
    for _ in range(2):
        assert environment(peer, tmp_path) == tmp_path / "environments" / "e" / "bin"
    assert [command[-1] for command in calls] == [str(tmp_path / "environments" / "e"), "one", "three"]
    environment(Peer("p", ("x",), environment="e", install=(("other",),)), tmp_path)
    assert len(calls) == 5


def test_agreement_of_texts_is_the_shared_beginning() -> None:
    assert decode.common_share("abcd", "abcd") == 1
    assert decode.common_share("abcd", "abxd") == 0.5
    assert decode.common_share("abcd", "ab", 0.5) == 1
    assert decode.common_share("abcd", "") == 0
