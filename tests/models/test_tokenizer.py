"""Ids are whole unless somebody cuts them, and cutting keeps the frame."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.models import BadText, BadTokenIds, CheckpointError, TextTokenizer, TooManyTokens
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def tokenizer(folder):
    path = folder() / "tokenizer.json"  # asks for truncation at 5 and padding to 9
    return TextTokenizer.from_file(path, max_tokens=20, vocab_size=40, pad_id=0)


def test_neither_cuts_nor_pads_by_itself(tokenizer):
    rows = tokenizer.encode(["a b c d e f g", "", "zz"])
    assert [row.tolist() for row in rows] == [[2, 4, 5, 6, 7, 8, 9, 10, 3], [2, 3], [2, 1, 3]]
    assert {row.dtype for row in rows} == {np.dtype("int32")}
    assert tokenizer.encode([]) == []
    assert (tokenizer.special_tokens, tokenizer.pad_id, tokenizer.max_tokens) == (2, 0, 20)


def test_ten_thousand_words(minilm):
    [row] = minilm.tokenizer.encode(["snow " * 10_000])
    assert row.size == 10_002
    cut = minilm.tokenizer.truncate(row)
    assert cut.size == 256
    assert (cut[0], cut[-1]) == (101, 102)


def test_V4_cutting_keeps_the_special_tokens_on_either_side(tokenizer):
    [row] = tokenizer.encode(["a b c d e"])
    assert tokenizer.truncate(row, 5).tolist() == [2, 4, 5, 6, 3]
    assert tokenizer.truncate(row, 5, "left").tolist() == [2, 6, 7, 8, 3]
    assert tokenizer.truncate(row, 7).tolist() == row.tolist()
    assert tokenizer.truncate([2, 4, 5, 6, 7], 4).tolist() == [2, 4, 5, 6]
    assert tokenizer.truncate([4, 5, 6, 7, 8], 4, "left").tolist() == [5, 6, 7, 8]
    with pytest.raises(TooManyTokens, match="2 special tokens, got 2"):
        tokenizer.truncate(row, 2)
    with pytest.raises(BadTokenIds, match="'left' or 'right', got 'middle'"):
        tokenizer.truncate(row, 5, "middle")


@given(ids=st.lists(st.integers(0, 30_521), max_size=40), limit=st.integers(3, 45), left=st.booleans())
def test_cutting_is_bounded_and_takes_from_one_side(minilm, ids, limit, left):
    cut = minilm.tokenizer.truncate(ids, limit, "left" if left else "right").tolist()
    assert len(cut) == min(len(ids), limit)
    framed = minilm.tokenizer.truncate([101, *ids, 102], limit, "left" if left else "right").tolist()
    assert len(framed) == min(len(ids) + 2, limit)
    assert (framed[0], framed[-1]) == (101, 102)
    kept = framed[1:-1]
    assert kept == (ids[len(ids) - len(kept) :] if left else ids[: len(kept)])


def test_a_tokenizer_without_a_frame(tmp_path):
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = TextTokenizer(plain, max_tokens=4, vocab_size=2, pad_id=0)
    assert tokenizer.special_tokens == 0
    assert [row.tolist() for row in tokenizer.encode(["a b", ""])] == [[0, 1], []]
    assert tokenizer.truncate([0, 1, 1], 2).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("a", "sequence of texts"),
        (["a", 3], "got int at index 1"),
        (["a", "b\ud800"], "lone surrogate at index 1, character 1"),
    ],
)
def test_bad_texts_are_named(tokenizer, texts, words):
    with pytest.raises(BadText, match=words):
        tokenizer.encode(texts)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([2, 40, 3], "0 to 39, got 40 at position 1"),
        ([2, -1], "got -1 at position 1"),
        ([2**31], "got 2147483648"),
        ([2**70], "one row of integers"),
        ([1.5], "float64"),
        ([True, False], "bool"),
        ([[1]], r"shape \(1, 1\)"),
        (3, r"shape \(\)"),
    ],
)
def test_bad_ids_are_named(tokenizer, ids, words):
    with pytest.raises(BadTokenIds, match=words):
        tokenizer.check(ids)


def test_good_ids_become_int32(tokenizer):
    assert tokenizer.check([1, 39]).dtype == np.int32
    assert tokenizer.check([]).shape == (0,)


def test_a_limit_without_room_for_text_is_refused(folder):
    with pytest.raises(CheckpointError, match="beside the 2 special tokens, got 2"):
        TextTokenizer.from_file(folder() / "tokenizer.json", max_tokens=2, vocab_size=40, pad_id=0)
