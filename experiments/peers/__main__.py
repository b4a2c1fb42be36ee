"""servax beside other servers: install each, start it, give both the same work in turn, compare.

    python -m servax.experiments.peers --workload embed --json peers.json --figure peers.png

Each peer has a virtual environment of its own in the work folder, kept for the next run; servers listen on
loopback only and are stopped by their process ids. While one is measured the other is paused.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ExperimentError
from ..reporting import machine, write_json
from . import decode, embed, offline
from .environments import environment, versions
from .folders import prepare
from .place import Place
from .summary import Row, draw, print_summary, summarise
from .table import OURS, PEERS, VARIANTS, WORKLOADS, Peer, variant

_GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"


def chosen(workload: str, names: str, variants: str = "") -> list[Peer]:
    """servax and the named peers of a workload; all of them for an empty name.

    Args:
        workload: which.
        names: of peers, with commas between.
        variants: of our server, beside it as it is, with commas between; see `table.variant`.

    Raises:
        ExperimentError: if there are no such workload, peer or variant.
    """
    if workload not in WORKLOADS:
        raise ExperimentError(f"A workload is one of {', '.join(WORKLOADS)}; got {workload!r}.")
    known = {peer.name: peer for peer in PEERS[workload]}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    for name in wanted:
        if name not in known:
            raise ExperimentError(f"A peer of {workload} is one of {', '.join(known)}; got {name!r}.")
    asked = list(dict.fromkeys(one.strip() for one in variants.split(",") if one.strip()))
    there = {"embed": ("bfloat16", "int8"), "decode": tuple(VARIANTS)}.get(workload, ())
    for one in asked:
        if not set(one.split("+")) <= set(there):
            raise ExperimentError(
                f"--variants of {workload} are of {', '.join(there) or 'nothing'}, with + between; got "
                f"{one!r}."
            )
    others = [known[name] for name in wanted if name != OURS]
    return [known[OURS], *(variant(workload, one) for one in asked), *others]


def main(
    workload: Annotated[str, typer.Option(help="embed, offline or decode.")],
    peers: Annotated[str, typer.Option(help="Names with commas between; all by default.")] = "",
    variants: Annotated[
        str,
        typer.Option(
            help="bfloat16, int8, guesses, or int8+guesses: also servax so, as systems of their own."
        ),
    ] = "",
    clients: Annotated[str, typer.Option(help="At once, with commas between.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the result here (PNG or SVG).")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of environments, kept; by default in the cache.")
    ] = None,
    texts: Annotated[
        int, typer.Option(min=0, help="Requests in one turn, or texts of the file; 0 for the default.")
    ] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each system.")] = 3,
    limit_ms: Annotated[float, typer.Option(help="p99 that a sustained rate keeps.")] = 250.0,
    steps: Annotated[int, typer.Option(min=0, help="Of the search for that rate; 0 leaves it out.")] = 5,
    arrivals: Annotated[str, typer.Option(help="poisson, or a packaged trace.")] = "poisson",
    golden: Annotated[Path | None, typer.Option(help="Folder of reference answers.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Compare servax with other servers on this machine."""
    # As Ctrl-C does: a kill of this process must not leave somebody's server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    systems = chosen(workload, peers, variants)
    folder = work or _cache()
    place = Place(folder, prepare(folder, decoder=workload == "decode"), sys.executable)
    answers = golden or (_GOLDEN if _GOLDEN.is_dir() else None)
    counts = tuple(int(one) for one in clients.split(",") if one.strip())
    found: Iterator[Row]
    if workload == "embed":
        plan = embed.Plan(counts or embed.Plan.clients, texts or embed.Plan.texts, turns, limit_ms, steps,
                          arrivals=arrivals, seed=seed)  # fmt: skip
        found = embed.measure(systems, place, plan, answers, _tell)
    elif workload == "offline":
        found = offline.measure(systems, place, texts or 1000, turns, seed, _tell)
    else:
        streams = decode.Plan(counts or decode.Plan.clients, turns=turns, seed=seed)
        place = replace(place, more={"slots": str(max(streams.clients))})
        found = decode.measure(systems, place, streams, answers, _tell)
    rows: list[Row] = []
    try:
        for row in found:
            rows.append(row)  # noqa: PERF402  (what is there is kept if a later one fails)
    finally:
        _report(workload, systems, rows, folder, json_file, figure)


def _report(
    workload: str,
    systems: Sequence[Peer],
    rows: Sequence[Row],
    folder: Path,
    json_file: Path | None,
    figure: Path | None,
) -> None:
    summary, failures = summarise(rows), [row for row in rows if "error" in row]
    print_summary(workload, summary, failures)
    if json_file is not None:
        ran = [peer for peer in systems if peer.name in {row["system"] for row in summary}]
        write_json(
            json_file,
            {
                "machine": machine(),
                "workload": workload,
                "versions": {peer.name: versions(peer, environment(peer, folder)) for peer in ran},
                "rows": summary,
                "turns": list(rows),
            },
        )
    if figure is not None and summary:
        draw(figure, workload, summary)


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "servax" / "peers"


if __name__ == "__main__":
    typer.run(main)
