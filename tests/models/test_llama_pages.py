"""What a paged step reads and writes: its own pages, in place, and the sink."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.models import pages


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 259, count).tolist()


def test_P11_G7_neighbours_junk_and_page_places_change_no_bit(pool_of):
    """In one bucket, bitwise: other mates, junk ids, pages, a wider table, more context beside."""
    text = tokens_of(11)

    def run(mates, width, seed):
        pool = pool_of(width=width, seed=seed)
        pool.append({"a": text[:6]} | mates, junk=seed)
        longer = {name: tokens_of(1, seed) for name in mates}
        return pool.append({"a": text[6:]} | longer, junk=seed + 1)["a"]

    alone = run({}, 8, 0)
    np.testing.assert_array_equal(alone, run({"b": tokens_of(8, 1)}, 8, 3))
    np.testing.assert_array_equal(alone, run({"b": tokens_of(3, 2), "c": tokens_of(8, 3)}, 30, 5))


@pytest.mark.parametrize("chunks", [{"a": 5}, {"a": 5, "b": 8}, {"a": 1, "b": 0, "c": 6}, {"a": 0}])
def test_G7_padding_writes_to_the_sink_and_to_nothing_else(pool_of, chunks):
    """Padding behind a row's tokens, before other rows' and behind all of them."""
    pool = pool_of()
    pool.append({name: tokens_of(count) for name, count in chunks.items()})
    written = {name: np.isfinite(np.asarray(part)) for name, part in pool.kv.items()}
    used = np.zeros((40, 4), bool)
    for name, count in chunks.items():
        for at in range(count):
            used[pool.tables[name][at // 4], at % 4] = True
    for name, axis in (("k", 4), ("v", 3)):
        others = tuple(i for i in range(5) if i not in (1, axis))
        assert (written[name].all(others) == written[name].any(others)).all()
        places = written[name].all(others)
        assert not places[pages.NULL_PAGE].any()
        np.testing.assert_array_equal(places[2:], used[2:])


def test_a_position_without_a_table_entry_goes_to_the_sink(pool_of):
    pool = pool_of()
    pool.width = 1
    pool.append({"a": tokens_of(4)})
    before = {name: np.asarray(part)[:, 2:] for name, part in pool.kv.items()}
    page = pool.tables["a"][0]
    pool.step(
        pool.model.params,
        pool.kv,
        ids=np.zeros((1, 1), np.int32),
        page_table=np.array([[page]], np.int32),
        context_lengths=np.array([4], np.int32),
        chunk_lengths=np.array([1], np.int32),
    )
    for name, part in pool.kv.items():
        np.testing.assert_array_equal(np.asarray(part)[:, 2:], before[name])


def test_G10_the_pool_is_updated_in_place(llama_of):
    """Donated bytes all come back, and what the program needs beside them does not grow with the pool."""
    model = llama_of()
    facts = []
    for count in (100, 400):
        kv = model.kv_shapes(pages=count, page_size=16)
        arguments = {
            "ids": jax.ShapeDtypeStruct((4, 1), jnp.int32),
            "page_table": jax.ShapeDtypeStruct((4, 8), jnp.int32),
            "context_lengths": jax.ShapeDtypeStruct((4,), jnp.int32),
            "chunk_lengths": jax.ShapeDtypeStruct((4,), jnp.int32),
        }
        step = jax.jit(model.step, donate_argnums=1).lower(model.params, kv, **arguments).compile()
        memory = step.memory_analysis()
        held = sum(math.prod(part.shape) * 4 for part in kv.values())
        assert memory.alias_size_in_bytes >= held
        facts.append(memory.temp_size_in_bytes)
    assert facts[0] == facts[1] < held / 4
