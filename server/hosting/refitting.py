"""A re-fit joined to a model: its programs, its device thread, its traffic."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from ...bucketing import Grid
from ...jit_cache import Program
from ..batching.clock import Clock
from ..batching.device import Swap
from ..batching.dispatcher import Dispatcher
from .model import Model
from .refit import RefitPolicy, Refitter, Traffic


def refitter(
    model: Model,
    policy: RefitPolicy,
    dispatcher: Dispatcher,
    clock: Clock,
    probe: Callable[[Model, Program], float],
) -> Refitter:
    """Have a model's traffic recorded, and make anew what no longer fits it; not started yet."""
    model.traffic = Traffic(model.servable.signature.axes, policy.half_life_s)

    def swap(grid: Grid, timeout_s: float) -> None:
        job = Swap(model, grid, Future())
        dispatcher.post(job)
        job.done.result(timeout_s)

    return Refitter(
        policy,
        grid=lambda: model.grid,
        limits=model.limits,
        traffic=model.traffic,
        now_s=clock.now,
        request=model.cache.request,
        probe=partial(probe, model),
        swap=swap,
    )
