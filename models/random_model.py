"""A small decoder with random weights, for tests of what serves it: it starts in milliseconds."""

from typing import Any

import jax
import numpy as np

from . import bpe, llama
from .chat import ChatTemplate
from .generation_tokenizer import GenerationTokenizer
from .generative import GenerativeModel, make
from .llama_config import LlamaConfig
from .weights import Weights

_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny(
    *,
    vocab_size: int = 259,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_tokens: int = 512,
    seed: int = 0,
    weights: Weights = "float32",
    **options: Any,
) -> GenerativeModel:
    """A decoder with random weights whose tokens are three marks and the 256 bytes.

    Weights are drawn large, so that a continuation depends on its whole prompt and the best two logits
    seldom come close; texts it writes are noise.

    Args:
        vocab_size: 259 or more; further tokens are empty words.
        hidden_size: width; a head has `hidden_size / num_heads`.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        max_tokens: the longest sequence.
        seed: of the weights.
        weights: round them to bfloat16, or to eight bits, see `turned` and `quantize`.
        options: further ones of `LlamaConfig`, such as `qkv_bias`, `qk_norm` or `tied`.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=hidden_size // num_heads,
        intermediate_size=2 * hidden_size,
        max_tokens=max_tokens,
        **{"eos_ids": (2,), "bos_id": 1, "pad_id": 0, **options},
    )
    words = [*_MARKS, *(character for character, _ in sorted(bpe.byte_characters().items(), key=_by_byte))]
    tokenizer = GenerationTokenizer(
        bpe.build(words, [], pre="gpt-2", special=_MARKS),
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        pad_id=config.pad_id,
    )
    chat = ChatTemplate(_TEMPLATE, bos_token=_MARKS[1], eos_token=_MARKS[2])
    return make("tiny", config, random_params(config, seed), tokenizer, chat=chat, weights=weights)


def _by_byte(pair: tuple[str, int]) -> int:
    return pair[1]


def random_params(config: LlamaConfig, seed: int) -> dict[str, Any]:
    """Normal weights of unit gain, and norms around 1, as NumPy arrays."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        kind = path[-1].key
        noise = rng.standard_normal(leaf.shape, np.float32)
        if kind == "scale":
            return 1 + np.float32(0.1) * noise
        # A kernel is (layers, in, out); word table and head have one row a token.
        gain = 2 / leaf.shape[1] ** 0.5 if kind == "kernel" else 1 / 2
        return noise * np.float32(gain)

    drawn: dict[str, Any] = jax.tree_util.tree_map_with_path(draw, llama.shapes(config))
    return drawn
