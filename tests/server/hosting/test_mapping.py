"""`Server.map`: items planned together, whatever their order, and answered in it."""

import itertools
import threading

import numpy as np
import pytest
from servax.bucketing import Grid
from servax.server import BadTensor, Server, pinned, tokenized
from servax.server.batching.admission import QueueLimits
from servax.server.batching.request import Request
from servax.server.batching.together import as_run
from servax.server.errors import Overloaded
from servax.server.hosting import mapping

GRID = Grid.parse("1x8,1x32,2x32,4x32", ("batch", "length"))


@pytest.fixture(scope="module")
def served(packed_sums):
    records = []
    with Server(packed_sums(GRID), on_batch=records.append) as server:
        yield server, records


def items(count, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": rng.integers(1, 9, n).astype(np.float32)} for n in rng.integers(1, 33, count)]


def check(given, answers):
    assert len(answers) == len(given)
    for item, answer in zip(given, answers, strict=True):
        assert answer["sum"] == 2 * item["x"].sum()
        np.testing.assert_array_equal(answer["each"], item["x"])


def test_rows_are_filled_and_answers_come_in_the_order_of_the_items(served):
    server, records = served
    records.clear()
    given = items(900)
    check(given, server.map(given))
    real = sum(len(item["x"]) for item in given)
    done = list(records)[:-1]  # the last is told after its answers
    assert 1 - sum(one.real for one in done) / sum(one.computed for one in done) < 0.06
    assert sum(one.real for one in done) > 0.9 * real


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257])
def test_any_number(served, count):
    given = items(count, seed=count)
    check(given, served[0].map(iter(given)))


def test_an_endless_source_is_read_as_far_as_it_is_needed(served):
    read = []

    def source():
        for item in itertools.cycle(items(64)):
            read.append(item)
            if len(read) == 2_000:
                raise KeyError("the source broke")
            yield item

    with pytest.raises(KeyError, match="the source broke"):
        served[0].map(source())
    assert served[0]._dispatcher.wait_idle(20.0)
    assert len(read) == 2_000


@pytest.mark.parametrize(("count", "bad"), [(600, 577), (257, 256)])
def test_an_item_that_is_refused_is_named_by_its_number(served, count, bad):
    given = items(count)
    given[bad] = {"x": np.zeros((2, 2), np.float32)}
    with pytest.raises(BadTensor, match=f"row {bad}: "):
        served[0].map(given)


def test_pinned_items_run_in_their_own_buckets(served):
    given = items(20)
    with pinned() as pin:
        check(given, served[0].map(given))
    assert {str(bucket) for bucket in pin.buckets} == {"1x8", "1x32"}


@pytest.mark.parametrize("limits", [{"rows": 64}, {"rows": 4096, "elements": 512}, {"bytes": 2048}])
def test_others_are_let_in_while_a_map_waits_for_a_busy_device(serve, doubling, monkeypatch, limits):
    server, device = serve(doubling(batch=32, length=8), queue=QueueLimits(**limits), max_request_rows=64)
    given, told, blocked = [{"x": item["x"][:8]} for item in items(600)], [], threading.Event()
    collect = mapping._Mapping._collect

    def collecting(self, most):
        blocked.set()
        collect(self, most)

    monkeypatch.setattr(mapping._Mapping, "_collect", collecting)
    device.hold()
    thread = threading.Thread(target=lambda: told.extend(server.map(given)))
    thread.start()
    assert blocked.wait(30.0)
    others = server.model().run_threaded([{"x": np.ones(5, np.float32)}] * 20)
    device.release()
    thread.join(60.0)
    assert [leaf.tolist() for (leaf,) in others.result(30.0)] == [[2.0] * 5] * 20
    assert len(told) == 600
    for item, answer in zip(given, told, strict=True):
        np.testing.assert_array_equal(answer, 2 * item["x"])


@pytest.mark.parametrize("refusals", [3, 1000])
def test_a_queue_that_others_fill_is_waited_for_in_bounds(serve, doubling, monkeypatch, refusals):
    server, _ = serve(doubling(batch=4, length=8))
    given, slept, send = [{"x": item["x"][:8]} for item in items(20)], [], mapping.Model.run_threaded

    def sending(self, rows):
        if len(slept) < refusals:
            raise Overloaded("full: wait", retry_after_s=7.0)
        return send(self, rows)

    monkeypatch.setattr(mapping.Model, "run_threaded", sending)
    monkeypatch.setattr(mapping.time, "sleep", slept.append)
    if refusals == 3:
        for item, answer in zip(given, server.map(given), strict=True):
            np.testing.assert_array_equal(answer, 2 * item["x"])
        assert slept == [0.5] * 3
    else:
        with pytest.raises(Overloaded, match="full: wait"):
            server.map(given)
        assert sum(slept) == 30


def test_a_run_of_more_rows_than_a_quarter_of_the_queue_is_sent_in_parts(packed_sums):
    limits = QueueLimits(rows=64)
    with Server(packed_sums(GRID), queue=limits, max_request_rows=64) as server:
        given = [{"x": np.ones(1 + place % 3, np.float32)} for place in range(500)]  # 32 a run
        check(given, server.map(given))


def test_a_run_of_another_plan_is_planned_anew(batcher_of, ask):
    batcher, other = batcher_of("1x8,4x8"), batcher_of("1x8,4x8")
    bucket = next(one for one in batcher.planner.grid if one.rows == 4)
    sizes = (3, 4, 5)
    for planner, wanted in ((batcher.planner, "4x8"), (other.planner, "1x8")):
        with as_run(planner, bucket):
            batcher.add(ask(*sizes))
        batcher.planner = (
            batcher.planner.with_cost(lambda one: float(one.rows**2)) if wanted == "1x8" else planner
        )
        launch = batcher.next(0.0)
        assert str(launch.bucket) == wanted
        assert len(launch.rows) == (3 if wanted == "4x8" else 1)


def test_others_do_not_take_the_rows_of_a_run(batcher_of, ask):
    batcher = batcher_of("1x8,2x8,4x8")
    bucket = next(one for one in batcher.planner.grid if one.rows == 2)
    first: Request = ask(3)
    batcher.add(first)
    with as_run(batcher.planner, bucket):
        batcher.add(ask(4, 4))
    batcher.add(ask(5))
    launches = [batcher.next(0.0) for _ in range(2)]
    assert [[row.sizes for row in one.rows] for one in launches] == [[(3,), (5,)], [(4,), (4,)]]


class _Letters:
    """A token a letter."""

    max_tokens, vocab_size = 4, 128

    def encode(self, texts):
        self.most = len(texts)
        return [np.array([ord(one) for one in text], np.int32) for text in texts]

    def truncate(self, ids, max_tokens, side):
        return ids[:max_tokens] if side == "right" else ids[-max_tokens:]


def test_texts_are_tokenized_some_at_a_time_and_cut():
    tokenizer = _Letters()
    texts = ["abc", "abcdefg", *["x"] * 10]
    got = tokenized(iter(texts), tokenizer, truncate_side="left", chunk=5)
    found = ["".join(map(chr, item["ids"])) for item in got]
    assert found == ["abc", "defg", *["x"] * 10]
    assert tokenizer.most == 2
