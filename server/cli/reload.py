"""SIGHUP, or a client: models are loaded anew, each from where it came, and take the place of those served.

No request fails and none waits for a compile: a version of the same shapes takes the programs over. What
cannot be loaded leaves the old version in place.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from prometheus_client import Counter

from ...jit_cache import BACKGROUND, compile_log
from ...jit_cache.seal import open_seal
from ..config import ModelConfig
from ..errors import ConfigError, LoadFailed, Overloaded, StillAnswers, UnknownModel
from ..events import FACTORY, making
from ..fleet import Part, Replaces
from ..logs import CHANGES
from ..metrics import Metrics
from ..text import Embedder, Tokenizer
from .wiring import Resolved, load

_log = logging.getLogger("servax.reload")
# The last request of the old version is answered long before, or its own time is over.
_LET_GO_S = 600.0


class Reloader:
    """Loads models anew when it is asked to, one reload at a time.

    Args:
        engine: what serves them.
        configs: the models, as they were configured.
        texts: text fronts by model; a new version must have the tokenizer of the old, by which requests under
            way were cut.
        metrics: counts what became of each model.
        padded: as for `wiring.load`.
    """

    def __init__(
        self,
        engine: Part,
        configs: Sequence[ModelConfig],
        texts: Mapping[str, Embedder],
        metrics: Metrics,
        *,
        padded: bool = False,
    ) -> None:
        self._engine, self._configs, self._texts = engine, configs, texts
        self._padded = padded
        self._count = Counter(
            "servax_reloads",
            "Models that a SIGHUP or a client had loaded anew: done; or failed, then the old version stays.",
            ["model", "outcome"],
            registry=metrics.registry,
        )
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._asked = self._running = False
        self._thread: threading.Thread | None = None
        self._loading: threading.Thread | None = None

    def ask(self) -> None:
        """Reload soon; asked during a reload, once more after it. Any thread, does not block."""
        with self._lock:
            self._asked = True
            if self._running:
                return
            self._running = True
            self._thread = threading.Thread(target=self._run, name="servax-reload", daemon=True)
            self._thread.start()

    def load(self, name: str) -> "Future[None]":
        """Load one model, by the name that it is served under; any thread, does not block.

        Returns:
            Done once the new version serves; fails with `LoadFailed` if it does not.

        Raises:
            UnknownModel: the configuration does not say which model has that name.
            Overloaded: models are being loaded just now.
        """
        config = self._config_of(name)
        if not self._turn.acquire(blocking=False):
            raise Overloaded(f"models are loaded one after another; one is on its way: retry {name!r} later")
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # from here on nobody cancels it

        def work() -> None:
            error: BaseException | None
            try:
                error = self._reload(config, name)
            except BaseException as fault:  # a bug of ours: whoever waits hears of it
                error = fault
            self._turn.release()
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(LoadFailed(f"{name!r} was not loaded anew, the old one stays: {error}"))

        self._loading = threading.Thread(target=work, name="servax-reload", daemon=True)
        try:
            self._loading.start()
        except BaseException:  # no thread could be had: the turn is the next one's
            self._loading = None
            self._turn.release()
            raise
        return done

    def _config_of(self, name: str) -> ModelConfig:
        named = [one for one in self._configs if name == (one.name or one.model)]
        if not named and len(self._configs) == 1 and self._configs[0].name is None:
            named = list(self._configs)
        if len(named) != 1:
            raise UnknownModel(
                f"a model is loaded anew by a name that the configuration gives to one model; got {name!r}: "
                f"set its name there"
            )
        return named[0]

    def _name_of(self, config: ModelConfig) -> str:
        """The name that a model is served under, as other metrics have it; else as it is configured."""
        if config.name is not None or config.model in self._engine.models:
            return config.name or config.model
        others = {one.name or one.model for one in self._configs if one is not config}
        left = [name for name in self._engine.models if name not in others]
        return left[0] if len(left) == 1 else config.model

    def join(self, timeout_s: float) -> None:
        """Wait for the reload in hand; the server ends."""
        with self._lock:
            self._asked = False
        until_s = time.monotonic() + timeout_s
        for thread in (self._loading, self._thread):
            if thread is not None:
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while True:  # ends with the first turn that nobody asked for
            with self._lock:
                if not self._asked or self._engine.draining:
                    self._running = False
                    return
                self._asked = False
            for config in self._configs:
                with self._turn:  # a client's load may go before, and the server may end meanwhile
                    if not self._engine.draining:
                        self._reload(config)

    def _reload(self, config: ModelConfig, name: str | None = None) -> BaseException | None:
        """Load a model and swap it in; why it failed, or None."""
        begin_s, served = time.monotonic(), self._name_of(config)
        late: StillAnswers | None = None
        try:
            # What is sealed is the way of requests; a loader may trace and compile, in its own thread.
            with compile_log().during(BACKGROUND), making(FACTORY, served), open_seal():
                found = load(config, padded=self._padded)
            if not (isinstance(found, Resolved) and isinstance(self._engine, Replaces)):
                raise ConfigError(
                    f"models of tensors and embeddings are loaded anew; {config.model!r} generates text: "
                    f"restart the server"
                )
            if name not in (None, found.servable.name):
                raise ConfigError(
                    f"a model is loaded anew under its name; {config.model!r} is {found.servable.name!r} by "
                    f"now, and {name!r} was asked for: set its name in the configuration"
                )
            self._require_same_tokens(found)
            try:
                self._engine.replace(found.servable, timeout_s=_LET_GO_S)
            except StillAnswers as error:
                late = error
        except BaseException as error:  # whatever a loader raises, an exit too: the old version goes on
            _log.error("model %r was not loaded anew, the old one stays: %s", config.model, error)
            self._count.labels(served, "failed").inc()
            return error
        else:
            if late is not None:
                _log.warning("the version before a reload is still in memory: %s", late)
            seconds = time.monotonic() - begin_s
            CHANGES.info(
                "model loaded anew", extra={"model": found.servable.name, "seconds": round(seconds, 3)}
            )
            self._count.labels(found.servable.name, "done").inc()
            return None

    def _require_same_tokens(self, found: Resolved) -> None:
        front = self._texts.get(found.servable.name)
        old = None if front is None else front.tokenizer
        if _told_apart_by(old) != _told_apart_by(found.tokenizer):
            raise ConfigError(
                f"a new version cuts texts into the same tokens as the old one; the tokenizer of "
                f"{found.servable.name!r} changed: restart the server, or serve it under another name"
            )


def _told_apart_by(tokenizer: Tokenizer | None) -> object:
    """The digest of a tokenizer; of a user's own, which need not have one, its class and sizes."""
    if tokenizer is None:
        return None
    sizes = (type(tokenizer), tokenizer.max_tokens, tokenizer.vocab_size)
    return getattr(tokenizer, "digest", sizes)
