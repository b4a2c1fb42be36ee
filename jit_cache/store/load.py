"""Lookup, lease, trial, compile, store: everything between a fingerprint and a callable program."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..errors import OtherDevices
from ..monitor import compile_log
from .fingerprint import Fingerprint
from .report import COMPILED, LOADED
from .serialize import Codec, Executables, first_line
from .store import Store

STORE = "store"
COMPILER = "compiled"
_LEASE_S = 900.0


class Loaded(NamedTuple):
    """A program ready to call.

    Attributes:
        executable: what to call.
        source: ``store`` or ``compiled``.
        reason: why it was compiled; empty if it was loaded.
        facts: plain values kept beside it in the store, or made when it was compiled.
        seconds: how long it took, waiting for other processes included.
    """

    executable: Any
    source: str
    reason: str
    facts: Mapping[str, Any]
    seconds: float


def load_or_compile(
    store: Store | None,
    fingerprint: Fingerprint,
    compile: Callable[[], Any],  # noqa: A002
    *,
    facts_of: Callable[[Any], Mapping[str, Any]] | None = None,
    devices: Sequence[jax.Device] | None = None,
    codec: Codec | None = None,
    lease_timeout_s: float = _LEASE_S,
    unfit: Callable[[], str] = str,
) -> Loaded:
    """Take a program from the store, or compile it and put it there.

    Nothing that the store does can make this fail: only ``compile`` may raise.

    Args:
        store: where to look; None compiles.
        fingerprint: the program's key.
        compile: makes the executable; called at most once.
        facts_of: plain JSON values worth keeping about a fresh executable; ``compile_s`` is added.
        devices: where it runs, in the mesh's order; None takes its own.
        codec: how executables become bytes; default: JAX's.
        lease_timeout_s: most seconds to wait for another process that compiles the same program.
        unfit: asked after ``compile`` why the program may not be stored; empty if it may.

    Raises:
        Exception: whatever ``compile`` raises.
    """
    begin = time.perf_counter()
    if store is None:
        executable = compile()
        seconds = time.perf_counter() - begin
        facts = {"compile_s": seconds, **({} if facts_of is None else facts_of(executable))}
        return Loaded(executable, COMPILER, "there is no store", facts, seconds)
    attempt = Attempt(store, fingerprint, devices, codec if codec is not None else Executables())
    if (found := attempt.load(begin)) is not None:
        return found
    if attempt.marked:
        return attempt.compile(compile, facts_of, begin, unfit)[0]
    with store.lease(fingerprint.digest, lease_timeout_s):
        # Another process may have stored it while this one waited.
        if store.writable and (found := attempt.load(begin)) is not None:
            return found
        made, payload = attempt.compile(compile, facts_of, begin, unfit)
        saved = attempt.save(made, payload)
    if saved:
        store.trust.rehearse(fingerprint, made.facts, payload)
    return made


class Attempt:
    """One program's way through the store."""

    def __init__(
        self,
        store: Store,
        fingerprint: Fingerprint,
        devices: Sequence[jax.Device] | None,
        codec: Codec,
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._devices = devices
        self._codec = codec
        self._refused = ""
        self._elsewhere = ""
        self.marked = ""

    def load(self, begin: float) -> Loaded | None:
        """The program from the store; None if it must be compiled."""
        stored = self._store.get(self._fingerprint)
        if stored is None:
            return None
        if stored.not_storable is not None:
            self.marked = stored.not_storable
            return None
        tried = self._store.trust.check(self._fingerprint, stored.facts, stored.payload)
        if not tried.passed:
            self._refuse("deadly", tried.reason)
            return None
        try:
            executable = self._codec.load(stored.payload, self._devices)
        except OtherDevices as error:  # the entry is good for its own
            self._elsewhere = first_line(error)
            self._store.ledger.warn("elsewhere", f"a stored program is compiled anew: {error}")
            return None
        except Exception as error:  # the runtime's own; a bad entry must not stop the start
            self._refuse("unloadable", f"{type(error).__name__}: {first_line(error)}")
            return None
        self._store.ledger.record(self._fingerprint.digest, LOADED)
        return Loaded(executable, STORE, "", stored.facts, time.perf_counter() - begin)

    def _refuse(self, kind: str, reason: str) -> None:
        self._refused = reason
        self._store.refuse(self._fingerprint, kind, reason)

    def compile(
        self,
        compile: Callable[[], Any],  # noqa: A002
        facts_of: Callable[[Any], Mapping[str, Any]] | None,
        begin: float,
        unfit: Callable[[], str] = str,
    ) -> tuple[Loaded, bytes]:
        """Compile, and write the program down; the bytes are empty if that cannot be done."""
        compiling, log = time.perf_counter(), compile_log()
        executable = compile()
        facts: dict[str, Any] = {"compile_s": time.perf_counter() - compiling}
        payload = b""
        if why := unfit():
            self._elsewhere = why
        elif log.from_cache and jax.default_backend() == "cpu":
            # See `relocate`: what was loaded has no machine code any more when it is written down.
            self._elsewhere = "it was in JAX's own cache, from which nothing can be stored"
            self._store.ledger.warn(
                "cached",
                f"on a CPU a program is stored where it is compiled; one came out of JAX's own cache in "
                f"{jax.config.values.get('jax_compilation_cache_dir')}, and none from there will be in the "
                f"store: unset JAX_COMPILATION_CACHE_DIR, the store does what it did",
            )
        elif not self.marked:
            try:
                payload, noted = self._codec.dump(executable, self._devices)
                facts |= noted
            except Exception as error:  # NotStorable, or a backend without serialization
                self.marked = str(error) or type(error).__name__
                self._store.mark_not_storable(self._fingerprint, self.marked)
        if facts_of is not None:
            facts |= facts_of(executable)
        digest = self._fingerprint.digest
        marked = f"cannot be stored: {self.marked}" if self.marked else ""
        reason = self._refused or self._elsewhere or marked or "no entry"
        self._store.ledger.record(digest, COMPILED, reason)
        reason = self._store.ledger.reason(digest)
        return Loaded(executable, COMPILER, reason, facts, time.perf_counter() - begin), payload

    def save(self, made: Loaded, payload: bytes) -> bool:
        """Store a fresh program; after a refusal only if the fresh one can be loaded."""
        if not payload or self._elsewhere:
            return False
        if self._refused and (reason := self._unloadable(made.facts, payload)):
            # Stored anyway it would be refused and compiled at every start.
            self._store.mark_not_storable(self._fingerprint, f"this host cannot load it: {reason}")
            return False
        return self._store.put(self._fingerprint, payload, made.facts)

    def _unloadable(self, facts: Mapping[str, Any], payload: bytes) -> str:
        tried = self._store.trust.try_now(self._fingerprint, facts, payload)
        if not tried.passed:
            return tried.reason
        try:
            self._codec.load(payload, self._devices)
        except Exception as error:  # the runtime's own
            return f"{type(error).__name__}: {first_line(error)}"
        return ""
