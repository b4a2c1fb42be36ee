"""The kernel in this process: compiled, made known to XLA, tried, and called from JAX."""

import ctypes
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import KernelUnavailable
from . import crew, header, matmul
from .target import tile

# The name is in each program that calls the kernel, so another kernel needs another one.
_TARGET = "servax_panels_float32_v1"
_logger = logging.getLogger(__name__)


@functools.cache
def available() -> bool:
    """Whether programs made here may call `product`: it compiles, and a trial gives what it should."""
    if jax.default_backend() != "cpu":
        return False
    try:
        _register()
    except KernelUnavailable as error:
        _logger.info("%s", error)
        return False
    rng = np.random.default_rng(0)
    rows, width = 2 * tile().rows + 1, tile().width
    x = rng.integers(-8, 9, (rows, 24)).astype(np.float32)
    panels = rng.integers(-8, 9, (2, 3, 24, width)).astype(np.float32)
    try:
        got = np.asarray(jax.jit(functools.partial(product, features=2 * width + 1))(x, panels, np.int32(1)))
    except Exception:  # of what XLA says: an interface that refuses the kernel ends here
        _logger.warning("a trial of the kernel for products in panels failed: serving without", exc_info=True)
        return False
    wanted = np.concatenate([x @ panel for panel in panels[1]], axis=1)[:, : 2 * width + 1]
    return bool((got == wanted).all())


def product(x: jax.Array, panels: jax.Array, layer: jax.Array, *, features: int) -> jax.Array:
    """`x` times one of several matrices.

    Args:
        x: float32 `(rows, in)`.
        panels: float32 `(layers, panels, in, width)`, zeros in columns past the last.
        layer: int32 scalar, which one; clipped into them.
        features: columns of a matrix, `(panels - 1) * width + 1` to `panels * width`.

    Returns:
        float32 `(rows, features)`; a row's numbers depend on no other row.
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], features), jnp.float32)
    call: Any = jax.ffi.ffi_call(_TARGET, shape)
    y: jax.Array = call(x, panels, layer)
    return y


@functools.cache
def _register() -> Any:
    """Compile the kernel and tell XLA; what is returned has to stay alive, and does in the cache.

    Raises:
        KernelUnavailable: there is none for this processor, system or jaxlib.
    """
    import llvmlite.binding as llvm

    shape = tile()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    target = llvm.Target.from_triple(triple).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
    try:
        layout = header.read()
        parts = [f'target triple = "{triple}"', crew.source(layout, shape), matmul.source(layout, shape)]
        module = llvm.parse_assembly("\n".join(parts))
        module.verify()
    except RuntimeError as error:
        raise KernelUnavailable(
            f"LLVM must take the kernel, got {str(error)[:200]!r}: another llvmlite may; servax does without"
        ) from error
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    entry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("product"))
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(entry), platform="cpu", api_version=1)
    return engine, entry
