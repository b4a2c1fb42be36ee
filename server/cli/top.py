"""`servax top`: the live grid of a running server, on a terminal."""

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from .exits import UsageError, guarded

if TYPE_CHECKING:
    from ..client import Client

_METRICS = ("use", "waste", "time")


def top(
    url: Annotated[
        str, typer.Argument(envvar="SERVAX_URL", help="The server: a URL, host:port, or a port here.")
    ] = "http://localhost:8000",
    by: Annotated[
        str, typer.Option(help="What shades a bucket: use (rows), waste (padding), time (device seconds).")
    ] = "use",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers of one look as JSON.")] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar="SERVAX_API_KEY", help="Where a proxy asks for one.")
    ] = None,
) -> None:
    """Watch the grid, the queue, latency and throughput of a running server; Ctrl-C leaves."""
    guarded(lambda: _top(server_url(url), by, interval, once, as_json, api_key))


def server_url(text: str) -> str:
    """A URL from what people type: `8000`, `:8000`, `host:8000`, `http://host:8000`."""
    if text.removeprefix(":").isdecimal():
        return f"http://localhost:{text.removeprefix(':')}"
    return text if "://" in text else f"http://{text}"


def _top(url: str, by: str, interval_s: float, once: bool, as_json: bool, api_key: str | None) -> None:
    if by not in _METRICS:
        raise UsageError(f"--by is one of {', '.join(_METRICS)}; got {by!r}")
    from ..client import Client, Retry

    console = Console()
    with Client(url, api_key=api_key, timeout_s=5.0, retry=Retry(attempts=1)) as client:
        grid = client.grid()
        if as_json:
            typer.echo(json.dumps(grid, indent=2))
        elif once or not console.is_terminal:
            from .top_view import render

            console.print(render(grid, url, width=console.width, by=by))
        else:
            _watch(console, client, grid, by, interval_s)


def _watch(console: Console, client: "Client", grid: Mapping[str, Any], by: str, interval_s: float) -> None:
    """Look again and again until an interrupt; a server that is away for a while is waited for."""
    from ..errors import ServerError
    from .top_view import render

    error = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(render(grid, client.url, width=console.width, by=by, error=error), refresh=True)
                time.sleep(interval_s)
                try:
                    grid, error = client.grid(), ""
                except ServerError as failure:
                    error = str(failure)
        except KeyboardInterrupt:
            return
