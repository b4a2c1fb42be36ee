"""Ways of batching texts, small: admission is as it says, and the keys are there."""

import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from servax.experiments import continuous_batching as experiment
from servax.experiments.errors import ExperimentError
from servax.experiments.generation_load import Batches, Seen, requests, summary


def test_a_batch_begins_when_it_is_full_and_the_last_one_has_ended() -> None:
    async def go() -> list[list[tuple[int, int]]]:
        batches, begun, seen = Batches(2), list[tuple[int, int]](), list[list[tuple[int, int]]]()

        async def client(number: int) -> None:
            begun.append((number, await batches.enter(number)))

        tasks = [asyncio.ensure_future(client(number)) for number in range(5)]
        for leaves in (False, True, True, True, True):
            if leaves:
                batches.leave()
            for _ in range(3):
                await asyncio.sleep(0)
            seen.append(sorted(begun))
        for task in tasks:
            task.cancel()
        return seen

    # The fifth waits for a sixth, which never comes.
    first, second = [(0, 1), (1, 1)], [(2, 3), (3, 3)]
    assert asyncio.run(go()) == [first, first, *([[*first, *second]] * 3)]


def test_a_window_begins_with_whoever_came() -> None:
    async def go() -> None:
        batches = Batches(8, 0.001, held=False)
        tokens = await asyncio.wait_for(asyncio.gather(*(batches.enter(n) for n in (5, 7, 6))), 10)
        assert tokens == [5, 7, 6]

    asyncio.run(go())


def test_requests_have_the_traces_lengths_and_a_seed() -> None:
    first, again = (list(itertools.islice(requests(1 / 32, 1 / 2, 100, seed=3), 50)) for _ in range(2))
    assert first == again
    assert all(1 <= len(one.prompt) <= 512 and 1 <= one.tokens <= 512 for one in first)
    assert len({len(one.prompt) for one in first}) > 10


def test_tokens_after_the_clock_do_not_count() -> None:
    seen = Seen(10.0, 2.0, 1.0, [(10.0, [10.5, 11.0, 12.5])], 2)
    assert seen.working(np.array([0.4, 1.0, 2.6])).tolist() == [0, 1, 0]
    found = summary(seen, 4)
    assert found["tps"] == 1.0
    assert found["ttft_p50_ms"] == 500
    assert found["itl_p99_ms"] > 1000
    assert found["occupancy"] == 0.25
    with pytest.raises(ExperimentError, match="ask for more"):
        summary(Seen(0.0, 1.0, 1.0, [(0.0, [])]), 4)


@pytest.mark.timeout(240)
def test_the_experiment_in_small(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    experiment.main(
        json_file=file,
        figures=tmp_path,
        count=40,
        prompt_scale=1 / 32,
        output_scale=1 / 2,
        stream_counts="1,3",
        waves=1,
        quick=True,
        seed=0,
    )
    found = json.loads(file.read_text())
    assert [row["tokens"] for row in found["streams"]] == [64, 192]
    for mode in ("sequential", "static", "windowed", "gated", "continuous"):
        assert found[f"{mode}_tps"] > 0
        assert found["modes"][mode]["ttft_p99_ms"] >= found["modes"][mode]["ttft_p50_ms"]
    assert 0 < found["modes"]["sequential"]["rows"] <= 1.5  # first tokens come from prefill
    assert found["modes"]["continuous"]["rows"] > found["modes"]["sequential"]["rows"]
    assert (tmp_path / "generation.png").stat().st_size > 10_000
