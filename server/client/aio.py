"""The client for asyncio."""

import random
import ssl
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import anyio
import httpx

from ..errors import DeadlineExceeded, ServerError
from . import asks
from .answers import Completion, Embeddings, Inference
from .asks import Ask, Reply
from .client import Messages, Prompt
from .clock import Clock, SystemClock
from .flow import Flow, Pause, Send, run, until_ready
from .retry import Retry
from .settings import failure, rules_of
from .stream import AsyncTextStream

T = TypeVar("T")


class AsyncClient:
    """`Client` for asyncio: the same arguments, the same methods, awaited.

    Cancelling a task that awaits an answer closes its connection, and the server drops the request at once.

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
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock if clock is not None else SystemClock()
        self._rules = rules_of(url, api_key, timeout_s, retry, headers, self._clock, jitter)
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(verify=verify, transport=transport)

    # -- tensors and texts --------------------------------------------------------------------------

    async def infer(
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
        """See `Client.infer`."""
        ask = asks.infer(
            model, inputs, outputs=outputs, version=version, priority=priority, parameters=parameters
        )
        return await self._run(ask, timeout_s, request_id)

    async def embed(
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
        """See `Client.embed`."""
        ask = asks.embed(inputs, model, dimensions, truncate, truncate_side)
        return await self._run(ask, timeout_s, request_id)

    async def complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> Completion:
        """See `Client.complete`."""
        body = {"model": model, "prompt": prompt, **options}
        return await self._run(asks.generate("/v1/completions", body, streams=False), timeout_s, request_id)

    async def chat(
        self,
        messages: Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> Completion:
        """See `Client.chat`."""
        body = {"model": model, "messages": list(messages), **options}
        ask = asks.generate("/v1/chat/completions", body, streams=False)
        return await self._run(ask, timeout_s, request_id)

    async def stream_complete(
        self,
        prompt: Prompt,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncTextStream:
        """See `Client.stream_complete`."""
        body = {"model": model, "prompt": prompt, **options}
        return await self._stream(asks.generate("/v1/completions", body, streams=True), timeout_s, request_id)

    async def stream_chat(
        self,
        messages: Messages,
        *,
        model: str,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncTextStream:
        """See `Client.stream_chat`."""
        body = {"model": model, "messages": list(messages), **options}
        ask = asks.generate("/v1/chat/completions", body, streams=True)
        return await self._stream(ask, timeout_s, request_id)

    # -- the server ---------------------------------------------------------------------------------

    async def live(self) -> bool:
        """See `Client.live`."""
        return (await self._run(asks.probe("/v2/health/live")))[0]

    async def ready(self) -> bool:
        """See `Client.ready`."""
        return (await self._run(asks.probe("/v2/health/ready")))[0]

    async def status(self) -> dict[str, Any]:
        """See `Client.status`."""
        return dict((await self._run(asks.probe("/v2/health/ready")))[1])

    async def wait_ready(self, timeout_s: float = 300.0) -> dict[str, Any]:
        """See `Client.wait_ready`."""
        return dict(await self._drive(until_ready(self._rules, "/v2/health/ready", timeout_s)))

    async def server(self) -> dict[str, Any]:
        """See `Client.server`."""
        return dict(await self._run(asks.get("/v2")))

    async def models(self) -> list[str]:
        """See `Client.models`."""
        return [one["id"] for one in (await self._run(asks.get("/v1/models")))["data"]]

    async def model(self, name: str, version: str | None = None) -> dict[str, Any]:
        """See `Client.model`."""
        return dict(await self._run(asks.get(asks.model_path(name, version))))

    async def grid(self) -> dict[str, Any]:
        """See `Client.grid`."""
        return dict(await self._run(asks.get("/debug/grid.json")))

    async def metrics(self) -> str:
        """See `Client.metrics`."""
        return await self._run(asks.text("/metrics"))

    # -- how ----------------------------------------------------------------------------------------

    async def _run(self, ask: Ask[T], timeout_s: float | None = None, request_id: str | None = None) -> T:
        return await self._drive(run(ask, self._rules, timeout_s=timeout_s, request_id=request_id))

    async def _stream(
        self, ask: Ask[Completion], timeout_s: float | None, request_id: str | None
    ) -> AsyncTextStream:
        deadline_s = self._clock.now() + self._rules.allowed_s(timeout_s)
        kept: list[httpx.Response] = []
        await self._drive(run(ask, self._rules, timeout_s=timeout_s, request_id=request_id), kept)
        return AsyncTextStream(kept[-1], lambda: deadline_s - self._clock.now())

    async def _drive(self, flow: Flow[T], kept: list[httpx.Response] | None = None) -> T:
        told: Reply | ServerError | None = None
        while True:
            try:
                step = flow.send(told)
            except StopIteration as end:
                return cast("T", end.value)
            if isinstance(step, Pause):
                await self._clock.asleep(step.seconds)
                told = None
            else:
                told = await self._exchange(step, kept)

    async def _exchange(self, step: Send, kept: list[httpx.Response] | None) -> Reply | ServerError:
        request = self._http.build_request(
            step.method,
            self.url + step.path,
            headers=dict(step.headers),
            content=step.body or None,
            timeout=step.left_s,
        )
        try:
            with anyio.fail_after(step.left_s):
                response = await self._http.send(request, stream=True)
                headers = {name.lower(): value for name, value in response.headers.items()}
                if kept is not None and response.status_code < 400:
                    kept.append(response)
                    return Reply(response.status_code, headers)
                try:
                    return Reply(response.status_code, headers, await response.aread())
                finally:
                    await response.aclose()
        except TimeoutError:
            return DeadlineExceeded(f"{self.url} must answer within timeout_s, got less; allow more.")
        except httpx.TransportError as error:
            return failure(error, self.url)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
