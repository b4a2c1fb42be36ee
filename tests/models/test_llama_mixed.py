"""Steps with rows of one token beside rows of more, against steps of chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 259, count).tolist()


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.fixture(scope="module")
def mixed(llama_of):
    return jax.jit(llama_of().mixed_step)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_mixed_steps_give_what_chunks_of_their_own_give(data, pool_of, mixed):
    """Rows with one token and rows with a chunk, in any order; one of those with more tokens has a past."""
    rows, beside, reader = 10, 12, data.draw(st.integers(0, 9))
    pool = pool_of(page_size=3, pages=120, width=8, seed=data.draw(st.integers(0, 9)))
    lengths = [data.draw(st.integers(0, 4)) for _ in range(rows)]
    held = [
        data.draw(st.integers(0, 9)) if length == 1 or row == reader else 0
        for row, length in enumerate(lengths)
    ]
    texts = {row: tokens_of(held[row] + lengths[row], row) for row in range(rows) if lengths[row]}
    pool.append({row: text[: held[row]] for row, text in texts.items()}, rows=rows, chunk=9)
    kv = pool.kv
    chunks = {row: text[held[row] :] for row, text in texts.items()}
    want = pool.append(chunks, rows=rows, chunk=4)
    further = [(token, row, at) for row, chunk in chunks.items() for at, token in enumerate(chunk[:-1])]
    further = (further + [(7, -1, 2)] * beside)[:beside]
    chunks = {
        row: chunk for row, chunk in chunks.items() if sum(one[1] == row for one in further) + 1 == len(chunk)
    }
    ids, table = np.zeros(rows, np.int32), np.zeros((rows, 8), np.int32)
    for row, chunk in chunks.items():
        ids[row], table[row, : len(pool.tables[row])] = chunk[-1], pool.tables[row]
    got, after = mixed(
        pool.model.params,
        kv,
        ids=ids,
        further_ids=np.array(further, np.int32)[:, 0],
        further=np.array([one if one[1] in chunks else (7, -1, 2) for one in further], np.int32).T[1:],
        reads=np.int32(reader),
        page_table=table,
        context_lengths=np.array([held[row] if row in chunks else 0 for row in range(rows)], np.int32),
        chunk_lengths=np.array([len(chunks.get(row, ())) for row in range(rows)], np.int32),
    )
    assert np.isfinite(got).all()
    for row in chunks:
        close(np.asarray(got[row]), want[row])
        for name, part in after.items():
            own = np.array(pool.tables[row])
            np.testing.assert_allclose(part[:, own], pool.kv[name][:, own], rtol=0, atol=1e-4)


def test_G12_what_is_not_finite_stays_in_its_row_of_a_mixed_step(llama_of):
    """Row 1 has it in its past or reads it now, beside a row that decodes and a prompt that begins."""
    model = llama_of(num_kv_heads=4, tied=False)
    poison = 77
    word = np.array(model.params["word"])
    word[poison] = np.nan
    params = {**model.params, "word": word}
    step, mix = jax.jit(model.step), jax.jit(model.mixed_step)

    def run(past, now):
        spec = model.kv_shapes(pages=12, page_size=4)
        kv = {name: jnp.full(part.shape, jnp.nan, part.dtype) for name, part in spec.items()}
        table = np.array([[2, 3], [4, 5], [6, 7]], np.int32)
        lengths = {"context_lengths": np.zeros(3, np.int32), "chunk_lengths": np.array([3, 2, 0], np.int32)}
        ids = np.array([[5, 6, 7], [8, past, 0], [0, 0, 0]], np.int32)
        _, kv = step(params, kv, ids=ids, page_table=table, **lengths)
        logits, kv = mix(
            params,
            kv,
            ids=np.array([9, 10, 11], np.int32),
            further_ids=np.array([now, 12, 13, 14], np.int32),
            further=np.array([[1, 1, 2, -1], [0, 1, 0, 0]], np.int32),
            reads=np.int32(1),
            page_table=table,
            context_lengths=np.array([3, 2, 0], np.int32),
            chunk_lengths=np.array([1, 3, 2], np.int32),
        )
        return np.asarray(logits), kv

    want, pool = run(21, 22)
    assert np.isfinite(want).all()
    for past, now in ((poison, 22), (21, poison)):
        got, after = run(past, now)
        assert np.isnan(got[1]).any()
        np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
        for name, part in after.items():
            np.testing.assert_array_equal(part[:, [2, 3, 6, 7]], pool[name][:, [2, 3, 6, 7]])


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_every_place_of_a_chunk_has_the_logits_of_a_chunk_that_ends_there(data, pool_of, llama_of):
    """And a chunk is taken back by a step whose context ends before it."""
    rows, length = 3, 4
    pool = pool_of(page_size=3, pages=60, width=8, seed=data.draw(st.integers(0, 9)))
    held = [data.draw(st.integers(1, 9)) for _ in range(rows)]
    texts = [tokens_of(held[row] + length, row) for row in range(rows)]
    pool.append({row: text[: held[row]] for row, text in enumerate(texts)}, rows=rows, chunk=9)
    table = np.zeros((rows, 8), np.int32)
    kv, many = pool.kv, jax.jit(llama_of().verify_step)
    want = [
        pool.append(
            {row: text[held[row] + at : held[row] + at + 1] for row, text in enumerate(texts)}, rows=rows
        )
        for at in range(length)
    ]
    for row in range(rows):
        table[row, : len(pool.tables[row])] = pool.tables[row]
    inputs = {
        "page_table": table,
        "context_lengths": np.array(held, np.int32),
        "chunk_lengths": np.full(rows, length, np.int32),
    }
    wrong = np.zeros((rows, length), np.int32)
    _, kv = many(pool.model.params, kv, ids=wrong, **inputs)
    right = np.array([text[held[row] :] for row, text in enumerate(texts)], np.int32)
    got, after = many(pool.model.params, kv, ids=right, **inputs)
    for row in range(rows):
        for at in range(length):
            close(np.asarray(got[row, at]), want[at][row])
        own = np.array(pool.tables[row])
        for name, part in after.items():
            np.testing.assert_allclose(part[:, own], pool.kv[name][:, own], rtol=0, atol=1e-4)
