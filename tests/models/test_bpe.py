"""Byte-level BPE tokenizers from lists of tokens and merges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.models import CheckpointError, GenerationTokenizer, UnsupportedModel, bpe, tiny

BYTES = [c for c, _ in sorted(bpe.byte_characters().items(), key=lambda pair: pair[1])]
MERGED = ["he", "ll", "hell", "hello", "Ġhello", "12", "123", "'s"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "' s"]


def words(pre, text, **options):
    tokenizer = bpe.build([*BYTES, *MERGED, "<mark>", "ab"], MERGES, pre=pre, special=["<mark>"], **options)
    return tokenizer.encode(text).tokens


def test_the_alphabet_of_bytes():
    table = bpe.byte_characters()
    assert sorted(table.values()) == list(range(256))
    assert (table["a"], table["Ġ"], table["Ċ"]) == (97, 32, 10)


@pytest.mark.parametrize(
    ("pre", "numbers"),
    [
        ("gpt-2", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_words_are_cut_as_the_model_wants(pre, numbers):
    assert words(pre, "hello hello1234") == ["hello", "Ġhello", *numbers]
    assert words(pre, "hello's") == ["hello", "'s"]
    assert words(pre, "a<mark>b") == ["a", "<mark>", "b"]


def test_case_blind_contractions_and_line_ends_of_newer_models():
    assert words("llama-bpe", "a!\n\nb") == ["a", "!", "Ċ", "Ċ", "b"]
    assert words("llama-bpe", "ab") == ["ab"], "a whole word of the vocabulary needs no merges"
    assert words("qwen2", "ab") == ["a", "b"]


def test_added_words_and_a_first_mark():
    assert words("gpt-2", "xaby", added=["ab"]) == ["x", "ab", "y"]
    assert words("gpt-2", "x", first="<mark>") == ["<mark>", "x"]


@given(st.text(max_size=40))
def test_every_text_comes_back(text):
    tokenizer = tiny_tokenizer()
    [ids] = tokenizer.encode([text])
    assert ids.size == len(text.encode())
    assert tokenizer.decode(ids.tolist(), skip_special=False) == text


TOKENIZERS = []


def tiny_tokenizer() -> GenerationTokenizer:
    if not TOKENIZERS:
        TOKENIZERS.append(tiny().tokenizer)
    return TOKENIZERS[0]


def test_faults_are_named():
    with pytest.raises(UnsupportedModel, match="must be one of gpt-2, smollm, llama-bpe, qwen2, got 'other'"):
        bpe.build(BYTES, [], pre="other")
    with pytest.raises(CheckpointError, match="must stand once, got 257 tokens of which 256 differ"):
        bpe.build([*BYTES, "a"], [], pre="gpt-2")
    for merge in ("a", "a b c", "a nope"):
        with pytest.raises(CheckpointError, match="each merge must be a pair of tokens"):
            bpe.build(BYTES, [merge], pre="gpt-2")
    lists = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": BYTES, "tokenizer.ggml.merges": []}
    with pytest.raises(CheckpointError, match="lacks token_type"):
        bpe.from_metadata(lists)
    with pytest.raises(CheckpointError, match="256 tokens and 1 types"):
        bpe.from_metadata(lists | {"tokenizer.ggml.token_type": [1]})


def test_marks_that_a_model_adds_itself_are_not_added_twice():
    lists = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", *BYTES],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [3] + [1] * 256,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    tokenizer = GenerationTokenizer(bpe.from_metadata(lists), max_tokens=9, vocab_size=257, pad_id=0)
    assert tokenizer.encode(["a"])[0].tolist() == [0, 98]
    assert tokenizer.encode_rendered(["<s>a"])[0].tolist() == [0, 98]
