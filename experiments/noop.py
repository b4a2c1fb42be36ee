"""A model that does nothing on a device that costs nothing, or a fixed time, or fails on command."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..bucketing import Bucket
from ..jit_cache import Program, ProgramFacts, Servable

FACTS = ProgramFacts(
    compile_s=0.0, flops=0.0, bytes_accessed=0.0, argument_bytes=0, output_bytes=0, temp_bytes=0, code_bytes=0
)
Inputs = Mapping[str, np.ndarray]


def noop_servable(rows: int = 64, length: int = 16) -> Servable:
    """`x: float32[length]` comes back as it is; the batch ladder is powers of two, the length is fixed."""
    return Servable(
        lambda x: x,
        inputs={"x": f"float32[{length}]"},
        limits={"batch": rows},
        name="noop",
    )


def rss_bytes(pid: int | None = None) -> int:
    """Resident memory of a process, of this one by default (Linux)."""
    pages = Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class FixedDevice:
    """Programs that hand their input back.

    Args:
        seconds: what each run takes, asleep.
        fails: asked with each run's inputs; a string is the message of the error that the run raises.
    """

    def __init__(self, seconds: float = 0.0, fails: Callable[[Inputs], str | None] | None = None) -> None:
        self._seconds = seconds
        self._fails = fails
        self.runs = 0
        self.refuse_compiles = threading.Event()

    def compile(self, servable: Servable, bucket: Bucket, leaves: Sequence[jax.Array]) -> Program:
        """The program of a bucket, for `Server(compile_program=)`; raises while `refuse_compiles` is set."""
        if self.refuse_compiles.is_set():
            raise RuntimeError(f"no program for {bucket}, as the experiment wants")

        def execute(_: Any, inputs: Inputs) -> list[Any]:
            self.runs += 1
            if self._fails is not None and (message := self._fails(inputs)):
                raise RuntimeError(message)
            if self._seconds:
                time.sleep(self._seconds)
            return [inputs["x"].copy()]

        return Program(bucket, execute, leaves, FACTS)
