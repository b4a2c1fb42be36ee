"""Several servers as one engine: they warm up one after another, serve side by side and end together."""

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Protocol, Self, runtime_checkable

from ..jit_cache import Servable, WarmupReport
from .errors import Closed, ConfigError, NotReady
from .life import Life
from .seam import Engine, ModelHandle

# Each program has a time of its own; a part that takes longer than a day is not waited for.
_LONG_S = 86_400.0


class Part(Engine, Protocol):
    """What a fleet asks of its servers; `Server` and `GenerationServer` give it."""

    @property
    def warm(self) -> bool: ...  # noqa: D102
    @property
    def lost(self) -> bool: ...  # noqa: D102
    @property
    def reports(self) -> Mapping[str, WarmupReport]: ...  # noqa: D102

    def start(self) -> Any:
        """Begin to warm up."""
        ...

    def wait_ready(self, timeout_s: float = 900.0) -> Any:
        """Block until it is ready; raises what keeps it from that."""
        ...

    def wait_over(self, timeout_s: float) -> bool:
        """Block until its warm-up has come to its end, however it went; whether it has."""
        ...

    def close(self, drain_s: float = 30.0) -> None:
        """Drain and end."""
        ...


@runtime_checkable
class Replaces(Protocol):
    """An engine whose models may be swapped while they are served."""

    def replace(self, servable: Servable, *, timeout_s: float) -> object:
        """Serve this version under its name from now on; blocks until the old one has let go."""
        ...


def wait_out(part: Part) -> None:
    """Block until a server is ready, or has failed and will not go on: the error names all that failed.

    Raises:
        Exception: as its `wait_ready`, which raises at the first failure.
    """
    try:
        part.wait_ready(_LONG_S)
    except Exception:
        if part.wait_over(_LONG_S):
            part.wait_ready(0.0)
        raise


class Fleet(Life):
    """Servers in one process, on one device.

    Their warm-ups follow one another, since a program that is timed beside a compile seems slow. One that
    fails keeps the fleet from getting ready, and not the others from serving.

    Args:
        parts: not yet started; names of their models are distinct.

    Raises:
        ConfigError: if two have a model of one name, or there is none.
    """

    def __init__(self, *parts: Part) -> None:
        super().__init__()
        names = [name for part in parts for name in part.models]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a server needs models with distinct names; got {names}: set name")
        self._parts = parts
        self._settled = threading.Event()
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, name="servax-fleet", daemon=True)

    def _begin(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        for part in self._parts:
            if self.draining:
                break
            try:
                part.start()
                wait_out(part)
            except Exception as error:  # shown by wait_ready and by the part's own status
                self._errors.append(error)
        self._settled.set()

    def _end(self, drain_s: float, *, started: bool) -> None:
        with ThreadPoolExecutor(len(self._parts), "servax-close") as pool:
            list(pool.map(lambda part: part.close(drain_s), self._parts))
        if started:
            self._thread.join()

    def _hurry(self) -> None:
        for part in self._parts:
            with contextlib.suppress(Exception):
                part.close(0.0)

    def wait_ready(self, timeout_s: float = 900.0) -> Self:
        """Block until every part is ready, or has failed to get so.

        Raises:
            Exception: what the first part that failed raises.
            NotReady: the timeout passes first.
        """
        if self._state == "new":
            raise Closed("a server is started before it gets ready; this one is new: call start()")
        if not self._settled.wait(timeout_s):
            status = self.status()
            raise NotReady(
                f"the server was to be ready within {timeout_s:g} s; {status['done']} of {status['total']} "
                f"programs are warm: wait on, or warm up ahead of time"
            )
        if self._errors:
            raise self._errors[0]
        return self

    def wait_over(self, timeout_s: float) -> bool:
        """Block until every part's warm-up has come to its end, however it went; whether it has."""
        return self._settled.wait(timeout_s) and all(part.wait_over(timeout_s) for part in self._parts)

    def replace(self, servable: Servable, *, timeout_s: float = 300.0) -> object:
        """Swap a new version of a model in, see `Server.replace`.

        Raises:
            ConfigError: if no part that can do so serves a model of that name; otherwise as `Server.replace`.
        """
        for part in self._parts:
            if servable.name in part.models and isinstance(part, Replaces):
                return part.replace(servable, timeout_s=timeout_s)
        raise ConfigError(
            f"a new version has the name of a model of tensors that is served, {sorted(self.models)}; got "
            f"{servable.name!r}: rename it"
        )

    @property
    def lost(self) -> bool:
        """Whether none of the models can ever get ready."""
        return self._settled.is_set() and all(part.lost for part in self._parts)

    @property
    def models(self) -> Mapping[str, ModelHandle]:
        """Served models by name."""
        return MappingProxyType({name: one for part in self._parts for name, one in part.models.items()})

    @property
    def reports(self) -> Mapping[str, WarmupReport]:
        """Warm-up reports by model name."""
        return {name: one for part in self._parts for name, one in part.reports.items()}

    @property
    def live(self) -> bool:
        """Whether every part can still answer."""
        return all(part.live for part in self._parts)

    @property
    def ready(self) -> bool:
        """Whether every model is ready and requests are taken."""
        return self._state == "started" and all(part.ready for part in self._parts)

    @property
    def warm(self) -> bool:
        """Whether every program was made."""
        return all(part.warm for part in self._parts)

    def status(self) -> dict[str, Any]:
        """State, progress and failures of all parts together."""
        each = [part.status() for part in self._parts]
        return {
            "state": self._state_word([one["state"] for one in each]),
            "done": sum(one["done"] for one in each),
            "total": sum(one["total"] for one in each),
            "warm": self.warm,
            "cold_hits": sum(one.get("cold_hits", 0) for one in each),
            "failed": {program: why for one in each for program, why in one["failed"].items()},
            "error": next((one["error"] for one in each if one["error"]), None),
        }

    def _state_word(self, words: list[str]) -> str:
        if self._state != "started":
            return self._state
        if self.ready:
            return "ready"
        return next((word for word in ("stalled", "broken", "failed") if word in words), "warming")
