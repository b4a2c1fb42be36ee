"""The tokenizer as a stage with a queue of its own."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from servax.server.errors import Overloaded
from servax.server.fake import FakeTokenizer, counting_embedder
from servax.server.text import Embedder


class HeldTokenizer(FakeTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.free = threading.Event(), threading.Event()

    def encode(self, texts: Any) -> list[np.ndarray]:
        self.entered.set()
        assert self.free.wait(30)
        return super().encode(texts)


def test_O2_a_full_inner_stage_refuses_at_once_and_counts_nothing() -> None:
    tokenizer = HeldTokenizer()
    front = Embedder(counting_embedder(), tokenizer, inline_chars=1, pending_chars=10)

    async def go() -> None:
        first = asyncio.create_task(front.embed(["abcdefgh"]))
        await asyncio.to_thread(tokenizer.entered.wait, 30)
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
