"""Claim: at 32 clients continuous batching gives at least 8 times the tokens a second of one request at a
time, and at least twice those of static batches, and its callers wait less for their first token.

The same requests, in the same order, through one `GenerationServer` with one set of programs; the modes
differ only in when a waiting request may join:

* ``sequential``: one client, the next request when the last one is complete;
* ``static``: a batch of 32 is filled and runs until its longest text is complete, all rows of it;
* ``windowed``: the same, but a batch begins with whoever came within 50 ms;
* ``gated``: as static, but texts that are complete leave, and the engine goes on with a smaller program;
* ``continuous``: at any step, as the server works.

Clients are a closed loop, each sends its next request when its last one is complete. Prompts and texts have
the lengths of Azure's conversation trace, scaled to a small model. The clock of a mode stops when a client
finds no request left, so that all were at work until then. Latencies count from when a client had its request
ready. ``--streams`` also measures prompts and texts of 64 tokens, all of them until the last one is complete.

    python -m servax.experiments.continuous_batching --json continuous.json --figures figures
    python -m servax.experiments.continuous_batching --streams 1,8,16,32 --requests 0 --json streams.json
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..models import GenerativeModel, load, tiny
from .errors import ExperimentError
from .extra import require
from .generation_load import Batches, Bench, Seen, requests, same, summary
from .reporting import machine, print_table, write_json

CLIENTS = 32
_WINDOW_S = 0.05
_MODES = ("sequential", "static", "windowed", "gated", "continuous")


def compare(
    bench: Bench, vocab: int, count: int, scales: tuple[float, float], *, seed: int
) -> tuple[dict[str, Any], dict[str, Seen]]:
    """Run the modes one after another; their summaries, and what was seen."""
    found: dict[str, Any] = {}
    seen: dict[str, Seen] = {}
    for mode in _MODES:
        alone = mode == "sequential"
        todo = itertools.islice(requests(*scales, vocab, seed=seed), max(count // 16, 2) if alone else count)
        batches = {
            "static": Batches(CLIENTS),
            "windowed": Batches(CLIENTS, _WINDOW_S),
            "gated": Batches(CLIENTS, held=False),
        }.get(mode)
        seen[mode] = bench.closed_loop(todo, 1 if alone else CLIENTS, whole=False, batches=batches)
        found[mode] = summary(seen[mode], CLIENTS)
    tps = {f"{mode}_tps": found[mode]["tps"] for mode in _MODES}
    return {
        **tps,
        **{f"over_{mode}": tps["continuous_tps"] / tps[f"{mode}_tps"] for mode in _MODES[:-1]},
        "modes": found,
    }, seen


def streams(
    bench: Bench, vocab: int, counts: Iterable[int], waves: int, *, seed: int
) -> list[dict[str, Any]]:
    """64 tokens in and 64 out, `waves` requests a stream; the speed of the whole, first wave included."""
    out = []
    for count in counts:
        todo = itertools.islice(same(64, 64, vocab, seed=seed), count * waves)
        out.append({"streams": count, **summary(bench.closed_loop(todo, count), CLIENTS)})
    return out


def draw(path: Path, found: Mapping[str, Any], seen: Mapping[str, Seen]) -> None:
    """Tokens a second, both latencies, and texts at work over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure = Figure(figsize=(10.5, 6.4), layout="constrained")  # not pyplot, which holds global state
    FigureCanvasAgg(figure)
    (speed, first), (gaps, slots) = figure.subplots(2, 2)
    bars = speed.bar(_MODES, [found[f"{mode}_tps"] for mode in _MODES], color=_COLOURS)
    speed.bar_label(bars, fmt="%.0f")
    speed.set_ylim(top=1.1 * max(bar.get_height() for bar in bars))  # room for the labels
    speed.set_ylabel("tokens/s")
    for axes, key in ((first, "first"), (gaps, "gaps")):
        for mode, colour in zip(_MODES, _COLOURS, strict=True):
            waits = np.sort(getattr(seen[mode], key)()) * 1e3
            axes.plot(waits, np.arange(1, len(waits) + 1) / len(waits), color=colour, label=mode)
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_ylabel("share of them")
    first.set_xlabel("time to the first token, ms")
    first.legend(fontsize=8)
    gaps.set_xlabel("time between two tokens, ms")
    for mode, colour in zip(_MODES[1:], _COLOURS[1:], strict=True):
        times = np.linspace(0.0, seen[mode].seconds, 400)
        slots.plot(times, seen[mode].working(times), color=colour, linewidth=0.9)
    slots.set_xlabel("seconds")
    slots.set_ylabel(f"texts that get tokens, of {CLIENTS}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


_COLOURS = ("#999999", "#d55e00", "#e69f00", "#009e73", "#0072b2")
_COLUMNS = {
    "tps": "tokens/s|,.1f",
    "ttft_p50_ms": "first token p50 ms|,.0f",
    "ttft_p99_ms": "p99|,.0f",
    "itl_p50_ms": "between tokens p50 ms|,.1f",
    "itl_p99_ms": "p99|,.1f",
    "rows": "tokens a step|.1f",
}


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write figures into this folder.")] = None,
    count: Annotated[int, typer.Option("--requests", help="Of each mode; 0 leaves them out.")] = 128,
    prompt_scale: Annotated[float, typer.Option(min=0.001, help="Of the trace's prompts.")] = 1 / 64,
    output_scale: Annotated[float, typer.Option(min=0.001, help="Of the trace's texts.")] = 1 / 2,
    stream_counts: Annotated[str, typer.Option("--streams", help="Also 64 in, 64 out, so many a time.")] = "",
    waves: Annotated[int, typer.Option(min=1, help="Requests a stream, with --streams.")] = 3,
    quick: Annotated[bool, typer.Option(help="A tiny random model, for seconds.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order and the prompts.")] = 0,
) -> None:
    """Compare ways of batching texts that are generated."""
    if figures is not None:
        require("matplotlib")
    model = tiny() if quick else load("smollm2")
    if not isinstance(model, GenerativeModel):
        raise ExperimentError(f"A model that generates text is needed; smollm2 is {type(model).__name__}.")
    small = {
        "page_size": 16,
        "pages": 32 * CLIENTS,
        "decode_rows": (1, CLIENTS),
        "prefill_buckets": ((8, 16),),
        "mixed_buckets": ((CLIENTS, 16),),
    }
    bench = Bench(model, max_rows=CLIENTS, **(small if quick else {}))
    found: dict[str, Any] = {"machine": machine(), "model": model.name}
    with bench.server:
        if stream_counts:
            counts = [int(one) for one in stream_counts.split(",")]
            found["streams"] = streams(bench, model.vocab_size, counts, waves, seed=seed)
            print_table("64 in, 64 out", {"streams": "streams|d", **_COLUMNS}, found["streams"])
        if count:
            scales = (prompt_scale, output_scale)
            compared, seen = compare(bench, model.vocab_size, count, scales, seed=seed)
            found |= {"scales": scales, **compared}
            rows = [{"mode": mode, **found["modes"][mode]} for mode in _MODES]
            over = (f"{found[f'over_{mode}']:.1f} x {mode}" for mode in _MODES[:-1])
            note = f"continuous: {', '.join(over)}"
            print_table(f"{CLIENTS} clients", {"mode": "mode", **_COLUMNS}, rows, note)
            if figures is not None:
                draw(figures / "generation.png", found, seen)
    if json_file is not None:
        write_json(json_file, found)


if __name__ == "__main__":
    typer.run(main)
