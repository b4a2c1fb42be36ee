"""Byte-level BPE tokenizers built from vocabulary and merges, as a GGUF file carries them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .errors import CheckpointError, UnsupportedModel

_CONTROL, _USER_DEFINED = 3, 4  # token types: marks such as the end of a text, and words added by hand


def _split(digits: str) -> Any:
    """The words of Llama 3 and Qwen 2, which differ in how many digits make one."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2(single_digits: bool) -> Any:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, words]) if single_digits else words


# How a text is cut into words before the merges, by the name in `tokenizer.ggml.pre`.
_PRE = {
    "gpt-2": lambda: _gpt2(single_digits=False),
    "smollm": lambda: _gpt2(single_digits=True),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def build(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    pre: str,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    first: str | None = None,
) -> Tokenizer:
    """A byte-level BPE tokenizer.

    Args:
        tokens: the vocabulary in the order of ids, bytes written as the printable characters of GPT-2.
        merges: pairs written `left right`, the most wanted first.
        pre: how words are cut, see the source's table.
        special: tokens of the vocabulary that are marks and no text.
        added: tokens of the vocabulary that are matched whole before anything else, and are text.
        first: token put before every text.

    Raises:
        UnsupportedModel: `pre` is not known.
        CheckpointError: a token stands twice, or a merge is no pair of tokens.
    """
    if pre not in _PRE:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre must be one of {', '.join(_PRE)}, got {pre!r}: load the model's Hugging "
            "Face folder, which holds tokenizer.json"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(
            f"each token must stand once, got {len(tokens)} tokens of which {len(vocabulary)} differ: "
            "convert the model again"
        )
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        # Llama 3 takes a whole word that is in the vocabulary before it looks at merges.
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"each merge must be a pair of tokens, got {error}: convert the model again"
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    if first is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, vocabulary[first])]
        )
    return tokenizer


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises:
        UnsupportedModel: not a byte-level BPE, or words are cut in a way not known here.
        CheckpointError: the lists are missing or contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {kind!r}: load the model's Hugging "
            "Face folder, which holds tokenizer.json"
        )
    lists = {name: metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "token_type")}
    if absent := [name for name, value in lists.items() if not isinstance(value, list)]:
        raise CheckpointError(
            f"a GGUF file must hold its tokenizer's lists, and lacks {', '.join(absent)}: convert it again"
        )
    tokens, merges, types = (list(value or ()) for value in lists.values())
    if len(types) != len(tokens):
        raise CheckpointError(
            f"each token must have a type, got {len(tokens)} tokens and {len(types)} types: convert it again"
        )
    kinds = list(zip(tokens, types, strict=True))
    first = (
        metadata.get("tokenizer.ggml.bos_token_id") if metadata.get("tokenizer.ggml.add_bos_token") else None
    )
    return build(
        tokens,
        merges,
        pre=str(metadata.get("tokenizer.ggml.pre", "gpt-2")),
        special=[token for token, kind in kinds if kind == _CONTROL],
        added=[token for token, kind in kinds if kind == _USER_DEFINED],
        first=None if first is None else tokens[first],
    )


def byte_characters() -> dict[str, int]:
    """The printable character of GPT-2 for each byte, as a map from character to byte.

    Bytes that print keep their own character; the others, in order, take those from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printing)]
    return {chr(b): b for b in printing} | {chr(0x100 + i): b for i, b in enumerate(hidden)}
