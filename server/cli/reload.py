"""SIGHUP: the models are loaded anew, each from where it came, and take the place of those that are served.

No request fails and none waits for a compile: a version of the same shapes takes the programs over. What
cannot be loaded leaves the old version in place.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from prometheus_client import Counter

from ...jit_cache import BACKGROUND, compile_log
from ...jit_cache.seal import open_seal
from ..config import ModelConfig
from ..errors import ConfigError
from ..fleet import Part, Replaces
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
            "Models that a SIGHUP had loaded anew: done, or failed, and then the old version stays.",
            ["model", "outcome"],
            registry=metrics.registry,
        )
        self._lock = threading.Lock()
        self._asked = self._running = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Reload soon; asked during a reload, once more after it. Any thread, does not block."""
        with self._lock:
            self._asked = True
            if self._running:
                return
            self._running = True
            self._thread = threading.Thread(target=self._run, name="servax-reload", daemon=True)
            self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the reload in hand; the server ends."""
        with self._lock:
            self._asked, thread = False, self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:  # ends with the first turn that nobody asked for
            with self._lock:
                if not self._asked or self._engine.draining:
                    self._running = False
                    return
                self._asked = False
            for config in self._configs:
                self._reload(config)

    def _reload(self, config: ModelConfig) -> None:
        begin_s = time.monotonic()
        try:
            # What is sealed is the way of requests; a loader may trace and compile, in its own thread.
            with compile_log().during(BACKGROUND), open_seal():
                found = load(config, padded=self._padded)
            if not (isinstance(found, Resolved) and isinstance(self._engine, Replaces)):
                raise ConfigError(
                    f"models of tensors and embeddings are loaded anew; {config.model!r} generates text: "
                    f"restart the server"
                )
            self._require_same_tokens(found)
            self._engine.replace(found.servable, timeout_s=_LET_GO_S)
        except BaseException as error:  # whatever a loader raises, an exit too: the old version goes on
            _log.error("model %r was not loaded anew, the old one stays: %s", config.model, error)
            self._count.labels(config.model, "failed").inc()
        else:
            seconds = time.monotonic() - begin_s
            _log.info("model loaded anew", extra={"model": found.servable.name, "seconds": round(seconds, 3)})
            self._count.labels(config.model, "done").inc()

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
