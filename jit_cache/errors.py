"""Errors of the program cache, as a tree.

A message states the rule, the value it got and the remedy, in that order.
"""

import re

_CALL = re.compile(r"missing (\d+|a) required|unexpected keyword argument|positional arguments? but")


def call_remedy(error: BaseException) -> str:
    """What to do about a call with other arguments than a function takes, to end a message; else nothing."""
    if not isinstance(error, TypeError) or _CALL.search(str(error)) is None:
        return ""
    return ": bind the argument with functools.partial, or declare it in inputs"


class JitCacheError(Exception):
    """Root of this folder's errors."""


class SignatureError(JitCacheError, ValueError):
    """A declaration of inputs, outputs or limits cannot be understood or kept."""


class InputError(JitCacheError, ValueError):
    """One item does not match the declared inputs."""


class ItemTooLarge(InputError):
    """One item is larger than its limit on some axis."""


class NonFinite(InputError):
    """An item holds NaN or infinity where the servable refuses them."""


class CompileError(JitCacheError, RuntimeError):
    """The compiler, or the tracing before it, failed for one bucket."""


class SealedError(JitCacheError, RuntimeError):
    """Something asked for a program that is not warm while the cache is sealed."""


class WarmupError(JitCacheError, RuntimeError):
    """Warm-up ended without the programs it was asked for."""


class OutputError(JitCacheError, RuntimeError):
    """The model returned what its signature does not allow."""


class StoreError(JitCacheError, RuntimeError):
    """The program store cannot be used as asked."""


class StoreUnsafe(StoreError):
    """The store's directory or its key could be changed by somebody else."""


class EntryError(StoreError):
    """A stored entry is not what this store wrote.

    Attributes:
        kind: one word for reports, such as ``torn`` or ``unsigned``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FingerprintError(StoreError, ValueError):
    """Something that decides a program's key cannot be described."""


class NotStorable(StoreError):
    """A program cannot be written down so that another process could run it."""


class LoadRefused(StoreError):
    """A stored program is intact but cannot be loaded on this host or these devices."""


class OtherDevices(LoadRefused):
    """A program is intact, and of other devices than those it was asked for; it cannot be moved there."""


class UnsafePaddingError(JitCacheError, RuntimeError):
    """Padding, or a neighbour in the batch, changes what a model answers."""


class MemoryPlanError(JitCacheError, RuntimeError):
    """What must be served does not fit the memory there is."""
