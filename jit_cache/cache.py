"""Programs in memory: one compile for each bucket, however many ask at once."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..bucketing import Bucket
from .compiler import CompileService
from .errors import SealedError
from .program import Program


class ProgramCache:
    """The programs of one servable.

    Reads of ready programs take no lock. A compile is requested once for each bucket (single flight): all
    who ask while it runs share its future, a failure included; failures are not kept, so a later call
    tries again.

    Args:
        compile_fn: makes the program of a bucket; called in the compile thread only.
        service: the compile thread.
    """

    def __init__(self, compile_fn: Callable[[Bucket], Program], service: CompileService) -> None:
        self._compile = compile_fn
        self._service = service
        self._lock = threading.Lock()
        self._ready: dict[Bucket, Program] = {}
        self._pending: dict[Bucket, Future[Program]] = {}

    def ready(self) -> tuple[Bucket, ...]:
        """Buckets whose programs are in memory."""
        return tuple(self._ready)

    def get(self, bucket: Bucket) -> Program:
        """The program of a warm bucket.

        Raises:
            SealedError: if it is not warm, naming the axis that missed and the nearest warm bucket.
        """
        program = self._ready.get(bucket)
        if program is None:
            raise SealedError(_explain_miss(bucket, list(self._ready)))
        return program

    def find(self, bucket: Bucket) -> Program | None:
        """The program of a bucket; None if it is not warm."""
        return self._ready.get(bucket)

    def install(self, program: Program) -> None:
        """Have another program run in its bucket from the next batch on."""
        with self._lock:
            self._ready[program.bucket] = program

    def discard(self, bucket: Bucket) -> None:
        """Let a program go; a batch that runs it still holds it."""
        with self._lock:
            self._ready.pop(bucket, None)

    def request(self, bucket: Bucket) -> "Future[Program]":
        """Have a bucket compiled in the compile thread, unless it is warm or under way.

        Returns:
            A future of the program, shared by all who asked; do not cancel it.
        """
        with self._lock:
            if (program := self._ready.get(bucket)) is not None:
                done: Future[Program] = Future()
                done.set_result(program)
                return done
            pending = self._pending.get(bucket)
            # A failed one wakes its waiters before it is taken out; it is no answer to who asks again.
            if pending is not None and not pending.done():
                return pending
            future = self._service.submit(lambda: self._build(bucket))
            self._pending[bucket] = future
        # Outside the lock: a future that is already done runs its callback here and now.
        future.add_done_callback(lambda _: self._settled(bucket, future))
        return future

    def _build(self, bucket: Bucket) -> Program:
        program = self._compile(bucket)
        with self._lock:
            self._ready[bucket] = program
        return program

    def _settled(self, bucket: Bucket, future: "Future[Program]") -> None:
        with self._lock:
            if self._pending.get(bucket) is future:
                del self._pending[bucket]


def _explain_miss(bucket: Bucket, ready: Sequence[Bucket]) -> str:
    rule = f"only warm programs are run; bucket {bucket} is not warm"
    warm = [one for one in ready if one.axes == bucket.axes]
    if not warm:
        return f"{rule}, nor is any other over {', '.join(bucket.axes)}: warm up first"
    nearest = min(warm, key=lambda one: sum(abs(a - b) for a, b in zip(one.sizes, bucket.sizes, strict=True)))
    missed = [
        f"{axis}={size}"
        for axis, size in zip(bucket.axes, bucket.sizes, strict=True)
        if all(one[axis] != size for one in warm)
    ]
    where = f" (no warm bucket has {', '.join(missed)})" if missed else ""
    return f"{rule}{where}; the nearest warm one is {nearest}: run in that, or warm it first"
