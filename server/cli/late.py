"""An engine that comes later: the socket answers probes while the real engine is still being loaded."""

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Protocol

from ..errors import Closed, NotReady
from ..seam import Engine, ModelHandle, progress_text
from ..text import Embedder

_log = logging.getLogger("servax.reload")


class Reloads(Protocol):
    """What loads models anew, in a thread of its own."""

    def ask(self) -> None:
        """Begin soon; does not block."""
        ...

    def load(self, name: str) -> "Future[None]":
        """Load one model; does not block."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait for what is under way."""
        ...


class LateEngine:
    """Implements `Engine`: first "loading", then whatever the engine given to `arrive` says.

    One thread calls `arrive` or `fail`, once; any thread reads. `texts` fills together with the engine.

    Attributes:
        reloader: loads the models anew; None until they can be.
    """

    def __init__(self) -> None:
        self.texts: dict[str, Embedder] = {}
        self.failure: BaseException | None = None
        self.reloader: Reloads | None = None
        self._engine: Engine | None = None
        self._closing = False
        self._loads: set[asyncio.Future[None]] = set()

    def arrive(self, engine: Engine, texts: Mapping[str, Embedder]) -> None:
        """Hands over to the real engine."""
        self.texts.update(texts)
        self._engine = engine

    def fail(self, error: BaseException) -> None:
        """Tells that loading or warm-up failed; readiness stays false."""
        self.failure = error

    def reload(self) -> None:
        """Have the models loaded anew; nothing happens before they were loaded once."""
        if self.reloader is None or self.draining:
            _log.warning("models are loaded anew while they are served; asked before or after: left alone")
        else:
            self.reloader.ask()

    async def load(self, name: str) -> None:
        """Have one model loaded anew; returns once the new version serves.

        Raises:
            NotReady, Closed: models are not served yet, or no more.
            ServerError: as `Reloader.load`, and what the load itself raises.
        """
        if self.draining:
            raise Closed("a draining server loads nothing; it is shutting down: use another replica")
        if self.reloader is None:
            raise NotReady(
                f"models are loaded anew while they are served; {progress_text(self)}: retry later"
            )
        loading = asyncio.wrap_future(self.reloader.load(name))  # goes on if nobody waits for it any more
        self._loads.add(loading)
        try:
            await loading
        except asyncio.CancelledError:
            if self.draining:
                raise Closed(
                    f"a load ends before its server does; it is shutting down, {name!r} was not loaded: use "
                    f"another replica"
                ) from None
            raise
        finally:
            self._loads.discard(loading)

    @property
    def models(self) -> Mapping[str, ModelHandle]:
        """Served models by name; empty while loading."""
        return MappingProxyType({}) if self._engine is None else self._engine.models

    @property
    def live(self) -> bool:
        """False once loading has failed, else what the engine says."""
        return self.failure is None if self._engine is None else self._engine.live

    @property
    def lost(self) -> bool:
        """Whether no model can ever get ready."""
        return self.failure is not None and (self._engine is None or getattr(self._engine, "lost", False))

    @property
    def ready(self) -> bool:
        """What the engine says; False before it is there."""
        return self._engine is not None and self._engine.ready

    @property
    def draining(self) -> bool:
        """Whether closing has begun."""
        return self._closing or (self._engine is not None and self._engine.draining)

    def status(self) -> dict[str, Any]:
        """Where loading or warm-up stands."""
        if self._engine is not None:
            return self._engine.status()
        state = "loading" if self.failure is None else "failed"
        error = None if self.failure is None else str(self.failure)
        return {"state": state, "done": 0, "total": 0, "failed": {}, "error": error}

    async def aclose(self, drain_s: float) -> None:
        """Closes the engine if it is there; one that arrives later stays unused."""
        self._closing = True
        for one in list(self._loads):  # its answer would come after the end
            one.cancel()
        if self._engine is not None:
            await self._engine.aclose(drain_s)
