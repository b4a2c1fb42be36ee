"""`servax serve` without its command line: open the socket, load behind it, drain on a signal."""

import asyncio
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ...jit_cache.switches import SWITCH_S
from ..config import ServeConfig
from ..errors import ConfigError
from ..http.asgi import create_app
from ..http.protocol import HttpProtocol
from ..metrics import Metrics
from ..seam import Engine
from ..settings import Settings
from ..tracing import Tracing
from . import exits
from .late import LateEngine
from .signals import INSISTS_AFTER_S, StopSignals, Terminal, end_at_once

_log = logging.getLogger("servax.serve")

Load = Callable[[LateEngine, Metrics], None]
"""Makes the engine, hands it to `arrive`, and returns once it is warm or raises; runs in its own thread."""


# How long the end waits for a model that is still being loaded.
_LOAD_JOIN_S = 30.0


class DrainingServer(uvicorn.Server):
    """A uvicorn server whose first stop signal drains the engine while probes are still answered.

    Until the drain ends, connections stay open: readiness is 503, new work gets 503 and its connection is
    closed, admitted work is answered. Then it stops and `run` returns. What more signals do, `stops` decides.
    """

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_s: float, stops: StopSignals) -> None:
        super().__init__(config)
        self._engine = engine
        self._stops = stops
        self._drain_s = drain_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remembers the loop, for signals."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the drain at the first signal, ends the process at one that insists."""
        meaning = self._stops.heard(time.monotonic())
        if meaning == "insists":
            end_at_once(sig)
        if meaning == "echo":
            return
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._stop_and_say)

    def _stop_and_say(self) -> None:
        self.stop()
        exits.say(
            f"draining for at most {self._drain_s:g} s; a stop signal again after "
            f"{INSISTS_AFTER_S:g} s ends at once"
        )

    def stop(self) -> None:
        """Begins the drain; for the event loop's thread."""
        if self._drain is None:
            self._drain = asyncio.ensure_future(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        try:
            await self._engine.aclose(self._drain_s)
        finally:
            self.should_exit = True


def _answer_signals(stops: StopSignals) -> None:
    """After the drain: let a signal end the process; the main thread alone hears them, and may say so."""
    if threading.current_thread() is not threading.main_thread():
        return

    def answer(sig: int, frame: FrameType | None) -> None:
        if stops.heard(time.monotonic()) != "echo":
            end_at_once(sig)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, answer)


def open_socket(host: str, port: int) -> socket.socket:
    """Binds and listens, so that clients queue instead of being refused while Python still imports.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"The server needs a free address, got {host}:{port}: {error}; choose another --host or --port."
        ) from error


def serve(
    settings: Settings,
    listener: socket.socket,
    load: Load,
    *,
    on_failure: Callable[[BaseException], None] | None = None,
    tracing: Tracing | None = None,
) -> BaseException | None:
    """Serves until a signal; blocks.

    Args:
        settings: host, port, drain time and limits; with `strict` it stops when loading or warm-up fails,
            instead of staying up and not ready.
        listener: the open socket.
        load: makes and warms the engine, in a thread of its own.
        on_failure: told of such a failure at once.
        tracing: makes spans of the requests; the same object that `load` gives the engine.

    Returns:
        What made the server stop, or None after a normal drain. A model that cannot be loaded always
        stops it, and so it does if none can ever get ready; a bucket that fails to warm only if `strict`.
    """
    config = settings.config
    _check_tls(config)
    # Else the device thread waits up to 5 ms for the event loop at each step of a batch.
    sys.setswitchinterval(SWITCH_S)
    late, metrics = LateEngine(), Metrics()
    keys = tuple(key.get_secret_value() for key in config.api_key)
    fatal: list[BaseException] = []
    loading: list[threading.Thread] = []

    def work(server: DrainingServer, loop: asyncio.AbstractEventLoop) -> None:
        try:
            load(late, metrics)
        except BaseException as error:  # shown to the operator and by /v2/health, never lost in the thread
            if late.draining:
                return
            late.fail(error)
            if on_failure is not None:
                on_failure(error)
            if config.strict or late.lost:
                fatal.append(error)
                loop.call_soon_threadsafe(server.stop)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loading.append(threading.Thread(target=work, args=(server, loop), name="servax-load", daemon=True))
        loading[0].start()
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            terminal = Terminal()
            loop.add_signal_handler(
                signal.SIGHUP, lambda: server.stop() if terminal.hung_up else late.reload()
            )
        async with _grpc(config, late, metrics, keys, tracing):
            yield
        await late.aclose(0.0)

    app = create_app(
        late,
        texts=late.texts,
        metrics=metrics,
        config=config.http,
        api_keys=keys,
        settings=settings.listed(),
        lifespan=lifespan,
        tracing=tracing,
        load=late.load if config.allow_load else None,
    )
    stops = StopSignals()
    server = DrainingServer(uvicorn_config(app, config), late, config.drain_s, stops)
    server.run(sockets=[listener])
    _answer_signals(stops)
    # An interpreter that ends while a thread of it is in native code aborts, instead of exiting with 0.
    for thread in loading:
        thread.join(_LOAD_JOIN_S)
    if late.reloader is not None:
        late.reloader.join(_LOAD_JOIN_S)
    return fatal[0] if fatal else None


def _check_tls(config: ServeConfig) -> None:
    """Load the certificate once, for an error that says what is wrong with it."""
    if config.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS needs a certificate chain and its key in PEM files, got {config.tls_cert} and "
            f"{config.tls_key}: {error}; check both."
        ) from None


@asynccontextmanager
async def _grpc(
    config: ServeConfig,
    late: LateEngine,
    metrics: Metrics,
    keys: tuple[str, ...],
    tracing: Tracing | None,
) -> AsyncIterator[None]:
    """The same engine over gRPC, if a port is configured."""
    if config.grpc_port is None:
        yield
        return
    from ..rpc.service import TlsFiles, create_grpc_server, listening

    grpc_server = create_grpc_server(
        late,
        texts=late.texts,
        metrics=metrics,
        config=config.grpc,
        api_keys=keys,
        tracing=tracing,
        load=late.load if config.allow_load else None,
    )
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = TlsFiles(config.tls_cert, config.tls_key)
    async with listening(grpc_server, config.host, config.grpc_port, tls=tls) as port:
        _log.info("gRPC listens", extra={"port": port})
        yield


def uvicorn_config(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    """How uvicorn runs the application."""
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        loop="uvloop" if sys.platform != "win32" else "asyncio",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
