"""`servax fit`: which sizes to compile for the traffic in a trace, and what one more would buy."""

import json
import math
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ..errors import ConfigError, ServerError
from .exits import EXIT_USAGE, exit_code, guarded
from .fit_ladder import Fitted, Sizes, fitted
from .fit_trace import read_sizes

DEFAULT_PROGRAMS = 8
_MOST_PROGRAMS = 512


def fit(
    trace: Annotated[
        Path, typer.Argument(help="Sizes of real requests: .csv or .jsonl, plain or .gz.", show_default=False)
    ],
    axis: Annotated[
        str | None, typer.Option(help="Column with the sizes. \\[default: length, or the only column]")
    ] = None,
    programs: Annotated[
        int | None, typer.Option(min=1, max=512, help="How many sizes to compile. \\[default: 8]")
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(min=0, help="Seconds to spend on compiling, instead of --programs.")
    ] = None,
    compile_seconds: Annotated[
        float, typer.Option(min=1e-6, help="Seconds to compile one program; `servax warmup` shows yours.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Longest admissible size. \\[default: the longest in the trace]")
    ] = None,
    align: Annotated[int, typer.Option(min=1, help="Sizes below the limit are multiples of it.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the ladder over the histogram of sizes into this file.")
    ] = None,
) -> None:
    """Find the sizes that waste least on a trace, and compare them with other schemes."""

    def work() -> Fitted:
        column, sizes = read_sizes(trace, axis)
        count = _programs(programs, budget_seconds, compile_seconds)
        done = fitted(column, sizes, count, limit=limit, align=align, compile_seconds=compile_seconds)
        if plot is not None:
            _plot(done, sizes, plot)
        return done

    found = guarded(work, code_of=_code)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        _show(found)


def _code(error: BaseException) -> int:
    # A trace is an argument like any other.
    return EXIT_USAGE if isinstance(error, ServerError) else exit_code(error)


def _programs(programs: int | None, budget_seconds: float | None, compile_seconds: float) -> int:
    if budget_seconds is None:
        return DEFAULT_PROGRAMS if programs is None else programs
    if programs is not None:
        raise ConfigError("Only one of --programs and --budget-seconds can be met; got both. Leave one out.")
    if not (math.isfinite(budget_seconds) and math.isfinite(compile_seconds)):
        raise ConfigError(f"Seconds must be finite; got {budget_seconds} and {compile_seconds}.")
    affordable = int(budget_seconds / compile_seconds * (1 + 1e-9))
    if affordable < 1:
        raise ConfigError(
            f"The limit itself needs one program of {compile_seconds:g} s; got a budget of "
            f"{budget_seconds:g} s. Raise --budget-seconds."
        )
    # Beyond this many the fit takes minutes and each program saves next to nothing.
    return min(affordable, _MOST_PROGRAMS)


def _show(found: Fitted) -> None:
    console = Console()
    title = f"{found.requests:,} requests, {found.axis} up to {found.limit:,}"
    console.print(title, highlight=False)
    rungs = Table(title="ladder")
    for heading in ("size", "share", "mean padding", "worst padding", "at size"):
        rungs.add_column(heading, justify="right")
    for rung in found.report.rungs:
        worst = f"{rung.worst_padding:.1%}", str(rung.worst_size)
        rungs.add_row(str(rung.rung), f"{rung.share:.1%}", f"{rung.mean_padding:.1%}", *worst)
    console.print(rungs)
    schemes = Table(title="schemes", caption="held out: fitted on the first half, tested on the second")
    for heading in ("scheme", "programs", "waste", "held out", "compile s"):
        schemes.add_column(heading, justify="left" if heading == "scheme" else "right")
    for one in found.compared:
        held = "-" if one.held_out is None else f"{one.held_out:.1%}"
        row = (one.scheme, str(one.programs), f"{one.waste:.1%}", held, f"{one.compile_s:.1f}")
        schemes.add_row(*row, style="bold" if one is found.compared[0] else None)
    console.print(schemes)
    count = len(found.ladder)
    bill = (
        f"{count} programs, one a size, compile in {found.compile_s:.1f} s "
        f"at {found.compile_s / count:g} s each (--compile-seconds); "
        "a server compiles each for every batch size it has."
    )
    more = "One more program would save nothing: every size that was seen has its own."
    if found.next_waste is not None:
        saved = 1 - (1 - found.report.waste) / (1 - found.next_waste)
        more = (
            f"One more program would bring the waste from {found.report.waste:.2%} to "
            f"{found.next_waste:.2%} and save {saved:.2%} of the work, "
            f"for {found.next_compile_s:.1f} s of compiling."
        )
    use = f"servax serve MODEL --scheme explicit:{found.ladder}"
    console.print(bill, more, use, sep="\n", highlight=False, soft_wrap=True)


def _plot(found: Fitted, sizes: Sizes, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'servax[experiments]'."
        ) from None
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"A plot's name must end in .png, .svg or .pdf; got {path.name!r}.")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    smallest = int(sizes.min())
    spread = found.limit > 8 * float(np.median(sizes))
    bins = (np.geomspace if spread else np.linspace)(
        smallest, found.limit, min(120, max(10, found.limit))
    ).tolist()
    axes.hist(sizes, bins=bins, color="#9bbbd4", label="requests")
    for place, rung in enumerate(found.ladder):
        axes.axvline(rung, color="#c2452d", linewidth=1.2, label=None if place else "compiled sizes")
    if spread:
        axes.set_xscale("log")
    axes.set_xlabel(found.axis)
    axes.set_ylabel("requests")
    axes.set_title(f"{len(found.ladder)} sizes, {found.report.waste:.1%} padding waste")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"The plot must be writable; {path} is not: {error.strerror}.") from error
