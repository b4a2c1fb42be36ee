"""The training step: padding changes neither loss nor weights, and programs are few."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from servax.bucketing import exact, parse_scheme, single
from servax.experiments.finetune import PairBatch, compare, make_step

PAIRS = 4


def apply(params: Any, *, ids: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    vectors = params["table"][ids % 50]
    total = jnp.where(mask[..., None], vectors, 0.0).sum(1)
    return {"embedding": total / jnp.sqrt(jnp.square(total).sum(-1, keepdims=True))}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    return {"table": np.random.default_rng(seed).normal(size=(50, 8)).astype(np.float32)}


def batch(rows: int, length: int, seed: int) -> PairBatch:
    ids = np.random.default_rng(seed).integers(1, 50, (2, rows, length)).astype(np.int32)
    ids[:, 0, length // 2 :] = 0
    return PairBatch(ids[0], ids[1])


BATCHES = [batch(4, 5, 1), batch(4, 9, 2), batch(2, 9, 3), batch(4, 12, 4), batch(3, 30, 5), batch(4, 6, 6)]


def test_all_schemes_learn_the_same_with_as_many_programs_as_they_have_rungs() -> None:
    chosen = {"exact": exact(), "powers_of_two:8": parse_scheme("powers_of_two:8"), "single": single()}
    rows = {row["scheme"]: row for row in compare(apply, weights(), chosen, BATCHES, PAIRS)}
    assert [rows[name]["compiles"] for name in chosen] == [5, 3, 1]
    assert all(row["loss_gap"] < 1e-5 for row in rows.values())
    assert rows["exact"]["waste"] < rows["powers_of_two:8"]["waste"] < rows["single"]["waste"]
    assert rows["single"]["tokens_per_s"] > 0


def test_a_short_batch_has_the_loss_and_the_update_of_its_own_pairs() -> None:
    optimizer = optax.sgd(0.1)
    short = batch(2, 9, 3)
    results = []
    for pairs in (2, 4):
        step = make_step(apply, single(), pairs, optimizer)
        params = jax.tree.map(jnp.array, weights())
        params, _, loss = step(params, optimizer.init(params), short.left, short.right)
        results.append((float(loss), np.asarray(params["table"])))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert np.isfinite(results[1][1]).all()
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-6)


def test_real_tokens_are_counted() -> None:
    assert batch(4, 6, 0).real == 2 * (4 * 6 - 3)
