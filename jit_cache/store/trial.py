"""The first load under an unseen environment, in a child process: a bad executable can kill its process.

The parent writes one line of JSON and then the program to the child's standard input; the child loads it,
says ``loaded``, calls it once with zeros and says ``ran``. A child that dies of a signal or hangs before
``loaded`` has failed; one that raises has only failed to prove anything, since this process can catch that.

Programs may call functions that XLA has to be told of first (`jax.ffi.register_ffi_target`). So the child
first calls what installed packages name in the entry point group ``servax.custom_calls``: functions without
arguments that tell it.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

CUSTOM_CALLS = "servax.custom_calls"
_LOADED = b"loaded"
_TIMEOUT_S = 30.0
_LARGEST_CALL_BYTES = 1 << 30
_MOST_ONES = 1 << 16  # numbers of an array; larger ones are weights


class TrialResult(NamedTuple):
    """How a trial ended.

    Attributes:
        passed: whether the program may be loaded in this process.
        reason: why not, or why nothing was proved.
        proved: whether the outcome speaks for the whole environment.
    """

    passed: bool
    reason: str = ""
    proved: bool = True


Trial = Callable[[bytes], TrialResult]


def run_trial(payload: bytes, *, timeout_s: float = _TIMEOUT_S) -> TrialResult:
    """Load a program in a child process and see whether the child lives.

    Args:
        payload: what `serialize.dump` returned, from an entry whose signature was checked.
        timeout_s: most seconds for the child, its start included.
    """
    if not sys.executable:
        return TrialResult(True, "no trial: this process has no Python interpreter to start", False)
    if jax.default_backend() not in ("cpu", "gpu"):
        return TrialResult(True, "no trial: this process holds the device alone", False)
    if jax.process_count() > 1:
        return TrialResult(True, "no trial: a child process has devices of other numbers", False)
    settings = {
        name: getattr(jax.config, name, None)
        for name in ("jax_platforms", "jax_num_cpu_devices", "jax_enable_x64")
    }
    command = [sys.executable, "-P", "-m", __name__]
    # The child finds modules where this process does, and leaves the device's memory to it.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    try:
        done = subprocess.run(
            command,
            input=json.dumps(settings).encode() + b"\n" + payload,
            capture_output=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        if _LOADED in (late.stdout or b""):
            return TrialResult(True, f"its first call took more than {timeout_s:g} s")
        return TrialResult(False, f"loading it in a child process took more than {timeout_s:g} s")
    except OSError as error:
        return TrialResult(True, f"no trial: {error}", False)
    return _judge(done.returncode, done.stdout, done.stderr)


def _judge(returncode: int, stdout: bytes, stderr: bytes) -> TrialResult:
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return TrialResult(False, f"loading it killed a child process with {name}")
    if _LOADED in stdout:
        return TrialResult(True)
    last = stderr.decode(errors="replace").strip().rsplit("\n", 1)[-1][:300]
    # Not fatal to the child, so not to this process either, which may have what the child lacked (memory).
    return TrialResult(True, f"a child process could not load it: {last or returncode}", False)


def _child() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    for name, value in settings.items():
        if value is not None:
            jax.config.update(name, value)
    from .serialize import load

    _tell_of_custom_calls()
    program = load(sys.stdin.buffer.read())
    print(_LOADED.decode(), flush=True)
    if (arguments := _arguments(program)) is not None:
        positional, named = arguments
        jax.block_until_ready(program(*positional, **named))
        print("ran", flush=True)


def _tell_of_custom_calls() -> None:
    for point in importlib.metadata.entry_points(group=CUSTOM_CALLS):
        try:
            point.load()()
        except Exception as error:  # whatever a package does; a program that needs it says so itself
            print(f"{CUSTOM_CALLS} {point.name}: {error!r}", file=sys.stderr)


def _arguments(program: Any) -> Any:
    """Zeros, and ones where small arrays hold integers: a mask of zeros may leave out all there is to try."""
    import numpy as np

    def argument(one: Any) -> Any:
        real = one.dtype.kind in "biu" and int(np.prod(one.shape)) <= _MOST_ONES
        return (np.ones if real else np.zeros)(one.shape, one.dtype)

    infos = jax.tree.leaves(program.args_info, is_leaf=lambda one: hasattr(one, "shape"))
    if sum(int(np.prod(one.shape)) * one.dtype.itemsize for one in infos) > _LARGEST_CALL_BYTES:
        return None
    return jax.tree.map(argument, program.args_info, is_leaf=lambda one: hasattr(one, "shape"))


if __name__ == "__main__":
    _child()
