"""Text as it is written: iterators over the deltas of an open answer."""

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self

import httpx

from ..errors import DeadlineExceeded, ServerError
from .answers import Usage
from .errors import BadAnswer, Unreachable
from .events import Deltas


class _Text:
    """What both kinds know.

    Attributes:
        request_id: under which the server logged it.
    """

    def __init__(self, response: httpx.Response, left_s: Callable[[], float]) -> None:
        self._response, self._left_s = response, left_s
        self._deltas = Deltas()
        self.request_id = response.headers.get("x-request-id")

    @property
    def text(self) -> str:
        """All that came so far."""
        return self._deltas.text

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length`; None before the end."""
        return self._deltas.finish_reason

    @property
    def usage(self) -> Usage | None:
        """Tokens; None before the end."""
        return self._deltas.usage

    def _take(self, chunk: bytes) -> list[str]:
        if self._left_s() <= 0 and not self._deltas.done:
            raise self._named(DeadlineExceeded("The text must be complete within timeout_s; allow more."))
        try:
            return self._deltas.feed(chunk)
        except ServerError as error:
            raise self._named(error) from None

    def _check_end(self) -> None:
        if not self._deltas.done:
            raise self._named(
                BadAnswer("A stream ends with [DONE], got its end before; the server may have stopped.")
            )

    def _broken(self, error: httpx.TransportError) -> ServerError:
        late = isinstance(error, httpx.TimeoutException)
        kind = DeadlineExceeded if late else Unreachable
        return self._named(kind(f"A stream must go on to its end, got: {error!r}; what came is in `text`."))

    def _named(self, error: ServerError) -> ServerError:
        error.request_id = self.request_id
        return error


class TextStream(_Text):
    """Iterate for deltas of text; leave the `with` block, or close it, to stop the server's work early.

    Attributes:
        text, finish_reason, usage, request_id: what came with it.

    Raises:
        ServerError: while iterating: the server failed, the connection broke, or the time is over.
    """

    def __iter__(self) -> Iterator[str]:
        try:
            for chunk in self._response.iter_bytes():
                yield from self._take(chunk)
                if self._deltas.done:
                    return
            self._check_end()
        except httpx.TransportError as error:
            raise self._broken(error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Let the connection go."""
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncTextStream(_Text):
    """`TextStream` for asyncio: `async for`, `async with`."""

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for chunk in self._response.aiter_bytes():
                for delta in self._take(chunk):
                    yield delta
                if self._deltas.done:
                    return
            self._check_end()
        except httpx.TransportError as error:
            raise self._broken(error) from error
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Let the connection go."""
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
