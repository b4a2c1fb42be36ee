"""The tokenizer as a stage with a queue of its own."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from servax.server.errors import Overloaded, TooLong
from servax.server.fake import FakeTokenizer, counting_embedder
from servax.server.text import Embedder


class HeldTokenizer(FakeTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.free = threading.Semaphore(0), threading.Event()

    def encode(self, texts: Any) -> list[np.ndarray]:
        self.entered.release()
        assert self.free.wait(30)
        return super().encode(texts)


def test_O2_a_full_inner_stage_refuses_at_once_and_counts_nothing() -> None:
    tokenizer = HeldTokenizer()
    front = Embedder(counting_embedder(), tokenizer, inline_chars=1, pending_chars=10)

    async def go() -> None:
        first = asyncio.create_task(front.embed(["abcdefgh"]))
        assert await asyncio.to_thread(tokenizer.entered.acquire, timeout=30)
        for _ in range(3):
            with pytest.raises(Overloaded, match="8 do and the request has 3") as info:
                await front.embed(["abc"])
            assert info.value.cause == "tokenizer"
        second = asyncio.create_task(front.embed(["ab"]))
        tokenizer.free.set()
        for answer in (await first, await second):
            assert answer.token_counts == [3]
        assert (await front.embed(["a text longer than may wait"])).token_counts == [8]

    asyncio.run(go())


def test_O2_callers_that_leave_take_their_characters_with_them_only_when_the_thread_is_done() -> None:
    tokenizer = HeldTokenizer()
    front = Embedder(counting_embedder(), tokenizer, inline_chars=1, pending_chars=30)

    async def go() -> None:
        left = [asyncio.create_task(front.embed(["abcdefgh"])) for _ in range(3)]
        for _ in range(2):
            assert await asyncio.to_thread(tokenizer.entered.acquire, timeout=30)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        # Two are with the threads and stay; the third never began.
        with pytest.raises(Overloaded, match="16 do and the request has 15"):
            await front.embed(["abcdefghijklmno"])
        tokenizer.free.set()
        async with asyncio.timeout(30):
            while True:
                try:
                    assert (await front.embed(["abcdefghijklmno"])).token_counts == [3]
                except Overloaded:
                    await asyncio.sleep(0)
                else:
                    return

    asyncio.run(go())


def test_a_text_beyond_any_use_is_refused_before_it_takes_memory() -> None:
    tokenizer = HeldTokenizer()
    tokenizer.free.set()
    for inline in (1, 1000):
        front = Embedder(counting_embedder(), tokenizer, inline_chars=inline, text_chars=10)

        async def go(front: Embedder = front) -> None:
            with pytest.raises(TooLong, match="at most 10 characters, got 12 at index 1; cut it"):
                await front.embed(["ab", "abcdefghijkl"], truncate=True)
            assert (await front.embed(["ab", "abcdefghij"])).token_counts == [3, 3]

        asyncio.run(go())


def test_many_texts_are_tokenized_a_slice_at_a_time_in_order() -> None:
    most = []

    class Counting(FakeTokenizer):
        def encode(self, texts: Any) -> list[np.ndarray]:
            most.append(sum(map(len, texts)))
            return super().encode(texts)

    tokenizer = Counting()
    texts = ["ab " * (1 + index % 7) * 1000 for index in range(300)]
    front = Embedder(counting_embedder(), tokenizer)
    got = asyncio.run(front.tokenize(texts))
    assert max(most) <= 250_000 < sum(most)
    assert [len(ids) for ids in got] == [len(ids) for ids in FakeTokenizer().encode(texts)]
