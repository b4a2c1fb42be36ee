"""What landed is learned from once the answers are out, and nothing that waits is kept waiting for it."""

import asyncio
import threading

import numpy as np


def test_a_batch_of_an_event_loop_is_told_of_after_its_answer(serve, doubling):
    told = threading.Event()
    server, _ = serve(doubling(), on_batch=lambda record: told.set())
    answer = asyncio.run(server.submit(np.ones(3, np.float32)))
    assert np.array_equal(answer, [2, 2, 2])
    assert told.wait(20.0)


def test_every_batch_is_told_of_by_the_end(serve, doubling):
    records = []
    server, _ = serve(doubling(batch=1), on_batch=records.append)

    async def ask():
        await asyncio.gather(*[server.submit(np.full(3, value, np.float32)) for value in range(20)])

    asyncio.run(ask())
    server.close()
    assert len(records) == 20


def test_a_device_does_not_rest_while_something_waits(desk, ask):
    dispatcher = desk()
    dispatcher.offer(0, ask(3))
    dispatcher.rest(600.0)
    dispatcher.close()
    dispatcher.rest(600.0)


def test_a_newcomer_ends_the_rest(desk, ask):
    dispatcher = desk()
    rests = threading.Thread(target=dispatcher.rest, args=(600.0,))
    rests.start()
    dispatcher.offer(0, ask(3))
    rests.join(20.0)
    assert not rests.is_alive()
