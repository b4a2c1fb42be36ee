"""The `servax` command; how its commands end is told in `exits`."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from ... import _version
from ..config import ServeConfig
from ..errors import ConfigError
from ..settings import Settings, read_settings
from . import exits
from .doctor import doctor
from .exits import EXIT_FAILED, EXIT_USAGE, exit_code
from .exits import fail as _fail
from .exits import show as _show
from .fit import fit
from .inspect import check, inspect
from .options import MODEL_PATHS, MORE_ARGUMENTS, PROGRAM_PATHS, STORE_PATHS, FlagCommand, with_flags
from .store import app as store_app
from .top import top

app = typer.Typer(
    name="servax",
    help="Serve any JAX function at any shape, and never compile on the request path.",
    epilog=exits.HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_errors = exits.ErrorConsole()

Traceback = Annotated[bool, typer.Option("--traceback", help="As servax --debug.", hidden=True)]


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, help="Print the version.", callback=lambda v: _print_version(v)
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SERVAX_DEBUG", help="Show the traceback of an error.")
    ] = False,
) -> None:
    exits.DEBUG.set(debug)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"servax {_version.__version__}")
        raise typer.Exit


@app.command(cls=FlagCommand, rich_help_panel="Serve", context_settings=MORE_ARGUMENTS)
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


@app.command(cls=FlagCommand, rich_help_panel="Serve", context_settings=MORE_ARGUMENTS)
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
    _check_store(config)
    # Until uvicorn listens to signals there is nothing to drain.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # Imported here: `--help` and usage errors answer at once.
    from ..logs import set_up_logs
    from ..tracing import Tracing
    from .console import WarmupView
    from .serving import open_socket, serve

    view = WarmupView(_errors)

    def on_failure(error: BaseException) -> None:
        exits.say(f"error: {view.rest_of(error)}", style="red")

    set_up_logs(config.log_level, config.log_format)
    tracing = Tracing() if config.traces else None
    with open_socket(config.host, config.port) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if config.tls_cert is None else "https"
        models = ", ".join(one.model for one in config.served)
        _errors.print(
            f"listening on {scheme}://{shown}:{port}, loading {models}", markup=False, soft_wrap=True
        )
        load = _loader(config, tracing, view)
        error = serve(settings, listener, load, on_failure=on_failure, tracing=tracing)
    if tracing is not None:
        tracing.close()
    code = 0 if error is None else exit_code(error)
    exits.leave(code)
    return code


def _check_store(config: ServeConfig) -> None:
    if config.use_store and config.store is not None:
        from .store_url import check_store_url

        check_store_url(config.store)


def _loader(config: ServeConfig, tracing: Any, view: Any) -> Callable[..., None]:
    def load(late: Any, metrics: Any) -> None:
        from ..fleet import wait_out
        from . import wiring
        from .reload import Reloader

        def on_progress(model: str, step: Any) -> None:
            if not late.draining:  # what a stop signal cuts short has not failed
                view(model, step)

        try:
            server, texts = wiring.build(
                config, metrics, on_progress, view.show_plan, tracing, stopped=lambda: late.draining
            )
            late.arrive(server, texts)
            if late.draining:
                return
            server.start()
            if config.strict:
                server.wait_ready()
            else:
                wait_out(server)
        finally:
            view.close()
        late.reloader = Reloader(server, config.served, texts, metrics, padded=config.refit)
        _errors.print(f"ready: {', '.join(server.models)}", markup=False, highlight=False, soft_wrap=True)

    return load


def _warmup(config: ServeConfig, as_json: bool) -> int:
    from ..metrics import Metrics
    from . import wiring
    from .console import WarmupView, warm_table

    _check_store(config)
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
    return EXIT_FAILED


def _guarded(action: Callable[[], int], traceback: bool) -> None:
    if code := exits.guarded(action, traceback=traceback):
        raise typer.Exit(code)


_LOOK, _OPERATE = "Look into a model", "Operate"
app.command(rich_help_panel=_LOOK)(fit)
app.command(rich_help_panel=_LOOK)(check)
app.command(rich_help_panel=_LOOK)(inspect)
app.command(rich_help_panel=_OPERATE)(top)
app.command(rich_help_panel=_OPERATE)(doctor)
app.add_typer(store_app, rich_help_panel=_OPERATE)


def main() -> None:
    """Entry point of the `servax` command."""
    try:
        app()
    except Exception as error:  # a bug of ours: the line says what, --debug says where
        if exits.DEBUG.get():
            raise
        exits.show(error, hint=True)
        sys.exit(exits.EXIT_UNEXPECTED)


if __name__ == "__main__":
    main()
