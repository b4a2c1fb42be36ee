"""`servax top`: what it draws of a snapshot, and one look at a real server."""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from servax.server.cli import app
from servax.server.cli.top import server_url
from servax.server.cli.top_view import duration, heat, recent_mean, render, spark
from servax.server.fake import FakeEngine, doubler
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from typer.testing import CliRunner


def bucket(rows: int, length: int, /, **more: Any) -> dict[str, Any]:
    known = {"bucket": f"{rows}x{length}", "sizes": [rows, length], "state": "warm"}
    return {**known, **more}


def snapshot(**more: Any) -> dict[str, Any]:
    ran = {"runs": 10, "rows": 20, "real": 300, "computed": 400, "device_s": 0.5}
    seconds: list[float | None] = [None] * 118 + [5.0, 7.0]
    return {
        "version": "1.2",
        "ready": True,
        "progress": "4 of 4 programs are done (ready)",
        "uptime_s": 3700.0,
        "status": {"state": "ready"},
        "series": {
            "requests": [0] * 118 + [4, 8],
            "errors": [0] * 120,
            "p99_ms": seconds,
            "busy": [0.5] * 120,
        },
        "models": [
            {
                "name": "tiny",
                "version": "3",
                "waiting_rows": 7,
                "running_rows": 2,
                "axes": ["batch", "length"],
                "buckets": [
                    bucket(1, 8, **ran),
                    bucket(1, 16, state="cold"),
                    bucket(4, 8, **{**ran, "rows": 80, "device_s": 1.5}),
                    bucket(4, 16, state="failed"),
                ],
            },
            {"name": "plain", "version": "1"},
            {"name": "writer", "free_pages": 1234, "programs": [{"program": "decode 8", **ran}]},
        ],
        "events": [
            {
                "model": "tiny",
                "bucket": "1x8",
                "source": "store",
                "seconds": 0.01,
                "cause": "warm-up",
                "error": None,
            },
            {
                "model": "tiny",
                "bucket": "4x16",
                "source": "",
                "seconds": 0.0,
                "cause": "",
                "error": "no kernel",
            },
        ],
        **more,
    }


def drawn(grid: dict[str, Any], width: int = 110, **options: Any) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(grid, "http://here", width=width, **options))
    return captured.get()


def test_the_view_shows_state_series_grid_and_events() -> None:
    text = drawn(snapshot())
    assert "servax 1.2 at http://here  ready  up 1 h 1 min" in text
    assert "7 rows waiting, 2 running" in text
    line = next(line for line in text.splitlines() if "4x8" in line)
    assert line.split()[1:-1] == ["4x8", "10", "80", "8.0", "25%", "150.00", "75%"]
    assert "cold" in text
    assert "failed" in text
    assert "4x16 failed: no kernel" in text
    assert "no grid to show" in text
    assert "1,234 pages free" in text
    assert "decode 8" in text
    assert "p99 ms" in text


@pytest.mark.parametrize(
    ("by", "legend"), [("use", "rows"), ("waste", "share of padding"), ("time", "device seconds")]
)
def test_what_shades_is_said(by: str, legend: str) -> None:
    assert f"shade: {legend}" in drawn(snapshot(), by=by)


def test_a_server_that_is_not_ready_says_how_far_it_is_and_one_that_is_lost_why() -> None:
    text = drawn(
        snapshot(ready=False, status={"state": "warming"}, progress="1 of 4"), error="nobody answers"
    )
    assert "warming" in text
    assert "1 of 4" in text
    assert "nobody answers" in text


@pytest.mark.parametrize("state", ["warm", "cold", "failed"])
def test_many_sizes_are_named_in_full_on_80_columns(state: str) -> None:
    lengths = [16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 65_536]
    buckets = [bucket(rows, length, state=state) for rows in (1, 2) for length in lengths]
    model = {"name": "tiny", "axes": ["batch", "length"], "buckets": buckets}
    text = drawn(snapshot(models=[model], events=[]), width=80)
    words = text.split()
    assert "…" not in text
    assert [word for word in words if word.isdigit() and int(word) in lengths] == list(map(str, lengths))
    assert words.count("batch") >= 2
    assert words.count(state) == (0 if state == "warm" else len(buckets))


def test_a_snapshot_without_anything_is_drawn_too() -> None:
    assert "unknown" in drawn({})


def test_bars_and_means() -> None:
    assert spark([0.0, 7.0, None]) == "▁█ "
    assert spark([0.0, None]) == "▁ "
    assert spark([]) == ""
    assert recent_mean([100.0] + [None] * 8 + [2.0, 4.0]) == 3.0
    assert recent_mean([None]) is None


def test_heat_is_none_where_nothing_ran() -> None:
    one = bucket(1, 8, runs=2, rows=3, real=30, computed=40, device_s=0.5)
    assert (heat(one, "use"), heat(one, "waste"), heat(one, "time")) == (3.0, 0.25, 0.5)
    assert heat(bucket(1, 8), "use") is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(3.2, "3 s"), (420, "7 min"), (12000, "3 h 20 min"), (200000, "2 d 7 h")]
)
def test_durations_are_said_as_people_do(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("8000", "http://localhost:8000"),
        (":8000", "http://localhost:8000"),
        ("box:80", "http://box:80"),
        ("https://box", "https://box"),
    ],
)
def test_urls_may_be_short(typed: str, url: str) -> None:
    assert server_url(typed) == url


def test_one_look_at_a_server_and_what_goes_wrong() -> None:
    run = CliRunner()
    with running(create_app(FakeEngine(doubler()))) as url:
        shown = run.invoke(app, ["top", url, "--once"])
        assert shown.exit_code == 0, shown.output
        assert f"at {url}  ready" in shown.output
        # Without a terminal it is one look too.
        assert run.invoke(app, ["top"], env={"SERVAX_URL": url}).exit_code == 0
        assert json.loads(run.invoke(app, ["top", url, "--json"]).output)["ready"]
        wrong = run.invoke(app, ["top", url, "--by", "colour"])
        assert (wrong.exit_code, "use, waste, time" in wrong.output) == (2, True)
    gone = run.invoke(app, ["top", url, "--once"])
    assert gone.exit_code == 4
    assert "must be reachable" in gone.output
    assert run.invoke(app, ["top", "ftp://box"]).exit_code == 3
