"""Streams show whole characters only, and their parts join to the full decode."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.models import GenerationTokenizer, tiny
from servax.models.detokenize import WindowStream
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@functools.cache
def byte_level():
    return tiny().tokenizer


def ids_of(data):
    return [3 + byte for byte in data]


@functools.cache
def fallback():
    """A vocabulary of words with `▁`, with bytes as a last resort, as Llama 2 has."""
    words = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁he",
        "llo",
        "▁wor",
        "ld",
        "l",
    ]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return GenerationTokenizer(tokenizer, max_tokens=99, vocab_size=len(words), pad_id=0)


def parts_of(stream, ids):
    return [*(stream.push([i]) for i in ids), stream.flush()]


def test_a_character_waits_for_its_last_byte():
    stream = byte_level().stream()
    shown = [stream.push([i]) for i in ids_of("a🙂é京".encode())]
    assert shown == ["a", "", "", "", "🙂", "", "é", "", "", "京"]
    assert stream.flush() == ""


def test_a_sequence_that_ends_inside_a_character_shows_that_at_the_end():
    stream = byte_level().stream()
    assert stream.push(ids_of("é🙂".encode()[:-1])) == "é"
    assert stream.flush() == "\ufffd"


def test_bytes_that_begin_no_character_do_not_hold_up_the_rest():
    stream = byte_level().stream()
    assert stream.push(ids_of(b"\xff")) == "\ufffd"
    assert stream.push(ids_of(b"\xf0\x9f")) == ""
    assert stream.push(ids_of(b"a")) == "\ufffda"


@given(data=st.binary(max_size=30), cut=st.integers(1, 5))
def test_any_bytes_in_any_pieces_join_to_the_librarys_decode(data, cut):
    ids = ids_of(data)
    stream = byte_level().stream()
    pieces = [ids[i : i + cut] for i in range(0, len(ids), cut)]
    text = "".join([*(stream.push(piece) for piece in pieces), stream.flush()])
    assert text == data.decode("utf-8", "replace") == byte_level().decode(ids)
    assert text == byte_level()._tokenizer.decode(ids)


def test_marks_and_unknown_ids_are_no_text():
    ids = [1, *ids_of(b"a"), 2, 5_000]
    assert byte_level().decode(ids) == "a"
    assert byte_level().decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"
    assert "".join(parts_of(byte_level().stream(), ids)) == "a"


@given(st.text(max_size=12), st.lists(st.integers(258, 263), max_size=6))
def test_byte_fallback_streams_join_to_the_full_decode(text, words):
    tokenizer = fallback()
    ids = [1, *words, *(2 + byte for byte in text.encode()), *words]
    parts = parts_of(tokenizer.stream(), ids)
    assert "".join(parts) == tokenizer._tokenizer.decode(ids) == tokenizer.decode(ids)


def test_a_leading_space_is_dropped_once():
    tokenizer = fallback()
    assert parts_of(tokenizer.stream(), [259, 260, 261, 262]) == ["he", "llo", " wor", "ld", ""]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_stray_fallback_bytes_are_shown_in_the_end(count):
    stream = WindowStream(fallback()._tokenizer)
    text = "".join(parts_of(stream, [2 + 0xFF] * count))
    assert text
    assert set(text) == {"\ufffd"}
