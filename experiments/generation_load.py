"""Closed loops of clients on a language model's server, and what they see; see `continuous_batching`."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..server.generation import GenerationServer, SamplingParams, StepRecord
from .errors import ExperimentError
from .traces import load_trace

_TRACE = "azure_llm_2023_conv"
_PERCENTS = (50, 90, 99)


class Request(NamedTuple):
    """Token ids of a prompt, and how many tokens to generate."""

    prompt: list[int]
    tokens: int


@dataclass
class Seen:
    """What the clients of a mode saw.

    Attributes:
        begin_s: when the clock began.
        seconds: that it ran.
        cpu_s: of the processors that this process took in that time.
        requests: for each, when it was ready and when each of its tokens came.
        steps: steps that decode, prompts beside them or not, that were read.
    """

    begin_s: float
    seconds: float = 0.0
    cpu_s: float = 0.0
    requests: list[tuple[float, list[float]]] = field(default_factory=list)
    steps: int = 0

    def first(self) -> NDArray[np.float64]:
        """Seconds from ready to the first token, of each request that got one."""
        return np.array([times[0] - ready_s for ready_s, times in self.requests if times])

    def working(self, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Texts between their first and last token at these moments, seconds since the clock began."""
        spans = [(times[0], times[-1]) for _, times in self.requests if times]
        begun, ended = (np.sort(edge) - self.begin_s for edge in zip(*spans, strict=True))
        return (np.searchsorted(begun, at_s) - np.searchsorted(ended, at_s)).astype(np.float64)

    def gaps(self) -> NDArray[np.float64]:
        """Seconds between two tokens of a request, of all."""
        gaps = [np.diff(times) for _, times in self.requests if len(times) > 1]
        return np.concatenate(gaps) if gaps else np.zeros(0)


class Batches:
    """Admission by whole batches: nobody joins while one runs.

    Args:
        rows: of a full batch.
        window_s: begin a smaller one after so long; None waits until it is full.
        held: texts that are complete keep their rows until the longest one is, as where a batch is one call.
    """

    def __init__(self, rows: int, window_s: float | None = None, *, held: bool = True) -> None:
        self._rows, self._window_s, self._held = rows, window_s, held
        self._waiting: list[tuple[int, asyncio.Future[int]]] = []
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, tokens: int) -> int:
        """Wait for the next batch; how many tokens to generate in it."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[int] = loop.create_future()
        self._waiting.append((tokens, place))
        self._begin(loop)
        return await place

    def leave(self) -> None:
        """A text of the batch is complete."""
        self._running -= 1
        self._begin(asyncio.get_running_loop())

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._running or not self._waiting:
            return
        if len(self._waiting) >= self._rows:
            self._go()
        elif self._window_s is not None and self._timer is None:
            self._timer = loop.call_later(self._window_s, self._go)

    def _go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting[: self._rows], self._waiting[self._rows :]
        self._running = len(batch)
        longest = max(tokens for tokens, _ in batch)
        for tokens, place in batch:
            if not place.done():
                place.set_result(longest if self._held else tokens)


def requests(
    prompt_scale: float, output_scale: float, vocab: int, *, seed: int, limit: int = 512
) -> Iterator[Request]:
    """Requests with the trace's lengths and random tokens, without end.

    Args:
        prompt_scale: of the trace's prompt lengths.
        output_scale: of its text lengths.
        vocab: tokens to draw from.
        seed: of the order and the tokens.
        limit: of either length.
    """
    prompts = load_trace(_TRACE).scaled(prompt_scale, limit).lengths
    outputs = load_trace(_TRACE, column="output_tokens").scaled(output_scale, limit).lengths
    rng = np.random.default_rng(seed)
    while True:
        for at in rng.permutation(len(prompts)).tolist():
            yield Request(rng.integers(4, vocab, prompts[at]).tolist(), int(outputs[at]))


def same(prompt: int, output: int, vocab: int, *, seed: int) -> Iterator[Request]:
    """Requests of one size, without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield Request(rng.integers(4, vocab, prompt).tolist(), output)


class Bench:
    """One warm server, and loads on it.

    Args:
        model: a language model.
        options: of the server.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self._seen = Seen(0.0)
        self.server = GenerationServer(model, prefix_cache=False, on_step=self._step, **options)

    def _step(self, record: StepRecord) -> None:
        self._seen.steps += record.kind in ("decode", "mixed")

    def closed_loop(
        self,
        todo: Iterable[Request],
        clients: int,
        *,
        whole: bool = True,
        batches: Batches | None = None,
    ) -> Seen:
        """Clients that send their next request when their last one is complete.

        Args:
            todo: what they send, in order.
            clients: how many.
            whole: until everything is complete; else until a client finds nothing to send, so that as many
                were at work all the time.
            batches: admission; None for the server's own.
        """
        return asyncio.run(self._closed_loop(iter(todo), clients, whole, batches))

    async def _closed_loop(
        self, todo: Iterator[Request], clients: int, whole: bool, batches: Batches | None
    ) -> Seen:
        seen, begin_cpu_s = Seen(time.perf_counter()), time.process_time()
        self._seen = seen
        tasks = [asyncio.ensure_future(self._client(todo, seen, batches)) for _ in range(clients)]
        until = asyncio.ALL_COMPLETED if whole else asyncio.FIRST_COMPLETED
        done, pending = await asyncio.wait(tasks, return_when=until)
        seen.seconds = time.perf_counter() - seen.begin_s
        seen.cpu_s = time.process_time() - begin_cpu_s
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
        return seen

    async def _client(self, todo: Iterator[Request], seen: Seen, batches: Batches | None) -> None:
        for request in todo:
            times: list[float] = []
            seen.requests.append((time.perf_counter(), times))
            most = request.tokens if batches is None else await batches.enter(request.tokens)
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most)
            async for delta in self.server.stream(request.prompt, params):
                times += [time.perf_counter()] * min(len(delta.ids), request.tokens - len(times))
            if batches is not None:
                batches.leave()


def summary(seen: Seen, rows: int) -> dict[str, Any]:
    """Tokens a second, percentiles of both latencies, tokens a decode step, and those as a share of slots."""
    until_s = seen.begin_s + seen.seconds
    waits, gaps = seen.first(), seen.gaps()
    if not len(waits) or not len(gaps):
        raise ExperimentError(
            f"Texts of several tokens were due in {seen.seconds:.1f} s; none came: ask for more."
        )
    tokens = sum(moment <= until_s for _, times in seen.requests for moment in times)
    return {
        "tps": tokens / seen.seconds,
        "tokens": tokens,
        "requests": len(waits),
        "seconds": seen.seconds,
        "cpu_s": seen.cpu_s,
        "rows": tokens / max(seen.steps, 1),
        "occupancy": tokens / max(seen.steps, 1) / rows,
        **{f"ttft_p{q}_ms": float(np.percentile(waits, q)) * 1e3 for q in _PERCENTS},
        **{f"itl_p{q}_ms": float(np.percentile(gaps, q)) * 1e3 for q in _PERCENTS},
    }
