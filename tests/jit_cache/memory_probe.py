"""Run by test_memory in a process of its own: what the plan says a model needs, and what it took.

Prints one JSON line: predicted and measured bytes beyond the process before its weights.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from servax.bucketing import Bucket
from servax.jit_cache import Program, Servable, Staging, compile_program
from servax.jit_cache.device_memory import peak_bytes, trim_heap
from servax.jit_cache.memory import plan_memory, staging_bytes
from servax.jit_cache.scratch import scratch_without_weights

F32 = jnp.float32
Model = tuple[Servable, Callable[[], Any], list[tuple[int, ...]]]


def minilm() -> Model:
    from servax.models.registry import load

    model = load("minilm")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.params)
    servable = Servable(
        model.apply,
        shapes,
        inputs=model.inputs,
        limits={**model.limits, "batch": 16},
        scheme="powers_of_two:64",
    )
    return servable, lambda: load("minilm").params, [(1, 64), (16, 256)]


def perceptron() -> Model:
    """Weights and outputs count: 128 MiB and twice 16 MiB."""
    shapes = [jax.ShapeDtypeStruct((4096, 4096), F32)] * 2

    def apply(weights: Any, *, x: Any) -> Any:
        for weight in weights:
            x = jax.nn.gelu(x @ weight)
        return x

    limits = {"batch": 1024}
    servable = Servable(
        apply, shapes, inputs={"x": "float32[4096]"}, limits=limits, scheme={"batch": [1, 64, 1024]}
    )
    return servable, lambda: random(shapes), [(1,), (64,), (1024,)]


def convolutions() -> Model:
    """Scratch counts: activations of 64 MiB, and as much in the library."""
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((3, 3, 3, 32), (3, 3, 32, 32))]

    def apply(kernels: Any, *, image: Any, mask: Any) -> Any:
        x = image.astype(F32)
        for kernel in kernels:
            x = jnp.where(mask[..., None], x, F32(0))
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
            )
        return jnp.where(mask[..., None], x, F32(0)).sum((1, 2))

    servable = Servable(
        apply,
        shapes,
        inputs={"image": "uint8[height, width, 3]", "mask": "mask[height, width]"},
        limits={"height": 256, "width": 256, "batch": 8},
        scheme=[64, 256],
    )
    return servable, lambda: random(shapes), [(1, 64, 64), (8, 64, 64), (8, 256, 256)]


def random(shapes: list[Any]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(one.shape, np.float32) * np.float32(0.02) for one in shapes]


def filled(servable: Servable, program: Program, staging: Staging) -> dict[str, np.ndarray]:
    sizes = dict(zip(program.bucket.axes, program.bucket.sizes, strict=True))
    signature = servable.signature
    item = {one.name: np.ones(signature.shape_of(one, sizes)[1:], one.dtype) for one in signature.inputs}
    rows = program.bucket.rows
    return staging.fill([item] * rows, [program.bucket.item_sizes] * rows)


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def serve(servable: Servable, programs: list[Program]) -> None:
    sets = {one: [Staging(servable.signature, one.bucket) for _ in range(2)] for one in programs}
    held: list[Any] = []
    # The largest first: its outputs may be in memory while a hungrier program runs.
    for program in reversed(programs):
        for staging in sets[program]:
            held = [*held[-1:], jax.block_until_ready(program(filled(servable, program, staging)))]


def main(name: str) -> None:
    servable, load, sizes = globals()[name]()
    buckets = [Bucket(servable.grid.axes, one) for one in sizes]
    programs = [compile_program(servable, one, [None] * len(servable.leaves)) for one in buckets]
    # As at a first start: nothing is known of earlier ones, and no weight is loaded.
    scratch = scratch_without_weights(servable, {one.bucket: one for one in programs}, most_bytes=1 << 40)
    jax.clear_caches()
    trim_heap()
    before = resident("VmRSS")
    leaves = [jax.device_put(leaf) for leaf in jax.tree.leaves(load())]
    jax.block_until_ready(leaves)
    programs = [program.with_leaves(leaves) for program in programs]
    options = {
        "weights_bytes": sum(leaf.nbytes for leaf in leaves),
        "budget_bytes": 1 << 40,
        "staging_bytes": staging_bytes(servable, buckets),
    }
    facts_by_bucket = {program.bucket: program.facts for program in programs}
    plan = plan_memory(facts_by_bucket, **options, scratch_bytes=scratch, slack_bytes=int(sys.argv[2]))
    bare = plan_memory(facts_by_bucket, **options)
    peaks = []
    for _ in range(3):
        peak_bytes(lambda: serve(servable, programs))
        peaks.append(resident("VmHWM") - before)
    found = {"predicted": plan.need_bytes, "facts": bare.need_bytes, "measured": statistics.median(peaks)}
    print(json.dumps({**found, "peaks": peaks}))


if __name__ == "__main__":
    main(sys.argv[1])
