"""Programs that were made, as the metrics count them and the log of events tells them."""

from collections.abc import Callable

from ...jit_cache import WARMUP, WarmupStep
from ..events import CAUSES, ProgramEvent, made_now
from ..metrics import Metrics

OnProgress = Callable[[str, WarmupStep], None]


def compile_counter(metrics: Metrics) -> Callable[[str, float], None]:
    """Counts what XLA compiles; of what no warm-up step tells, it makes an event too."""

    def count(phase: str, seconds: float) -> None:
        metrics.compile(phase, seconds, "compiled")
        if phase != WARMUP:
            now = made_now()
            cause = now.cause or CAUSES.get(phase, phase)
            metrics.events.add(ProgramEvent(phase, "compiled", seconds, cause, now.model, now.bucket))

    return count


def load_counter(
    metrics: Metrics, on_progress: OnProgress | None, stopped: Callable[[], bool] = lambda: False
) -> OnProgress:
    """Counts programs that came from the store, which no compile event tells of, and passes steps on.

    Once `stopped` a step that fails has not failed: the end of the server cut it short.
    """

    def count(model: str, step: WarmupStep) -> None:
        if step.error is not None and stopped():
            return
        facts = step.facts
        if facts is not None and facts.source != "compiled":
            metrics.compile("warmup", facts.ready_s, facts.source)
        metrics.events.add(
            ProgramEvent(
                phase=WARMUP,
                source="" if facts is None else facts.source,
                seconds=0.0 if facts is None else facts.ready_s,
                cause=CAUSES[WARMUP],
                model=model,
                bucket=str(step.bucket),
                code_bytes=0 if facts is None else facts.code_bytes,
                error=step.error,
            )
        )
        if on_progress is not None:
            on_progress(model, step)

    return count
