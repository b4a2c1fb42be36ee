"""The `servax` command.

Exit codes: 0 done, or drained after a signal; 1 unexpected error; 2 wrong usage; 3 the model or the address
cannot be used as configured; 4 warm-up failed.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from ... import _version
from ..config import ServeConfig
from ..errors import ConfigError, ServerError
from ..settings import Settings, read_settings
from .fit import fit
from .inspect import check, inspect
from .options import MODEL_PATHS, PROGRAM_PATHS, STORE_PATHS, with_flags
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
@with_flags()
def serve(
    flags: Mapping[str, Any],
    *,
    config: Annotated[
        str | None,
        typer.Option("--config", help="TOML file with options; variables SERVAX_* and flags go before it."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Serve models over HTTP (and gRPC) until SIGTERM or Ctrl-C, then drain."""
    settings = _settings(flags, config)
    _guarded(lambda: _serve(settings), traceback)


@app.command()
@with_flags((*MODEL_PATHS, *STORE_PATHS, *PROGRAM_PATHS))
def warmup(
    flags: Mapping[str, Any],
    *,
    config: Annotated[str | None, typer.Option("--config", help="TOML file, as for serve.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    traceback: Traceback = False,
) -> None:
    """Make, store and try every program of the models, and list them."""
    settings = _settings(flags, config)
    _guarded(lambda: _warmup(settings.config, as_json), traceback)


def _settings(flags: Mapping[str, Any], file: str | None) -> Settings:
    try:
        return read_settings(flags, os.environ, file)
    except ConfigError as error:
        _fail(str(error), EXIT_USAGE)


def _serve(settings: Settings) -> int:
    config = settings.config
    # Until uvicorn listens to signals there is nothing to drain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Imported here: `--help` and usage errors answer at once.
    from ..logs import set_up_logs
    from .serving import open_socket, serve

    set_up_logs(config.log_level, config.log_format)
    with open_socket(config.host, config.port) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if config.tls_cert is None else "https"
        models = ", ".join(one.model for one in config.served)
        _errors.print(
            f"listening on {scheme}://{shown}:{port}, loading {models}", markup=False, soft_wrap=True
        )
        error = serve(settings, listener, _loader(config), on_failure=_show)
    return 0 if error is None else exit_code(error)


def _loader(config: ServeConfig) -> Callable[..., None]:
    def load(late: Any, metrics: Any) -> None:
        from . import wiring
        from .console import WarmupView

        view = WarmupView(_errors)
        try:
            server, texts = wiring.build(config, metrics, view, view.show_plan)
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
    server, _ = wiring.build(config, Metrics(), view, view.show_plan)
    failure: Exception | None = None
    try:
        server.start().wait_ready()
    except Exception as error:  # the table below says which bucket; the exit code says that one failed
        failure = error
    finally:
        view.close()
        rows, left = wiring.facts_table(server), wiring.left_over(server)
        server.close(drain_s=0.0)  # what a budget left is not begun; the compile in hand ends
    if as_json:
        typer.echo(json.dumps({"ok": failure is None, "programs": rows, "left": left}, indent=2))
    else:
        Console().print(warm_table(rows))
        if left:
            _errors.print(f"{len(rows)} done, {len(left)} left: {', '.join(left)}", markup=False)
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
