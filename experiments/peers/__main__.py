"""servax beside other servers: install each, start it, give both the same work in turn, compare.

    python -m servax.experiments.peers --workload embed --json peers.json --figure peers.png

Each peer has a virtual environment of its own in the work folder, kept for the next run; servers listen on
loopback only and are stopped by their process ids. While one is measured the other is paused.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ExperimentError
from ..reporting import machine, write_json
from . import decode, embed, offline
from .environments import environment, versions
from .folders import prepare
from .place import Place
from .summary import draw, print_summary, summarise
from .table import OURS, PEERS, WORKLOADS, Peer

_GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"


def chosen(workload: str, names: str) -> list[Peer]:
    """servax and the named peers of a workload; all of them for an empty name.

    Raises:
        ExperimentError: if there is no such workload or peer.
    """
    if workload not in WORKLOADS:
        raise ExperimentError(f"A workload is one of {', '.join(WORKLOADS)}; got {workload!r}.")
    known = {peer.name: peer for peer in PEERS[workload]}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    for name in wanted:
        if name not in known:
            raise ExperimentError(f"A peer of {workload} is one of {', '.join(known)}; got {name!r}.")
    return [known[OURS], *(known[name] for name in wanted if name != OURS)]


def main(
    workload: Annotated[str, typer.Option(help="embed, offline or decode.")],
    peers: Annotated[str, typer.Option(help="Names with commas between; all by default.")] = "",
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
    systems = chosen(workload, peers)
    folder = work or _cache()
    place = Place(folder, prepare(folder, decoder=workload == "decode"), sys.executable)
    answers = golden or (_GOLDEN if _GOLDEN.is_dir() else None)
    counts = tuple(int(one) for one in clients.split(",") if one.strip())
    if workload == "embed":
        plan = embed.Plan(
            clients=counts or embed.Plan.clients,
            texts=texts or embed.Plan.texts,
            turns=turns,
            limit_ms=limit_ms,
            steps=steps,
            arrivals=arrivals,
            seed=seed,
        )
        found = embed.measure(systems, place, plan, answers, _tell)
    elif workload == "offline":
        found = offline.measure(systems, place, texts or 1000, turns, seed, _tell)
    else:
        streams = decode.Plan(clients=counts or decode.Plan.clients, turns=turns, seed=seed)
        found = decode.measure(systems, place, streams, answers, _tell)
    rows = list(found)
    summary, failures = summarise(rows), [row for row in rows if "error" in row]
    print_summary(workload, summary, failures)
    if json_file is not None:
        told = {peer.name: versions(peer, environment(peer, folder)) for peer in systems if peer.name not in
                {row["system"] for row in failures}}  # fmt: skip
        write_json(json_file, {"machine": machine(), "workload": workload, "versions": told, "rows": summary,
                               "turns": rows})  # fmt: skip
    if figure is not None and summary:
        draw(figure, workload, summary)


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "servax" / "peers"


if __name__ == "__main__":
    typer.run(main)
