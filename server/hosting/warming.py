"""The warm-up of a server: every program of every model, in a thread of its own."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...bucketing import Bucket
from ...jit_cache import CompileService, StoredPrograms, WarmupError, WarmupStep, warm_up
from ...jit_cache.alive import SHARED
from ..batching.clock import Clock
from ..batching.dispatcher import Dispatcher
from ..errors import NotReady
from ..settling import settle, unsettle
from .model import Model
from .preparing import prepare
from .probing import Prober
from .programs import Programs
from .retiming import time_again
from .tuning import tune_bucket

OnProgress = Callable[[str, WarmupStep], None]
# Beside requests a second timing waits so long for a moment without any, and is left out if none comes.
_IDLE_S = 1.0


class WarmUp:
    """Warms models: first the covering bucket of each, then the rest.

    Args:
        models: what to warm.
        compiler: told when its further work is no warm-up any more.
        dispatcher: takes the probe runs.
        clock: source of time.
        seal: forbid tracing in the whole process once all models are ready and nothing is left to do.
        on_progress: called with the model's name and each step, in the warm-up thread.
        stored: remembers how long programs ran, if there is a store.
        options: budgets, and what is checked before.

    Attributes:
        prober: runs new programs on the device thread, from where on they are planned with.
    """

    def __init__(
        self,
        models: Sequence[Model],
        compiler: CompileService,
        dispatcher: Dispatcher,
        clock: Clock,
        *,
        seal: bool,
        on_progress: OnProgress | None,
        stored: StoredPrograms | None = None,
        options: Programs | None = None,
    ) -> None:
        self._options = options if options is not None else Programs()
        self._models, self._compiler, self._dispatcher, self._clock = models, compiler, dispatcher, clock
        self._own = list(models)  # versions that come later are warmed by who brings them
        self._seal, self._sealed = seal, False
        self._on_progress = on_progress
        self._stored = stored
        self.prober = Prober(dispatcher, stored, weigh=self._options.memory_bytes is not None)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._begin_s = self._started_s = math.nan
        self._thread = threading.Thread(target=self._run, name="servax-warmup", daemon=True)
        self._settled = False
        self.finished = False
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._begin_s, self._started_s = time.monotonic(), self._clock.now()
        self._thread.start()

    def stop(self) -> None:
        """Begin no more buckets, and let `wait` return."""
        self._stop.set()
        self._notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end after `stop`, and lift the seal."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._sealed:
            self._sealed = False
            unsettle()

    def remember(self) -> None:
        """Write down run times as traffic corrected them, for the next start; the device thread has ended."""
        if self._stored is None:
            return
        for model in self._models:
            warm = model.cache.ready()
            for bucket, seconds in model.cost.measured().items():
                if bucket in warm and not model.cost.hopes(bucket):
                    model.maker.learned(model.cache.get(bucket), seconds)
        self._stored.save()

    @property
    def settled(self) -> bool:
        """Whether nothing will change soon: all is warm and sealed, or some of it takes its time."""
        reports = [model.report for model in self._models]
        return self.finished or self._settled or not all(one.complete or one.enough for one in reports)

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until `done`, asked after each step, or until it can never come true by itself.

        Raises:
            WarmupError: if a model lost what it needs to get ready, or the warm-up itself broke.
            NotReady: if the timeout passes first.
        """
        until_s = self._clock.now() + timeout_s
        with self._changed:
            while not done():
                if self._stop.is_set():
                    return False
                if self.error is not None:
                    raise WarmupError(f"warm-up ended early: {self.error}") from self.error
                for model in self._models:
                    if model.lost:
                        model.report.require_complete()
                if self.finished:
                    return False
                if self._clock.now() >= until_s:
                    warm = sum(len(model.report.warm) for model in self._models)
                    total = sum(model.report.total for model in self._models)
                    raise NotReady(
                        f"the server was to be ready within {timeout_s:g} s; {warm} of {total} programs are "
                        f"warm: wait on, or warm up ahead of time"
                    )
                self._clock.wait(self._changed, until_s)
        return True

    def wait_over(self, timeout_s: float) -> bool:
        """Sleep until the warm-up has come to its end, however it went; whether it has."""
        until_s = self._clock.now() + timeout_s
        with self._changed:
            while not (self.finished or self._stop.is_set()) and self._clock.now() < until_s:
                self._clock.wait(self._changed, until_s)
        return self.finished

    @property
    def lost(self) -> bool:
        """Whether it ended and no model can get ready: none has a program, or the warm-up itself broke."""
        if not self.finished or self._stop.is_set() or any(model.ready for model in self._models):
            return False
        return self.error is not None or not any(model.report.warm for model in self._models)

    def _run(self) -> None:
        try:
            if self._options.policy == "lazy":
                self._skip()
                return
            models = prepare(self._own, self._options, self._compiler)
            for model in models:
                self._warm(model, model.order[:1])
            for model in models:
                self._warm_rest(model)
                self._tune(model)
            if self._stored is not None:
                self._stored.save()
            if all(model.ready for model in self._own) and not self._stop.is_set():
                self._settle()
                self._go_on()
        except BaseException as error:  # shown by status() and wait_ready(), never lost in the thread
            self.error = error
            self._give_up(error)
        finally:
            self.finished = True
            self._notify()

    def _give_up(self, error: BaseException) -> None:
        """Nothing warms those any more that are not ready."""
        for model in self._own:
            if not model.ready and not self._stop.is_set():
                model.report.failed.setdefault(model.order[0], f"the warm-up ended early: {error}")

    def _skip(self) -> None:
        """Warm nothing: only what the models return is found out, which compiles nothing."""
        for model in self._own:
            self._compiler.submit(partial(getattr, model.servable, "outputs")).result()
            model.report.enough = True
        self._settle()

    def _settle(self) -> None:
        self._sealed = settle(self._compiler, seal=self._seal)
        self._settled = True
        self._notify()

    def _go_on(self) -> None:
        """What a budget of seconds left, while requests are served; a budget of bytes holds for good."""
        for model in self._own:
            left = model.report.left(model.order)
            if left and not self._over_bytes():
                begin_s = self._clock.now()
                self._warm(model, left, self._over_bytes)
                self.time_again(model, left, begin_s)
        if self._stored is not None:
            self._stored.save()

    def _warm_rest(self, model: Model) -> None:
        begin_s = self._clock.now()
        model.held = True
        try:
            self._warm(model, model.order[1:], self._enough)
            self.time_again(model, model.order, begin_s)
        finally:
            model.held = False
            self._notify()

    def time_again(self, model: Model, buckets: Sequence[Bucket], begin_s: float) -> None:
        """Time programs once more whose warm-up began then; of a model that is ready, while nothing waits."""

        def go_on() -> bool:
            if self._stop.is_set():
                return False
            return self._dispatcher.wait_idle(_IDLE_S) if model.ready else not self._late

        again = partial(self.prober.trial, model, purpose="again")
        time_again(model, buckets, again, now_s=self._clock.now, begin_s=begin_s, go_on=go_on)

    def _enough(self) -> bool:
        return self._over_bytes() or self._late

    @property
    def _late(self) -> bool:
        budget_s = self._options.budget_s
        return budget_s is not None and self._clock.now() - self._started_s >= budget_s

    def _over_bytes(self) -> bool:
        most = self._options.budget_bytes
        if most is None:
            return False
        warm = [one.facts for model in self._models for one in model.report.warm]
        sizes = [facts.code_bytes for facts in warm if facts.source != SHARED]  # there is one copy of those
        return sum(sizes) + max(sizes, default=0) > most

    def _warm(
        self, model: Model, buckets: Sequence[Bucket], enough: Callable[[], bool] | None = None
    ) -> None:
        if self._stop.is_set():
            model.report.stopped = True
            return
        bounded = self._options.budget_s is not None or self._options.budget_bytes is not None
        warm_up(
            model.cache,
            buckets,
            partial(self.prober.probe, model),
            report=model.report,
            on_step=lambda step: self._stepped(model, step),
            stop=self._stop,
            enough=enough if bounded else None,
        )

    def _tune(self, model: Model) -> None:
        """Make and time the other variants of each warm bucket, and keep the fastest."""
        if not model.maker.tuner.needed:
            return
        for bucket in model.order:
            if self._stop.is_set() or self._enough():
                return
            if bucket in model.cache.ready():
                tune_bucket(model, bucket, self._compiler, self.prober.trial)

    def _stepped(self, model: Model, step: WarmupStep) -> None:
        self._notify()
        if self._on_progress is not None:
            report = model.report
            report.elapsed_s = time.monotonic() - self._begin_s
            done, failed = len(report.warm) + len(report.failed), len(report.failed)
            told = replace(step, done=done, total=report.total, elapsed_s=report.elapsed_s, failed=failed)
            self._on_progress(model.name, told)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
