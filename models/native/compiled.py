"""From LLVM assembly to a function that XLA can call."""

import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..errors import KernelUnavailable

# Several threads may load the first models or trace the first programs, and XLA takes a name once.
asking = threading.Lock()
_logger = logging.getLogger(__name__)


def usable(what: str, made: Callable[[], bool]) -> bool:
    """Whether programs made here may call a kernel. Hold `asking`, and keep the answer.

    Args:
        what: the kernel is for, to name it in the log.
        made: registers the kernel, and says whether a trial gives what it should. It may raise anything: then
            servax does without, and the log says why.
    """
    if jax.default_backend() != "cpu":
        return False
    try:
        with jax.ensure_compile_time_eval():  # who asks first may be tracing
            return made()
    except KernelUnavailable as error:
        _logger.info("%s", error)
    except Exception:  # of what XLA says: an interface that refuses the kernel ends here
        _logger.warning("the kernel for %s failed: serving without", what, exc_info=True)
    return False


class Handler(NamedTuple):
    """What XLA may be told of.

    Attributes:
        target: the name by which programs call it. It is in each program, so that another kernel needs
            another name.
        entry: the name of the function.
        parts: of one module, in LLVM assembly; functions that LLVM has on every machine need no declaration.
        passes: whether LLVM improves them first, which takes 0.1 s and leaves nothing to a plain loop.
    """

    target: str
    entry: str
    parts: list[str]
    passes: bool = True


def register(handler: Handler) -> None:
    """Compile a handler for this machine's processor and tell XLA of it.

    Raises:
        KernelUnavailable: LLVM does not take it.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_process_triple()
    module, machine = translated(
        handler, triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address(handler.entry))
    jax.ffi.register_ffi_target(handler.target, jax.ffi.pycapsule(function), platform="cpu", api_version=1)
    # The engine owns the code, whose address XLA keeps for good. A list of this module would be looked at
    # when a model that calls the kernel is told by its code.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


def translated(handler: Handler, triple: str, cpu: str, features: str = "") -> tuple[Any, Any]:
    """A handler as a module of LLVM's, improved, and the machine for which it makes code of it.

    Args:
        handler: what is compiled.
        triple: LLVM's name of a kind of machine and system, whose target is initialized.
        cpu: LLVM's name of the processor.
        features: that it has or lacks besides, as LLVM takes them.

    Raises:
        KernelUnavailable: LLVM does not take it.
    """
    import llvmlite.binding as llvm

    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True
    )
    try:
        module = llvm.parse_assembly("\n".join([f'target triple = "{triple}"', *handler.parts]))
        module.verify()
    except RuntimeError as error:
        raise KernelUnavailable(
            f"LLVM must take the kernel {handler.entry}, got {str(error)[:200]!r}: another llvmlite may; "
            "servax does without"
        ) from error
    if handler.passes:
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        builder.getModulePassManager().run(module, builder)
    return module, machine


def with_reference(call: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, whose derivatives are those of `reference`: XLA knows none of a kernel."""
    whole = jax.custom_jvp(call)

    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return whole(*primals), jax.jvp(reference, primals, tangents)[1]

    whole.defjvp(derivative)
    return whole
