"""The end of a warm-up: what traces left behind is dropped, and the process is sealed if that is wanted."""

import gc

import jax

from ..jit_cache import CompileService, seal_process, unseal_process
from ..jit_cache.device_memory import trim_heap


def settle(compiler: CompileService, *, seal: bool) -> bool:
    """From now on compiles are background work.

    Args:
        compiler: who compiled.
        seal: forbid tracing in the whole process, which is ours: its jitted functions are through. Programs
            stay as they are.

    Returns:
        Whether the process was sealed; `unsettle` takes it back.
    """
    compiler.warmed()
    if seal:
        jax.clear_caches()
    trim_heap()
    if seal:
        # What JAX and the models hold lives as long as the process: a full collection that looks through it
        # stops every thread for about 0.1 s, which was the p99 of refusals under overload.
        gc.freeze()
        seal_process()
    return seal


def unsettle() -> None:
    """The process is not ours alone any more."""
    gc.unfreeze()
    unseal_process()
