"""`servax inspect` and `servax check`: what XLA made of a model, and whether padding changes its answers."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ...bucketing import Bucket
from ..config import ServeConfig
from ..errors import ConfigError
from .exits import EXIT_FAILED, UsageError, guarded

if TYPE_CHECKING:
    from .inspect_view import Inspected

ModelName = Annotated[
    str,
    typer.Argument(help="Built-in name, checkpoint folder, hub id, or module:attribute naming a Servable."),
]
MaxBatch = Annotated[int | None, typer.Option(min=1, help="Rows of the largest bucket. \\[default: 32]")]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Limit in tokens. \\[default: the model's own]")]
Scheme = Annotated[str | None, typer.Option(help="Ladder of the varying axes. \\[default: powers_of_two:16]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of tables.")]


def inspect(
    model: ModelName = "minilm",
    bucket: Annotated[
        list[str] | None,
        typer.Option(help="Sizes such as 8x64; repeat for more. \\[default: covering]"),
    ] = None,
    max_batch: MaxBatch = None,
    max_length: MaxLength = None,
    scheme: Scheme = None,
    top: Annotated[int, typer.Option(min=0, help="How many fusions to list.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Show the kernels of a model: clusters, bytes saved, arithmetic, time, share of the machine's peak."""
    options = {"model": model, "max_batch": max_batch, "max_length": max_length, "scheme": scheme}
    rows = guarded(lambda: _inspected(options, bucket or []))
    if as_json:
        typer.echo(json.dumps({"model": model, "programs": [row.to_json() for row in rows]}, indent=2))
        return
    from .inspect_view import print_programs

    print_programs(Console(), model, rows, top)


def check(
    model: ModelName = "minilm",
    max_batch: MaxBatch = None,
    max_length: MaxLength = None,
    scheme: Scheme = None,
    ids_below: Annotated[
        list[str] | None,
        typer.Option(help="Vocabulary of an integer input, such as ids=30522; repeat for more."),
    ] = None,
    controls: Annotated[
        list[str] | None, typer.Option(help="An input that keeps its pad value in padding; repeat for more.")
    ] = None,
    trust_pad: Annotated[
        bool, typer.Option("--trust-pad", help="Accept a model that tells padding by its pad value.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Relative difference allowed between buckets; 1e-5, more in low precision."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random rows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Try whether padding or neighbours change an answer; exit code 4 if they do."""
    options = {"model": model, "max_batch": max_batch, "max_length": max_length, "scheme": scheme}
    probing = {"controls": controls, "trust_pad": trust_pad, "tolerance": tolerance, "seed": seed}
    report = guarded(lambda: _checked(options, ids_below or [], probing))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        from .inspect_view import print_safety

        print_safety(Console(), report)
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)


def _inspected(options: dict[str, Any], texts: list[str]) -> "list[Inspected]":
    import jax

    from ...jit_cache import compile_program, warmup_order
    from ...jit_cache.fusion import inspect_program
    from ...jit_cache.timing import matrix_peak, time_program
    from .inspect_view import Inspected

    servable = _resolved(options).servable
    buckets = [_within(Bucket.parse(text, servable.grid.axes), servable.limits) for text in texts]
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    peak = matrix_peak()
    found = []
    for one in buckets or warmup_order(servable.grid)[:1]:
        program = compile_program(servable, one, leaves)
        seconds = time_program(program, servable)
        found.append(Inspected(one, program.facts, inspect_program(program), seconds, peak))
    return found


def _within(bucket: Bucket, limits: Mapping[str, int]) -> Bucket:
    for axis in bucket.axes:
        if bucket[axis] > limits[axis]:
            raise ConfigError(
                f"A bucket must be within the limits {dict(limits)}, got {bucket}, too large on {axis!r}; "
                f"lower it, or raise the model's limits."
            )
    return bucket


def _checked(options: dict[str, Any], vocabularies: list[str], probing: dict[str, Any]) -> Any:
    from ...jit_cache.safety import check_padding

    resolved = _resolved(options)
    names = [one.name for one in resolved.servable.signature.inputs]
    known = resolved.tokenizer is not None and "ids" in names
    ids_below = {"ids": resolved.tokenizer.vocab_size} if known else {}
    ids_below.update(_pairs(vocabularies))
    return check_padding(resolved.servable, ids_below=ids_below, **probing)


def _resolved(options: dict[str, Any]) -> Any:
    # The loader brings JAX and the weights; `--help` and usage errors answer at once.
    from pydantic import ValidationError

    from .wiring import resolve

    try:
        config = ServeConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"])).replace("_", "-")
        raise UsageError(f"--{option}: {first['msg']}, got {first['input']!r}") from error
    try:
        return resolve(config)
    except ConfigError:
        raise
    except Exception as error:  # the loader's errors are not ours to know by type
        raise ConfigError(f"The model {config.model!r} must load, got: {error}") from error


def _pairs(texts: list[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not name.isidentifier() or not number.isdecimal() or int(number) < 1:
            raise UsageError(f"--ids-below is name=number, such as ids=30522; got {text!r}")
        found[name] = int(number)
    return found
