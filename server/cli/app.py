"""The `servax` command.

Exit codes: 0 done, or drained after a signal; 1 unexpected error; 2 wrong usage; 3 the model or the address
cannot be used as configured; 4 warm-up failed.
"""

import json
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from ... import _version
from ..config import ServeConfig
from ..errors import ConfigError, ServerError
from .fit import fit
from .inspect import check, inspect
from .store import app as store_app

EXIT_UNEXPECTED, EXIT_USAGE, EXIT_CONFIG, EXIT_WARMUP = 1, 2, 3, 4

app = typer.Typer(
    name="servax",
    help="Serve any JAX function at any shape, and never compile on the request path.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True)

ModelName = Annotated[
    str,
    typer.Argument(help="Built-in name, checkpoint folder, hub id, or module:attribute naming a Servable."),
]
MaxBatch = Annotated[int | None, typer.Option(min=1, help="Rows of the largest bucket. [default: 32]")]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Limit in tokens. [default: the model's own]")]
Scheme = Annotated[str | None, typer.Option(help="Ladder of the varying axes. [default: powers_of_two:16]")]
WireName = Annotated[str | None, typer.Option("--name", help="The model's name on the wire.")]
StoreAt = Annotated[
    str | None,
    typer.Option("--store", help="Directory or URL of stored programs. [default: the user's cache]"),
]
UseStore = Annotated[bool, typer.Option("--use-store/--no-store", help="Keep programs between starts.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")]


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, help="Print the version.", callback=lambda v: _print_version(v)
        ),
    ] = False,
) -> None:
    pass


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"servax {_version.__version__}")
        raise typer.Exit


@app.command()
def serve(
    model: ModelName = "minilm",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 lets the system choose.")] = 8000,
    max_batch: MaxBatch = None,
    max_length: MaxLength = None,
    scheme: Scheme = None,
    name: WireName = None,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, help="How long an idle device may wait for more rows.")
    ] = 0.0,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve gRPC too, on this port. [default: none]")
    ] = None,
    store: StoreAt = None,
    use_store: UseStore = True,
    refit: Annotated[
        bool, typer.Option(help="Fit the sizes anew, in the background, to what arrives.")
    ] = False,
    seal: Annotated[bool, typer.Option(help="Forbid JAX tracing in this process after warm-up.")] = True,
    strict: Annotated[bool, typer.Option(help="Exit with 4 if a program cannot be made.")] = False,
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds for admitted requests at the end.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "warning",
    traceback: Traceback = False,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C, then drain."""
    options = {key: value for key, value in locals().items() if key not in ("strict", "traceback")}
    config = _config(**options)
    _guarded(lambda: _serve(config, strict), traceback)


@app.command()
def warmup(
    model: ModelName = "minilm",
    max_batch: MaxBatch = None,
    max_length: MaxLength = None,
    scheme: Scheme = None,
    name: WireName = None,
    store: StoreAt = None,
    use_store: UseStore = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    traceback: Traceback = False,
) -> None:
    """Make, store and try every program of a model, and list them."""
    options = {key: value for key, value in locals().items() if key not in ("as_json", "traceback")}
    config = _config(**options)
    _guarded(lambda: _warmup(config, as_json), traceback)


def _config(**options: Any) -> ServeConfig:
    try:
        return ServeConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"])).replace("_", "-")
        _fail(f"--{option}: {first['msg']}, got {first['input']!r}", EXIT_USAGE)


def _serve(config: ServeConfig, strict: bool) -> int:
    # Until uvicorn listens to signals there is nothing to drain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Imported here: `--help` and usage errors answer at once.
    from .serving import open_socket, serve

    with open_socket(config.host, config.port) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        _errors.print(
            f"listening on http://{shown}:{port}, loading {config.model}", markup=False, soft_wrap=True
        )
        error = serve(config, listener, _loader(config), strict=strict, on_failure=_show)
    return 0 if error is None else exit_code(error)


def _loader(config: ServeConfig) -> Callable[..., None]:
    def load(late: Any, metrics: Any) -> None:
        from . import wiring
        from .console import WarmupView

        view = WarmupView(_errors)
        try:
            server, texts = wiring.build(config, metrics, view)
            late.arrive(server, texts)
            if late.draining:
                return
            server.start().wait_ready()
        finally:
            view.close()
        _errors.print(f"ready: {', '.join(server.models)}", markup=False, highlight=False, soft_wrap=True)

    return load


def _warmup(config: ServeConfig, as_json: bool) -> int:
    from ..metrics import Metrics
    from . import wiring
    from .console import WarmupView, warm_table

    view = WarmupView(_errors)
    server, _ = wiring.build(config, Metrics(), view)
    failure: Exception | None = None
    try:
        server.start().wait_ready()
    except Exception as error:  # the table below says which bucket; the exit code says that one failed
        failure = error
    finally:
        view.close()
        rows = wiring.facts_table(server)
        server.close(drain_s=0.0)
    if as_json:
        typer.echo(json.dumps({"ok": failure is None, "programs": rows}, indent=2))
    else:
        Console().print(warm_table(rows))
    if failure is None:
        return 0
    _show(failure)
    return EXIT_WARMUP


def exit_code(error: BaseException) -> int:
    """The exit code that tells what went wrong."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    from ...jit_cache import JitCacheError

    if isinstance(error, JitCacheError | ServerError):
        return EXIT_WARMUP
    return EXIT_UNEXPECTED


def _guarded(action: Callable[[], int], traceback: bool) -> None:
    """Runs a command; an error is one line on stderr and an exit code, unless the traceback is wanted."""
    try:
        code = action()
    except (typer.Exit, KeyboardInterrupt):
        raise
    except Exception as error:
        if traceback:
            raise
        _fail(str(error) or type(error).__name__, exit_code(error))
    if code:
        raise typer.Exit(code)


def _show(error: BaseException) -> None:
    _errors.print(
        f"error: {str(error) or type(error).__name__}",
        style="red",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _fail(message: str, code: int) -> NoReturn:
    _errors.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


app.command()(fit)
app.command()(inspect)
app.command()(check)
app.add_typer(store_app)


def main() -> None:
    """Entry point of the `servax` command."""
    app()


if __name__ == "__main__":
    main()
