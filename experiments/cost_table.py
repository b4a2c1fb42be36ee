"""Seconds of each bucket: measured for MiniLM on this machine, and a linear prior where nothing can run.

Claim: a table of a few dozen measured buckets, interpolated between them, predicts the throughput of the
real server within 15 % (`compare_schemes --validate`).

    python -m servax.experiments.cost_table --json costs.json
"""

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..bucketing import Bucket, Grid, Ladder
from .errors import ExperimentError
from .reporting import machine, print_table, write_json

AXES = ("batch", "length")
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BATCHES = (1, 2, 4, 8, 16, 32)
# More tokens than this at once are slower per token on a CPU: they fall out of its caches.
MAX_ELEMENTS = 2048


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A prior, not a measurement: a fixed cost a call and an equal cost for each computed token.

    It stands for language models that this machine cannot run. Attention's quadratic part is left out,
    which understates what padding long prompts costs.
    """

    overhead_s: float = 1e-3
    token_s: float = 50e-6

    def __call__(self, bucket: Bucket) -> float:
        """Seconds of one run."""
        return self.overhead_s + self.token_s * bucket.elements


class CostTable:
    """Measured seconds of buckets of batch and length, and what lies between them.

    Unmeasured buckets are interpolated linearly, over the lengths of each measured batch size and then
    over the batch sizes, and extrapolated in proportion to the elements above the largest. The result
    never falls as a size rises.

    Args:
        seconds: Median run of each measured bucket.
        compile_s: Seconds its program took to compile.
        made_on: What measured it.

    Raises:
        ExperimentError: if nothing was measured or a time is not above 0.
    """

    def __init__(
        self,
        seconds: Mapping[Bucket, float],
        compile_s: Mapping[Bucket, float],
        made_on: Mapping[str, Any],
    ) -> None:
        if not seconds or not all(np.isfinite(one) and one > 0 for one in seconds.values()):
            raise ExperimentError(f"A cost table holds times above 0; got {dict(seconds)}.")
        self.seconds, self.compile_s, self.made_on = dict(seconds), dict(compile_s), dict(made_on)
        self._lines: dict[int, tuple[list[int], list[float]]] = {}
        for batch in sorted({bucket.rows for bucket in self.seconds}):
            cells = sorted((b.sizes[1], s) for b, s in self.seconds.items() if b.rows == batch)
            lengths, line = zip(*cells, strict=True)
            self._lines[batch] = list(lengths), np.maximum.accumulate(line).tolist()
        self._found: dict[Bucket, float] = {}

    def __call__(self, bucket: Bucket) -> float:
        """Predicted seconds of one run."""
        found = self._found.get(bucket)
        if found is None:
            found = self._found[bucket] = self._predicted(*bucket.sizes)
        return found

    def mean_compile_s(self) -> float:
        """Mean compile seconds of a program."""
        return float(np.mean(list(self.compile_s.values())))

    def compile_s_of(self, bucket: Bucket) -> float:
        """Compile seconds of the measured program nearest in elements."""
        near = min(self.compile_s, key=lambda one: abs(np.log(one.elements / bucket.elements)))
        return self.compile_s[near]

    def _predicted(self, batch: int, length: int) -> float:
        batches = list(self._lines)
        line = np.maximum.accumulate([self._on_line(one, length) for one in batches])
        if batch > batches[-1]:
            return float(line[-1]) * batch / batches[-1]
        return float(np.interp(batch, batches, line))

    def _on_line(self, batch: int, length: int) -> float:
        lengths, line = self._lines[batch]
        if length > lengths[-1]:
            return line[-1] * length / lengths[-1]
        return float(np.interp(length, lengths, line))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        cells = [
            {"bucket": str(bucket), "run_s": self.seconds[bucket], "compile_s": self.compile_s.get(bucket)}
            for bucket in sorted(self.seconds)
        ]
        return {"machine": self.made_on, "axes": AXES, "buckets": cells}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "CostTable":
        """The table that `to_dict` wrote."""
        try:
            cells = [(Bucket.parse(cell["bucket"], AXES), cell) for cell in data["buckets"]]
            seconds = {bucket: float(cell["run_s"]) for bucket, cell in cells}
            compiled = {bucket: float(cell["compile_s"] or 0.0) for bucket, cell in cells}
            return CostTable(seconds, compiled, data["machine"])
        except (KeyError, TypeError) as error:
            raise ExperimentError(f"A cost table is what to_dict() returned; got {error!r}.") from error


def default_buckets() -> tuple[Bucket, ...]:
    """The buckets measured by default: batch by length, without those above `MAX_ELEMENTS`."""
    grid = Grid.product({"batch": Ladder(BATCHES), "length": Ladder(LENGTHS)}, max_elements=MAX_ELEMENTS)
    return grid.buckets


def measure(servable: Any, buckets: Iterable[Bucket], *, runs: int = 7, seed: int = 0) -> CostTable:
    """Compile each bucket and time full batches through padding, program and copy back to the host.

    Args:
        servable: A `servax.Servable` of the axes batch and length with the int32 input `ids`.
        buckets: What to measure.
        runs: Timed runs a bucket, after one that is not; their median counts.
        seed: Seed of the token ids.
    """
    import jax

    from ..jit_cache import compile_program

    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    programs = {bucket: compile_program(servable, bucket, leaves) for bucket in buckets}
    seconds = time_programs(servable, programs, runs=runs, seed=seed)
    compile_s = {bucket: program.facts.compile_s for bucket, program in programs.items()}
    return CostTable(seconds, compile_s, machine())


def time_programs(
    servable: Any, programs: Mapping[Bucket, Any], *, runs: int, seed: int = 0
) -> dict[Bucket, float]:
    """Median seconds of full batches, padding and copying included, after one run that is not timed."""
    from ..jit_cache import Staging

    rng = np.random.default_rng(seed)
    timed: dict[Bucket, list[float]] = {bucket: [] for bucket in programs}
    for turn in range(runs + 1):
        # Bucket after bucket in every turn, so that a slow moment of the machine spoils one run of each.
        for bucket, program in programs.items():
            rows, length = bucket.sizes
            items = [{"ids": rng.integers(1000, 20000, length).astype(np.int32)} for _ in range(rows)]
            staging = Staging(servable.signature, bucket)
            begin = time.perf_counter()
            outputs = program(staging.fill(items, [(length,)] * rows))
            servable.outputs.cut([np.asarray(leaf) for leaf in outputs], [(length,)] * rows)
            if turn:
                timed[bucket].append(time.perf_counter() - begin)
    return {bucket: median(one) for bucket, one in timed.items()}


def cached(path: Path | None, *, buckets: Sequence[Bucket] | None = None, runs: int = 7) -> CostTable:
    """The table in the file if it was made on this machine, else a new one, which is written there.

    Args:
        path: A JSON file; None always measures.
        buckets: What to measure; by default `default_buckets`.
        runs: Timed runs a bucket.
    """
    wanted = default_buckets() if buckets is None else tuple(buckets)
    if path is not None and path.exists():
        table = CostTable.from_dict(json.loads(path.read_text()))
        if table.made_on == machine() and set(wanted) <= set(table.seconds):
            return table
    from .minilm import minilm_servable

    table = measure(minilm_servable(), wanted, runs=runs)
    if path is not None:
        write_json(path, table.to_dict())
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure MiniLM's buckets, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to write the table; read instead if it fits")
    parser.add_argument("--runs", type=int, default=7, help="timed runs a bucket (7)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the token ids (0)")
    options = parser.parse_args(arguments)
    from .minilm import minilm_servable

    table = measure(minilm_servable(), default_buckets(), runs=options.runs, seed=options.seed)
    if options.json is not None:
        write_json(options.json, table.to_dict())
    rows = [
        {
            "bucket": str(bucket),
            "ms": seconds * 1e3,
            "us": seconds * 1e6 / bucket.elements,
            "compile": table.compile_s[bucket],
        }
        for bucket, seconds in sorted(table.seconds.items())
    ]
    columns = {"bucket": "bucket", "ms": "run ms|.2f", "us": "µs a token|.1f", "compile": "compile s|.2f"}
    print_table(f"MiniLM on {table.made_on['cores']} cores", columns, rows)


if __name__ == "__main__":
    main()
