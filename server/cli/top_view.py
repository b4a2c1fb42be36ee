"""What `servax top` draws: the numbers behind the live page, on a terminal. Pure: a snapshot in."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_SHADES = (" ", "░", "▒", "▓", "█")
_HEAT = ("grey37", "blue", "cyan", "green", "yellow", "red")
_SECONDS = 10
Series = Sequence[float | None]
Bucket = Mapping[str, Any]


def render(grid: Mapping[str, Any], url: str, *, width: int = 100, by: str = "use", error: str = "") -> Group:
    """The whole view.

    Args:
        grid: body of `/debug/grid.json`.
        url: of the server.
        width: columns of the terminal.
        by: what colours the buckets: `use` (rows), `waste` (share of padding) or `time` (device seconds).
        error: why the numbers are old, if they are.
    """
    parts: list[RenderableType] = [_head(grid, url, error), _charts(grid.get("series", {}), width)]
    parts += [_model(one, by, width) for one in grid.get("models", ())]
    events = list(grid.get("events", ()))[-3:]
    if events:
        parts.append(Text("\n".join(map(_event, events)), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _head(grid: Mapping[str, Any], url: str, error: str) -> Text:
    state = str(grid.get("status", {}).get("state", "unknown"))
    good = grid.get("ready", False)
    text = Text.assemble(
        ("servax ", "bold"),
        f"{grid.get('version', '')} at {url}  ",
        (state, "bold green" if good else "bold yellow"),
        f"  up {duration(grid.get('uptime_s', 0.0))}",
    )
    if not good:
        text.append(f"  {grid.get('progress', '')}")
    if error:
        text.append(f"\n{error}", style="red")
    return text


def _charts(series: Mapping[str, Series], width: int) -> Table:
    """One line for each series: the last seconds as bars, what they are now, and their most."""
    room = max(10, min(120, width - 40))
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "right"):
        table.add_column(justify=justify, no_wrap=True)
    lines: tuple[tuple[str, str, str], ...] = (
        ("requests/s", "requests", "{:.1f}"),
        ("rows/s", "rows", "{:.1f}"),
        ("errors/s", "errors", "{:.1f}"),
        ("rows waiting", "waiting", "{:.0f}"),
        ("device busy", "busy", "{:.0%}"),
        ("p50 ms", "p50_ms", "{:.1f}"),
        ("p99 ms", "p99_ms", "{:.1f}"),
    )
    for label, name, shown in lines:
        values = list(series.get(name, ()))
        known = [value for value in values if value is not None]
        mean = recent_mean(values)
        most = f"most {shown.format(max(known))}" if known else ""
        now = "-" if mean is None else shown.format(mean)
        style = "red" if name == "errors" and mean else "cyan"
        table.add_row(label, Text(now, "bold"), Text(spark(values[-room:]), style), Text(most, "dim"))
    return table


def recent_mean(values: Series) -> float | None:
    """Mean of the last ten seconds; None if nothing was answered in them."""
    known = [value for value in values[-_SECONDS:] if value is not None]
    return sum(known) / len(known) if known else None


def spark(values: Series) -> str:
    """Values as bars, the highest one full; a blank where there is none."""
    most = max([value for value in values if value is not None], default=0.0)
    if most <= 0:
        return "".join(" " if value is None else _BARS[0] for value in values)
    steps = len(_BARS) - 1
    return "".join(" " if value is None else _BARS[round(steps * max(0.0, value) / most)] for value in values)


def _model(model: Mapping[str, Any], by: str, width: int) -> RenderableType:
    title = f"{model['name']} ({model.get('version', '')})"
    load = f"{model.get('waiting_rows', 0)} rows waiting, {model.get('running_rows', 0)} running"
    if "buckets" in model:
        return Panel(
            Group(*_heat_maps(model["axes"], model["buckets"], by, width - 4), *_busiest(model["buckets"])),
            title=f"{title}: {load}",
            title_align="left",
            subtitle=f"shade: {_LEGENDS[by]}",
            subtitle_align="left",
        )
    if "programs" in model:
        pages = f"{load}, {model.get('free_pages', 0):,} pages free"
        ran: Sequence[RenderableType] = _busiest(model["programs"])
        return Panel(
            Group(*(ran or [Text("no program ran yet", "dim")])),
            title=f"{title}: {pages}",
            title_align="left",
        )
    return Panel(Text("no grid to show", "dim"), title=title, title_align="left")


_LEGENDS = {"use": "rows", "waste": "share of padding", "time": "device seconds"}


def heat(bucket: Bucket, by: str) -> float | None:
    """What colours a bucket; None if it did not run."""
    if not bucket.get("runs"):
        return None
    if by == "waste":
        return 1.0 - float(bucket["real"]) / float(bucket["computed"])
    return float(bucket["device_s"] if by == "time" else bucket["rows"])


def _heat_maps(axes: Sequence[str], buckets: Sequence[Bucket], by: str, width: int) -> list[Table]:
    """Batch sizes down, the other axes across, in as many tables as it takes to name them in full."""
    across = sorted({tuple(one["sizes"][1:]) for one in buckets})
    down = sorted({one["sizes"][0] for one in buckets})
    found = {(one["sizes"][0], tuple(one["sizes"][1:])): one for one in buckets}
    values = {key: heat(one, by) for key, one in found.items()}
    most = 1.0 if by == "waste" else max([value for value in values.values() if value], default=1.0)
    corner = f"{axes[0]} \\ {' x '.join(axes[1:])}" if axes[1:] else axes[0]
    cell = len("failed" if any(one["state"] == "failed" for one in buckets) else "cold")
    widest = max([cell, *(len(_named(sizes)) for sizes in across)]) + 2
    room = max(1, (width - len(corner) - 2) // widest)
    tables = []
    for begin in range(0, len(across), room):
        table = Table(box=None, padding=(0, 1))
        table.add_column(corner, style="dim", no_wrap=True)
        for sizes in across[begin : begin + room]:
            table.add_column(_named(sizes), justify="center", no_wrap=True)
        for rows in down:
            keys = [(rows, sizes) for sizes in across[begin : begin + room]]
            if any(key in found for key in keys):
                table.add_row(str(rows), *[_cell(found.get(key), values.get(key), most) for key in keys])
        tables.append(table)
    return tables


def _named(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "all"


def _cell(bucket: Bucket | None, value: float | None, most: float) -> Text:
    if bucket is None:
        return Text("")
    if bucket["state"] != "warm":
        return Text("failed", "red") if bucket["state"] == "failed" else Text("cold", "dim blue")
    if value is None:
        return Text("·", "dim")
    # By the square root: a bucket with a hundredth of the rows is still to be told from none.
    share = math.sqrt(min(1.0, value / most)) if most > 0 else 0.0
    shade = _SHADES[max(1, math.ceil(share * (len(_SHADES) - 1)))]
    return Text(shade * 4, _HEAT[round(share * (len(_HEAT) - 1))])


def _busiest(buckets: Sequence[Bucket], most: int = 8) -> list[Table]:
    """The buckets, or step programs, that took most of the device's time; nothing before the first ran."""
    ran = sorted((one for one in buckets if one.get("runs")), key=lambda one: -one["device_s"])
    if not ran:
        return []
    total_s = sum(one["device_s"] for one in ran) or 1.0
    table = Table(box=None, padding=(0, 2))
    table.add_column("program" if "program" in ran[0] else "bucket")
    for heading in ("runs", "rows", "rows/run", "padding", "ms/run", "time"):
        table.add_column(heading, justify="right")
    for one in ran[:most]:
        table.add_row(
            one.get("program") or one["bucket"],
            f"{one['runs']:,}",
            f"{one['rows']:,}",
            f"{one['rows'] / one['runs']:.1f}",
            f"{1 - one['real'] / one['computed']:.0%}",
            f"{one['device_s'] / one['runs'] * 1e3:.2f}",
            f"{one['device_s'] / total_s:.0%}",
        )
    if len(ran) > most:
        table.caption = f"and {len(ran) - most} more"
    return [table]


def _event(event: Mapping[str, Any]) -> str:
    what = f"{event.get('model', '')} {event.get('bucket', '')}".strip() or event.get("phase", "")
    if event.get("error"):
        return f"{what} failed: {event['error']}"
    return f"{what} {event.get('source', '')} in {event.get('seconds', 0.0):.2f} s: {event.get('cause', '')}"


def duration(seconds: float) -> str:
    """Seconds as people say them: `42 s`, `7 min`, `3 h 20 min`, `2 d 5 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
