"""The workload `offline`: a file of texts, as fast as it can be embedded; each system is a worker process.

A worker prints `{"ready": true}` once it has done the whole file; from then on it does the file again for
each line on its stdin and prints seconds and real tokens. Tokenising counts.
"""

import json
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ExperimentError
from ..traces import load_texts
from .place import Place
from .processes import Process, running
from .table import Peer

Row = dict[str, Any]
_PASS_S = 900.0


def measure(
    peers: Sequence[Peer], place: Place, texts: int, turns: int, seed: int, tell: Callable[[str], None]
) -> Iterator[Row]:
    """Each peer against servax, pass by pass.

    Args:
        peers: the first is servax.
        place: where they run.
        texts: how many are in the file.
        turns: passes of each in turn.
        seed: of the choice of texts.
        tell: told what happens.

    Yields:
        Rows of the modes `start` and `offline`; a peer that fails gives a row with `error`.
    """
    chosen = [one.text for one in load_texts(seed=seed)][:texts]
    file = place.work / "texts.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(chosen))
    with ExitStack() as stack:
        ours = stack.enter_context(running(_start(peers[0], place, file)))
        reference = _vectors(peers[0], place)
        yield _started(peers[0], ours, reference, reference)
        for peer in peers[1:]:
            tell(f"{peer.name}: installing and starting")
            try:
                with ours.paused():
                    process = _start(peer, place, file)
                with running(process):
                    yield _started(peer, process, _vectors(peer, place), reference)
                    pairs = ((peers[0], ours, process), (peer, process, ours))
                    for turn in range(turns):
                        for one, worker, other in pairs:
                            yield _pass(one, peer, worker, other, len(chosen)) | {"turn": turn}
            except ExperimentError as error:
                tell(f"{peer.name}: {error}")
                yield {"system": peer.name, "workload": "offline", "mode": "start", "error": str(error)}


def _start(peer: Peer, place: Place, file: Path) -> Process:
    more = {"texts": str(file), "vectors": str(_vectors_file(peer, place))}
    process, _ = replace(place, more=more).start(peer, pipes=True)
    try:
        _line(process, peer.ready_s)
    except BaseException:
        process.stop()
        raise
    return process


def _started(peer: Peer, process: Process, got: Any, reference: Any) -> Row:
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(reference, axis=1)
    return {
        "system": peer.name,
        "workload": "offline",
        "mode": "start",
        "cosine_min": float(((got * reference).sum(1) / lengths).min()),
        "reference": "servax",
    }


def _pass(one: Peer, peer: Peer, worker: Process, other: Process, texts: int) -> Row:
    with other.paused():
        if worker.popen.stdin is None:
            raise ExperimentError("A worker must have its pipes; it has none.")
        worker.popen.stdin.write("\n")
        worker.popen.stdin.flush()
        found = _line(worker, _PASS_S)
    return {
        "system": one.name,
        "against": peer.name,
        "workload": "offline",
        "mode": "offline",
        "rate": texts / found["seconds"],
        "tokens_per_s": found["tokens"] / found["seconds"],
        "seconds": found["seconds"],
    }


def _line(process: Process, limit_s: float) -> dict[str, Any]:
    """The next line of JSON that a worker prints; what else it prints is passed over."""
    out = process.popen.stdout
    if out is None:
        raise ExperimentError("A worker must have its pipes; it has none.")
    while select.select([out], [], [], limit_s)[0]:
        line = out.readline()
        if not line:
            raise ExperimentError(f"{process.popen.args!r} must answer; it ended: {process.tail()}")
        if line.startswith("{"):
            return dict(json.loads(line))
    raise ExperimentError(f"{process.popen.args!r} must answer within {limit_s:g} s: {process.tail()}")


def _vectors_file(peer: Peer, place: Place) -> Path:
    return place.work / f"vectors_{peer.name}.npy"


def _vectors(peer: Peer, place: Place) -> Any:
    return np.load(_vectors_file(peer, place)).astype(np.float64)
