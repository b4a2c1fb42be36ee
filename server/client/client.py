"""The blocking client."""

import contextlib
import random
import ssl
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import httpx

from ..errors import DeadlineExceeded, ServerError
from . import asks
from .answers import Completion, Embeddings, Inference
from .asks import Ask, Reply
from .clock import Clock, SystemClock
from .flow import Flow, Pause, Send, run, until_ready
from .retry import Retry
from .settings import failure, rules_of
from .stream import TextStream

T = TypeVar("T")
Prompt = str | Sequence[Any]
Messages = Sequence[Mapping[str, Any]]


class Client:
    """Talks to a servax server over HTTP. Thread-safe; keeps connections open, so make one and keep it.

    Each call has a deadline in all, retries and pauses included. A call is tried again after 429 and 503, as
    `Retry-After` asks, and if the server was not reached: answers do not change anything, so a second try is
    safe. What the server refuses is raised as the error of `servax.server` with its reason, such as
    `TooLong` or `Overloaded`, with the id of the request.

    Args:
        url: of the server, such as `http://localhost:8000`.
        api_key: sent as `Authorization: Bearer`.
        timeout_s: seconds of one call, unless the call says otherwise.
        retry: how often and when calls are tried again.
        headers: of every request.
        verify: whether and how the server's certificate is checked.
        transport: how requests travel; for tests and proxies, see httpx.
        clock: source of time, for tests.
        jitter: draws from [0, 1), for tests.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
        verify: bool | ssl.SSLContext = True,
        transport: httpx.BaseTransport | None = None,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._rules = rules_of(url, api_key, timeout_s, retry, headers, self._clock, jitter)
        self.url = url.rstrip("/")
        self._http = httpx.Client(verify=verify, transport=transport)

    # -- tensors and texts --------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: str | None = None,
        priority: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Inference:
        """Run a model on rows, by the Open Inference Protocol v2 with binary tensors.

        Args:
            model: its name.
            inputs: arrays `(rows, ...)` by input name; texts are sent as BYTES.
            outputs: names of those wanted; None for all.
            version: of the model; None for the one that is served.
            priority: 1 (most urgent) to 9.
            parameters: others of the protocol, such as `truncate`.
            timeout_s: seconds of this call.
            request_id: under which the server logs it; None makes one.

        Raises:
            ServerError: of the class that its reason names.
        """
        ask = asks.infer(
            model, inputs, outputs=outputs, version=version, priority=priority, parameters=parameters
        )
        return self._run(ask, timeout_s, request_id)

    def embed(
        self,
        inputs: Prompt,
        *,
        model: str,
        dimensions: int | None = None,
        truncate: bool = False,
        truncate_side: str = "right",
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Embeddings:
        """Embed a text, texts, or token ids; see `Embeddings`.

        Raises:
            ServerError: of the class that its reason names.
        """
        ask = asks.embed(inputs, model, dimensions, truncate, truncate_side)
        return self._run(ask, timeout_s, request_id)

    def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> Completion:
        """Continue a prompt: a text, texts, or token ids.

        Args:
            prompt: what to continue.
            model: its name.
            timeout_s: seconds of this call.
            request_id: under which the server logs it; None makes one.
            options: fields of `/v1/completions`, such as `max_tokens`, `temperature`, `seed`, `stop`.

        Raises:
            ServerError: of the class that its reason names.
        """
        body = {"model": model, "prompt": prompt, **options}
        return self._run(asks.generate("/v1/completions", body, streams=False), timeout_s, request_id)

    def chat(
        self,
        messages: Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> Completion:
        """Answer messages, each with `role` and `content`; as `complete` otherwise."""
        body = {"model": model, "messages": list(messages), **options}
        return self._run(asks.generate("/v1/chat/completions", body, streams=False), timeout_s, request_id)

    def stream_complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> TextStream:
        """Continue a prompt, delta by delta; retried only until the first one is on its way."""
        body = {"model": model, "prompt": prompt, **options}
        return self._stream(asks.generate("/v1/completions", body, streams=True), timeout_s, request_id)

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> TextStream:
        """Answer messages, delta by delta; retried only until the first one is on its way."""
        body = {"model": model, "messages": list(messages), **options}
        return self._stream(asks.generate("/v1/chat/completions", body, streams=True), timeout_s, request_id)

    # -- the server ---------------------------------------------------------------------------------

    def live(self) -> bool:
        """Whether the process can answer; raises `Unreachable` if nothing does."""
        return self._run(asks.probe("/v2/health/live"))[0]

    def ready(self) -> bool:
        """Whether requests are taken; raises `Unreachable` if nothing answers."""
        return self._run(asks.probe("/v2/health/ready"))[0]

    def status(self) -> dict[str, Any]:
        """Where warm-up stands: `ready`, `state`, `done` of `total` programs, `failed`."""
        return dict(self._run(asks.probe("/v2/health/ready"))[1])

    def wait_ready(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """Ask until the server is ready, or raise `NotReady` with the last it said; its status."""
        return dict(self._drive(until_ready(self._rules, "/v2/health/ready", timeout_s)))

    def server(self) -> dict[str, Any]:
        """Name, version and protocol extensions of the server."""
        return dict(self._run(asks.get("/v2")))

    def models(self) -> list[str]:
        """Names of the models."""
        return [one["id"] for one in self._run(asks.get("/v1/models"))["data"]]

    def model(self, name: str, version: str | None = None) -> dict[str, Any]:
        """Tensors and limits of a model."""
        return dict(self._run(asks.get(asks.model_path(name, version))))

    def grid(self) -> dict[str, Any]:
        """The numbers of the live page: every bucket, and the last two minutes second by second."""
        return dict(self._run(asks.get("/debug/grid.json")))

    def metrics(self) -> str:
        """Metrics in Prometheus' text format."""
        return self._run(asks.text("/metrics"))

    # -- how ----------------------------------------------------------------------------------------

    def _run(self, ask: Ask[T], timeout_s: float | None = None, request_id: str | None = None) -> T:
        return self._drive(run(ask, self._rules, timeout_s=timeout_s, request_id=request_id))

    def _stream(self, ask: Ask[Completion], timeout_s: float | None, request_id: str | None) -> TextStream:
        deadline_s = self._clock.now() + self._rules.allowed_s(timeout_s)
        kept: list[httpx.Response] = []
        self._drive(run(ask, self._rules, timeout_s=timeout_s, request_id=request_id), kept)
        return TextStream(kept[-1], lambda: deadline_s - self._clock.now())

    def _drive(self, flow: Flow[T], kept: list[httpx.Response] | None = None) -> T:
        told: Reply | ServerError | None = None
        while True:
            try:
                step = flow.send(told)
            except StopIteration as end:
                return cast("T", end.value)
            if isinstance(step, Pause):
                self._clock.sleep(step.seconds)
                told = None
            else:
                told = self._exchange(step, kept)

    def _exchange(self, step: Send, kept: list[httpx.Response] | None) -> Reply | ServerError:
        until_s = self._clock.now() + step.left_s
        request = self._http.build_request(
            step.method,
            self.url + step.path,
            headers=dict(step.headers),
            content=step.body or None,
            timeout=step.left_s,
        )
        try:
            response = self._http.send(request, stream=True)
            headers = {name.lower(): value for name, value in response.headers.items()}
            if kept is not None and response.status_code < 400:
                kept.append(response)
                return Reply(response.status_code, headers)
            with contextlib.closing(response):
                parts = []
                for part in response.iter_bytes():
                    parts.append(part)
                    # httpx bounds each read, and not all of them together.
                    if self._clock.now() > until_s:
                        return DeadlineExceeded(
                            f"{self.url} must answer within timeout_s, got a part; allow more."
                        )
            return Reply(response.status_code, headers, b"".join(parts))
        except httpx.TransportError as error:
            return failure(error, self.url)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
