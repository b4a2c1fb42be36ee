"""Claim: on an accelerator servax answers as in float64, compiles nothing once warm, starts from its store,
gains from batching, and takes no more memory than it planned.

One script of a few minutes that carries what it needs: weights are random and references are computed here in
NumPy. Where MiniLM's weights are installed they are checked too; where a package is missing, the check that
needs it is skipped and says why. `--reduced` is the same on small models, for a machine without accelerator.

    python -m servax.experiments.gpu_check --json gpu.json
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .errors import ExperimentError
from .float64_bert import embed_float64
from .gpu_bench import REDUCED, Bench, Sizes
from .reporting import machine, print_table, write_json

Row = dict[str, Any]
_CHILD_S = 240
# Of unit vectors: float32 on another device sums in another order.
_TOLERANCE = 2e-5
_GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"


# -- checks: each gives rows, and raises ExperimentError where the claim does not hold -----------------------


def parity(bench: Bench) -> list[Row]:
    """Against float64, in whatever buckets the server chooses; MiniLM too, if it is there."""
    texts = bench.texts[: bench.sizes.references]
    wanted = embed_float64(bench.config, bench.params, texts)
    with bench.server() as server:
        got = np.stack([one["embedding"] for one in server.map([{"ids": ids} for ids in texts])])
    rows = [_row("largest difference from float64", float(np.abs(got - wanted).max()), at_most=_TOLERANCE)]
    if bench.sizes is REDUCED:  # the tests of MiniLM do that on CPU
        return rows
    return [*rows, _minilm_row()]


def _minilm_row() -> Row:
    try:
        return _row("MiniLM, largest difference from golden", _golden(), at_most=_TOLERANCE)
    except (ImportError, LookupError, OSError) as error:  # weights or golden files are not there
        return {"what": "MiniLM against golden vectors", "skipped": str(error)[:120]}


def _golden() -> float:
    from ..bucketing import Grid
    from ..server import Server
    from .minilm import minilm_servable

    texts = json.loads((_GOLDEN / "minilm_texts.json").read_text())
    wanted = np.load(_GOLDEN / "minilm_embeddings.npy")
    with Server(minilm_servable(Grid.explicit(("batch", "length"), [(1, 64), (8, 64), (8, 256)]))) as server:
        items = [{"ids": np.asarray(one["input_ids"], np.int32)} for one in texts]
        return float(np.abs(np.stack([one["embedding"] for one in server.map(items)]) - wanted).max())


def store_and_memory(bench: Bench) -> list[Row]:
    """All programs compiled and stored, then loaded by a new process, whose peak no compile has raised."""
    from ..jit_cache import StoredPrograms

    servable, store = bench.servable(), bench.store()
    leaves, make, begin_s = servable.place(), StoredPrograms(store), time.perf_counter()
    for bucket in servable.grid.buckets:
        make(servable, bucket, leaves)
    cold_s, total, found = time.perf_counter() - begin_s, len(servable.grid.buckets), _child(bench)
    need, peak = found["need_bytes"] / 2**20, found["peak_bytes"]
    rows = [
        _row("programs", total),
        _row("compile all, s", cold_s),
        _row("programs loaded by a new process", found["loaded"], at_least=total),
        _row("plan, load and run them in it, s", found["load_s"]),
        _row("its start to ready, s", found["ready_s"]),
        _row("memory planned, MiB", need),
    ]
    if peak is None:
        return [*rows, {"what": "peak memory", "skipped": "this backend does not tell"}]
    return [*rows, _row("peak memory, MiB", peak / 2**20, at_most=need)]


def batching(bench: Bench) -> list[Row]:
    """A sealed server: one request at a time, then all at once, with no compile and the same answers."""
    from ..jit_cache import compile_log

    items = [{"ids": ids} for ids in bench.texts]
    alone = items[: max(16, len(items) // 10)]
    with bench.server(seal=True) as server:
        before = compile_log().total()
        alone_s, one_by_one = _timed(lambda: [server(**one) for one in alone])
        together_s, together = _timed(lambda: server.map(items))
        compiled = sum(compile_log().total()) - sum(before)
    rate, alone_rate = len(items) / together_s, len(alone) / alone_s
    apart = max(
        float(np.abs(a["embedding"] - b["embedding"]).max())
        for a, b in zip(one_by_one, together, strict=False)
    )
    return [
        _row("traces and compiles while sealed", compiled, at_most=0),
        _row("one at a time, answers/s", alone_rate),
        _row("all at once, answers/s", rate),
        _row("gain of dynamic batching", rate / alone_rate, at_least=1.0),
        _row("largest difference between the two", apart, at_most=_TOLERANCE),
    ]


def generation(bench: Bench) -> list[Row]:
    """Continuous batching of random prompts against one text at a time, greedily."""
    from concurrent.futures import ThreadPoolExecutor

    from ..models import tiny
    from ..server.generation import GenerationServer, SamplingParams

    sizes = bench.sizes
    params = SamplingParams(max_tokens=sizes.tokens, temperature=0.0, ignore_eos=True)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 259, int(n)).tolist() for n in rng.integers(4, 64, sizes.streams)]
    small: dict[str, Any] = {"decode_rows": (4,), "prefill_buckets": ((4, 64),), "mixed_buckets": ()}
    few_programs = small if sizes is REDUCED else {}
    decoder: dict[str, Any] = dict(sizes.decoder)
    options: dict[str, Any] = {"max_rows": min(sizes.streams, 32), "store": bench.store(), **few_programs}
    with GenerationServer(tiny(**decoder), **options) as server:
        few = prompts[: max(2, sizes.streams // 16)]
        alone_s, alone = _timed(lambda: [server.generate(one, params).ids for one in few])
        with ThreadPoolExecutor(sizes.streams) as pool:
            together_s, together = _timed(
                lambda: [one.ids for one in pool.map(lambda prompt: server.generate(prompt, params), prompts)]
            )
    alone_rate, rate = len(few) * sizes.tokens / alone_s, len(prompts) * sizes.tokens / together_s
    same = np.mean([a == b for a, b in zip(alone, together, strict=False)])
    return [
        _row("one at a time, tokens/s", alone_rate),
        _row("continuous batching, tokens/s", rate),
        _row("gain of continuous batching", rate / alone_rate, at_least=1.0),
        _row("texts equal to those written alone", float(same)),
    ]


def padding(bench: Bench) -> list[Row]:
    """Whether padding or neighbours change an answer on this device."""
    from ..jit_cache.safety import check_padding

    report = check_padding(bench.servable(), ids_below={"ids": 2000}, tolerance=_TOLERANCE)
    return [_row(f"axis {axis.axis} may be padded", float(axis.ok), at_least=1.0) for axis in report.axes]


CHECKS: Mapping[str, Callable[[Bench], list[Row]]] = {
    "store": store_and_memory,  # first: the others load what it compiles
    "parity": parity,
    "batching": batching,
    "generation": generation,
    "padding": padding,
}


def _row(
    what: str, value: float | None, *, at_most: float | None = None, at_least: float | None = None
) -> Row:
    holds = None
    if value is not None and (at_most is not None or at_least is not None):
        holds = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    return {"what": what, "value": value, "bound": at_most if at_least is None else at_least, "holds": holds}


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin_s = time.perf_counter()
    found = call()
    return time.perf_counter() - begin_s, found


# -- the child: a process that compiles nothing -------------------------------------------------------------


def child(bench: Bench) -> Row:
    """Plan the memory, start from the store, and run the largest bucket a while."""
    import jax

    from ..jit_cache.device_memory import memory_budget
    from ..server.hosting.programs import Programs

    plans: list[Any] = []
    programs = Programs(memory_bytes=memory_budget(), on_plan=lambda _, plan: plans.append(plan))
    begin_s = time.perf_counter()
    with bench.server(programs=programs) as server:
        load_s, now = time.perf_counter() - begin_s, time.time()
        loaded = sum(one.facts.source != "compiled" for one in server.reports["random"].warm)
        longest = {"ids": np.ones(max(bench.sizes.lengths), np.int32)}
        server.map([longest] * max(bench.sizes.batches) * 5)
        stats = jax.devices()[0].memory_stats() or {}
    return {
        "loaded": loaded,
        "load_s": load_s,
        "ready_at": now,
        "need_bytes": plans[0].need_bytes,
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def _child(bench: Bench) -> Row:
    command = [sys.executable, "-m", "servax.experiments.gpu_check", "--folder", str(bench.folder)]
    began = time.time()
    done = subprocess.run(
        command + (["--reduced"] if bench.sizes is REDUCED else []),
        capture_output=True,
        text=True,
        timeout=_CHILD_S,
    )
    if done.returncode:
        raise ExperimentError(f"A new process must start from the store; it printed: {done.stderr[-1500:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found | {"ready_s": found["ready_at"] - began}


def run(sizes: Sizes) -> list[Row]:
    """All checks; one that cannot run or fails gives a row that says so."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(sizes, Path(name))
        for check, call in CHECKS.items():
            begin_s = time.perf_counter()
            try:
                found = call(bench)
            except ImportError as error:
                found = [{"what": "all of it", "skipped": str(error)}]
            except Exception as error:  # the other checks still run: device time is short
                found = [{"what": f"{type(error).__name__}: {error}"[:300], "holds": False}]
            rows += [{"check": check} | one for one in found]
            print(f"{check}: {time.perf_counter() - begin_s:.1f} s", file=sys.stderr, flush=True)
    return rows


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    reduced: Annotated[bool, typer.Option("--reduced", help="Small models and few requests.")] = False,
    folder: Annotated[Path | None, typer.Option(hidden=True, help="Of the store, for the child.")] = None,
) -> None:
    """Check answers, store, memory and batching on the device of this machine."""
    # The child needs memory beside its parent's; and the peak is then what was really used.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sizes = REDUCED if reduced else Sizes()
    if folder is not None:
        print(json.dumps(child(Bench(sizes, folder))))
        return
    rows = run(sizes)
    columns = {
        "check": "check",
        "what": "what",
        "value": "value|,.6g",
        "bound": "bound|.3g",
        "holds": "holds",
    }
    skipped = "\n".join(f"{row['what']} skipped: {row['skipped']}" for row in rows if "skipped" in row)
    print_table("On this device", columns, [row for row in rows if "skipped" not in row], skipped or None)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), "reduced": reduced, "rows": rows})
    if any(row.get("holds") is False for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
