"""Claim: on a stream of varying lengths `servax.bucketed` compiles a few programs where `jax.jit` compiles
one a length, so a first pass takes a fraction of the time and of the memory; once all is compiled, exact
lengths are fastest and padding everything to the limit is slowest.

A small transformer over the lengths of the packaged texts: the fitted sizes come from the first half of
them, all contenders then run the second half, several times. The first pass has the compiling in it, the
others have none, and the fastest of them counts. Seconds of the processor (all cores) say what a contender
costs whatever else runs. Each contender runs in a process of its own, so that its memory is its own.

    python -m servax.experiments.bucketed_vs_jit --quick --json bucketed_vs_jit.json
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from .errors import ExperimentError
from .reporting import machine, print_table, write_json
from .traces import TEXT_LIMIT, load_trace

ROWS, WIDTH, LAYERS, WORDS = 4, 128, 2, 1000
CONTENDERS = ("jit", "jit, all at the limit", "bucketed powers_of_two:16", "bucketed fitted:8")
COLUMNS = {
    "contender": "contender",
    "compiles": "compilations|,d",
    "first_s": "first pass, s|.1f",
    "first_cpu_s": "of the processor|.1f",
    "again_cpu_s": "a later pass, s of the processor|.2f",
    "waste": "padding|.1%",
    "memory_mib": "memory added, MiB|.0f",
}
_REPEATS = 4
_TIMEOUT_S = 1800


def encoder() -> tuple[Any, Callable[..., Any]]:
    """Weights of a small transformer, and `apply(params, ids, mask)` to one vector a row, float32."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)

    def draw(*shape: int) -> NDArray[np.float32]:
        return np.asarray(rng.normal(size=shape) / shape[0] ** 0.5, np.float32)

    params = {
        "table": draw(WORDS, WIDTH),
        "layers": [
            {"qkv": draw(WIDTH, 3 * WIDTH), "up": draw(WIDTH, 4 * WIDTH), "down": draw(4 * WIDTH, WIDTH)}
            for _ in range(LAYERS)
        ],
    }

    def apply(params: Any, ids: Any, mask: Any) -> Any:
        x = params["table"][ids]
        for layer in params["layers"]:
            query, key, value = jnp.split(x @ layer["qkv"], 3, axis=-1)
            scores = jnp.where(mask[:, None, :], query @ key.transpose(0, 2, 1) / WIDTH**0.5, -1e9)
            x = x + jax.nn.softmax(scores, axis=-1) @ value
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return jnp.where(mask[..., None], x, 0.0).sum(1) / mask.sum(1)[:, None]

    return params, apply


def contender(name: str, fit_on: NDArray[np.int64]) -> tuple[Callable[..., Any], Callable[[int], int]]:
    """The function under test, `call(params, ids)`, and the length that it computes for a given one.

    Args:
        name: One of `CONTENDERS`.
        fit_on: Lengths that a fitted ladder may see.
    """
    import jax

    from ..bucketing import Scheme, as_scheme, fitted
    from ..jit_cache import bucketed

    _, apply = encoder()
    if name.startswith("jit"):
        jitted = jax.jit(apply)
        fixed = TEXT_LIMIT if "limit" in name else None

        def call(params: Any, ids: NDArray[np.int32]) -> Any:
            length = ids.shape[1]
            mask = np.zeros((ROWS, fixed or length), np.bool_)
            mask[:, :length] = True
            if fixed is not None:
                ids = np.pad(ids, ((0, 0), (0, fixed - length)))
            return jitted(params, ids, mask)

        return call, lambda length: fixed or length
    which = name.split()[1]
    scheme: Scheme = fitted(fit_on, int(which[7:])) if which.startswith("fitted:") else as_scheme(which)
    padded = bucketed(
        dims={"ids": f"{ROWS}, length"},
        masks={"mask": "length"},
        limits={"length": TEXT_LIMIT},
        scheme=scheme,
    )(lambda params, ids, mask: apply(params, ids, mask[None, :].repeat(ROWS, 0)))
    return padded, scheme.ladder(TEXT_LIMIT).rung_for


def child(name: str, calls: int, seed: int) -> dict[str, Any]:
    """Run one contender in this process.

    Args:
        name: One of `CONTENDERS`.
        calls: How many lengths of the second half.
        seed: Of the shuffle of the texts.
    """
    import jax

    from ..jit_cache import compile_log
    from ..jit_cache.device_memory import resident_bytes

    before, after = load_trace("texts", seed=seed).halves()
    lengths = after.lengths[:calls].tolist()
    call, computed = contender(name, before.lengths)
    params = jax.block_until_ready(jax.device_put(encoder()[0]))
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # what the first compile of a process loads
    ids = np.random.default_rng(seed).integers(0, WORDS, (ROWS, TEXT_LIMIT)).astype(np.int32)
    log, memory = compile_log(), resident_bytes()
    compiled = log.total()[1]
    passes, total = [], 0.0
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter(), time.process_time()
        total = sum(float(np.asarray(call(params, ids[:, :length]))[0, 0]) for length in lengths)
        passes.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    real = sum(lengths)
    return {
        "contender": name,
        "compiles": log.total()[1] - compiled,
        "first_s": passes[0][0],
        "first_cpu_s": passes[0][1],
        "again_s": min(wall for wall, _ in passes[1:]),
        "again_cpu_s": min(cpu for _, cpu in passes[1:]),
        "waste": 1 - real / sum(map(computed, lengths)),
        "memory_mib": (resident_bytes() - memory) / 2**20,
        "lengths": len(set(lengths)),
        "sum": total,
    }


def measure(calls: int, seed: int) -> list[dict[str, Any]]:
    """All contenders, one process after another; their answers must agree.

    Raises:
        ExperimentError: a process failed, or two contenders answer differently.
    """
    rows = []
    for name in CONTENDERS:
        command = [sys.executable, "-m", "servax.experiments.bucketed_vs_jit", "--child", name]
        done = subprocess.run(
            [*command, "--calls", str(calls), "--seed", str(seed)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise ExperimentError(f"The process of {name!r} must succeed; it printed: {done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    sums = [row["sum"] for row in rows]
    if max(sums) - min(sums) > 1e-3 * max(1.0, abs(sums[0])):
        raise ExperimentError(f"Padding must not change the answers; their sums are {sums}.")
    return rows


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="60 calls instead of 400.")] = False,
    calls: Annotated[int | None, typer.Option(min=2, help="Lengths to run.")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the texts.")] = 0,
    child_name: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Compare `servax.bucketed` with `jax.jit` on varying lengths."""
    calls = calls or (60 if quick else 400)
    if child_name:
        print(json.dumps(child(child_name, calls, seed)))
        return
    rows = measure(calls, seed)
    title = f"{calls} calls of {rows[0]['lengths']} lengths, {ROWS} rows each"
    print_table(title, COLUMNS, rows)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), "calls": calls, "seed": seed, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
