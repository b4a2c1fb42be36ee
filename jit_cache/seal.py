"""Sealing: after warm-up nothing in the process may be traced or compiled, except by the compile thread.

Wraps JAX's public switch ``jax_no_tracing``. It is process-wide, so whoever embeds servax in a larger
program must ask for it; `servax serve` does.
"""

import contextlib
import re
import threading
from collections.abc import Iterator

import jax

from .errors import SealedError

_lock = threading.Lock()
_holders = 0
_before = False
_TRACED = re.compile(r"re-tracing function (?P<name>.+?) for `")


def seal_process() -> None:
    """Forbid tracing in the whole process. Calls nest: as many `unseal_process` lift it."""
    global _holders, _before
    with _lock:
        _holders += 1
        if _holders == 1:
            _before = bool(getattr(jax.config, "jax_no_tracing", False))
            jax.config.update("jax_no_tracing", True)


def unseal_process() -> None:
    """Take one `seal_process` back; without one it does nothing."""
    global _holders
    with _lock:
        if _holders == 0:
            return
        _holders -= 1
        if _holders == 0:
            jax.config.update("jax_no_tracing", _before)


def process_sealed() -> bool:
    """Whether tracing is forbidden in this process now."""
    return _holders > 0


def open_seal() -> contextlib.AbstractContextManager[None]:
    """Allow tracing in the calling thread for the length of a block; for the compile thread only."""
    context: contextlib.AbstractContextManager[None] = jax.no_tracing(False)
    return context


@contextlib.contextmanager
def explain_sealed(what: str) -> Iterator[None]:
    """Turn JAX's error about forbidden tracing into one that says what to do.

    Raises:
        SealedError: naming the function that would have been traced.
    """
    try:
        yield
    except RuntimeError as error:
        if "no_tracing" not in str(error):
            raise
        match = _TRACED.search(str(error))
        name = match["name"] if match else "a function"
        raise SealedError(
            f"nothing is traced or compiled after warm-up; {what} tried to trace {name}: do that work in "
            f"the model, in NumPy, or before the server is ready (servax serve --no-seal lifts the rule)"
        ) from error
