"""What a model does about its programs beyond making them: what stays, what comes back, the memory plan."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from ...bucketing import Bucket, CostModel
from ...jit_cache import JitCacheError, Program
from ...jit_cache.device_memory import HOST_SLACK_BYTES
from ...jit_cache.memory import MemoryPlan, plan_memory, staging_bytes
from ...jit_cache.residency import Residency
from ...jit_cache.schedule import saved_by_bucket
from ...jit_cache.scratch import scratch_without_weights
from ..batching.dispatcher import Dispatcher
from ..errors import ModelError
from ..events import ASKED
from .programs import Programs

if TYPE_CHECKING:
    from .model import Model

_log = logging.getLogger(__name__)


class Keeper:
    """Programs of one model over time.

    Args:
        model: whose.
        options: see `Programs`.
        dispatcher: takes the first run of a program that came in the background.

    Attributes:
        residency: the books of what is in memory; device thread only.
        plan: the memory plan, if one was made.
    """

    def __init__(self, model: "Model", options: Programs, dispatcher: Dispatcher) -> None:
        self._model, self._options, self._dispatcher = model, options, dispatcher
        self.residency = Residency(model.servable.grid, model.order[:1], options.cache_bytes)
        self.plan: MemoryPlan | None = None
        self._asked: set[Bucket] = set()

    # -- device thread -------------------------------------------------------------------------------

    def opened(self, bucket: Bucket) -> list[Bucket]:
        """A program is planned with from now on; which others must leave."""
        return self.residency.opened(bucket, self._model.cache.get(bucket).facts.code_bytes)

    def launched(self, rows: int, sizes: tuple[int, ...]) -> None:
        """A batch of so many rows, none larger than `sizes`, was launched somewhere."""
        if self.residency.complete:
            return
        wanted = self.residency.launched(rows, sizes)
        if wanted is not None and self._options.policy != "strict":
            self._ask(wanted)

    # -- any thread ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """A request waits and there is no program at all: have the covering one made."""
        self._ask(self._model.order[0])

    def _ask(self, bucket: Bucket) -> None:
        if bucket in self._asked:
            return
        self._asked.add(bucket)
        self._model.maker.causes[bucket] = ASKED
        try:
            future = self._model.cache.request(bucket)
        except JitCacheError:  # the compile service is closed: the server ends
            return
        future.add_done_callback(partial(self._arrived, bucket))

    def _arrived(self, bucket: Bucket, made: "Future[Program]") -> None:
        """A program was made in the background: have it timed, from where on it is planned with."""
        from ..batching.device import Probe

        if made.cancelled():
            return
        error = made.exception()
        if error is not None:
            self._failed(bucket, error)
            return
        timed: Future[float] = Future()
        timed.add_done_callback(partial(self._timed, bucket))
        probe = Probe(self._model, made.result(), timed)
        try:
            self._dispatcher.post(probe)
        except Exception as closed:  # the server ends
            probe.fail(closed)

    def _timed(self, bucket: Bucket, timed: "Future[float]") -> None:
        error = timed.exception()
        if error is None:
            self._asked.discard(bucket)  # it may leave, and be asked for again
        else:
            self._failed(bucket, error)

    def _failed(self, bucket: Bucket, error: BaseException) -> None:
        # It stays among those asked for, so that no later request tries the same again,
        _log.warning("%s: bucket %s cannot be made: %s", self._model.name, bucket, error)
        if self._model.batcher.planner is None and not self._model.left:
            # unless nothing else can answer: who waits is told, and who comes next has it tried again.
            self._asked.discard(bucket)
            self._dispatcher.drop_waiting(
                self._model.lane, lambda: ModelError(f"a model must compile before it answers; {error}")
            )

    # -- compile thread ------------------------------------------------------------------------------

    def make_early(self, bucket: Bucket, leaves: Sequence[Any]) -> Program:
        """A program before the weights are on the device; the warm-up takes it over."""
        return self._model.maker.early(bucket, leaves, keep=bucket in self._model.order)

    def make_plan(self, budget_bytes: int) -> MemoryPlan:
        """Compile every program without weights, and choose those that fit; nothing is allocated.

        Buckets that do not fit leave the model's warm-up; one that does not compile stays, and fails there.

        Raises:
            MemoryPlanError: if the weights and the covering program do not fit.
        """
        model = self._model
        servable = model.servable
        planned: dict[Bucket, Program] = {}
        for bucket in model.order:
            try:
                planned[bucket] = self.make_early(bucket, servable.abstract_leaves)
            except Exception as error:  # named again, under its bucket, when it is warmed
                _log.debug("%s: bucket %s is not in the plan: %s", model.name, bucket, error)
        shapes = (self._options.shapes or {}).get(servable.name, ())
        on_cpu = servable.platform == "cpu"
        plan = self.plan = plan_memory(
            {bucket: program.facts for bucket, program in planned.items()},
            weights_bytes=servable.weights_bytes,
            budget_bytes=budget_bytes,
            staging_bytes=staging_bytes(servable, planned),
            scratch_bytes=self._scratch(planned, budget_bytes),
            slack_bytes=HOST_SLACK_BYTES if on_cpu else 0,
            values=saved_by_bucket(servable.grid, shapes, _guessed_s(planned)) if shapes else None,
        )
        for bucket in plan.dropped:
            model.maker.drop_early(bucket)
        model.narrow([bucket for bucket in model.order if bucket not in plan.dropped])
        return plan

    def _scratch(self, programs: Mapping[Bucket, Program], budget_bytes: int) -> dict[Bucket, int]:
        """As measured by an earlier start, or now by runs without weights."""
        maker = self._model.maker
        known = {
            one: size for one, program in programs.items() if (size := maker.scratch(program)) is not None
        }
        new = {one: program for one, program in programs.items() if one not in known}
        return known | scratch_without_weights(self._model.servable, new, most_bytes=budget_bytes)


def _guessed_s(programs: Mapping[Bucket, Program]) -> Callable[[Bucket], float]:
    """Seconds of each bucket from the work of its program, before anything ran."""
    cost = CostModel()
    for bucket, program in programs.items():
        if program.facts.flops > 0:
            cost.set_prior(bucket, flops=program.facts.flops, bytes=program.facts.bytes_accessed)
    return cost.seconds
