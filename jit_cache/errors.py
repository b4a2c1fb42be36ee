"""Errors of the program cache, as a tree.

A message states the rule, the value it got and the remedy, in that order.
"""


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
