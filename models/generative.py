"""From a decoder's folder or file to everything a generation engine needs."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from . import bpe, checkpoint, llama, llama_config, llama_gguf, llama_weights, native
from .chat import ChatTemplate
from .generation_tokenizer import GenerationTokenizer
from .gguf_file import GGUFFile
from .llama_config import LlamaConfig
from .native import paged_attention
from .pages import Cache
from .pages import shapes as pool_shapes
from .panels import panels
from .quantize import quantize
from .turned import turned
from .weights import Weights


@dataclass(frozen=True)
class GenerativeModel:
    """A loaded language model: a pure step, its parameters, its KV pool, and how to talk to it.

    Attributes:
        name: the name it was loaded by.
        step: `step(params, kv, *, ids, page_table, context_lengths, chunk_lengths)` to logits and pool, see
            `llama.step`; pure, not yet compiled.
        mixed_step: chunks and single tokens in one step, see `llama.mixed_step`; None if there is none.
        verify_step: as `step`, to the logits after every token, see `llama.verify_step`; or None.
        forward: `forward(params, *, ids, lengths)` to the logits of every token, without a cache.
        params: nested dict of NumPy arrays, float32 or with matrices in bfloat16 (see `panels` and `turned`)
            or in int8 (see `quantize`).
        kv_shapes: `kv_shapes(pages=, page_size=, dtype=)` to the shapes of a pool, by default float32, or
            float16 beside bfloat16 or int8 weights.
        limits: `tokens`, the longest sequence, prompt and continuation together.
        tokenizer: text to ids and back.
        chat: messages to a prompt; None where the checkpoint has no template.
        eos_ids: tokens that end a text.
        vocab_size: width of the logits.
        kv_bytes_per_token: bytes of the pool that one token takes.
        task: what the model does, `generation`.
        config: facts to display; plain JSON values.
    """

    name: str
    step: Callable[..., tuple[jax.Array, Cache]]
    forward: Callable[..., jax.Array]
    params: Mapping[str, Any] = field(repr=False)
    kv_shapes: Callable[..., dict[str, jax.ShapeDtypeStruct]]
    limits: Mapping[str, int]
    tokenizer: GenerationTokenizer = field(repr=False)
    chat: ChatTemplate | None = field(repr=False)
    eos_ids: tuple[int, ...]
    vocab_size: int
    kv_bytes_per_token: int
    mixed_step: Callable[..., tuple[jax.Array, Cache]] | None = None
    verify_step: Callable[..., tuple[jax.Array, Cache]] | None = None
    task: str = "generation"
    config: Mapping[str, Any] = field(default_factory=dict)

    def init_kv(self, *, pages: int, page_size: int) -> Cache:
        """A pool of zeros; pages `pages.NULL_PAGE` and `pages.SINK_PAGE` of it hold no sequence."""
        spec = self.kv_shapes(pages=pages, page_size=page_size)
        return {name: jnp.zeros(part.shape, part.dtype) for name, part in spec.items()}


def make(
    name: str,
    config: LlamaConfig,
    params: Mapping[str, Any],
    tokenizer: GenerationTokenizer,
    *,
    chat: ChatTemplate | None = None,
    left_out: tuple[str, ...] = (),
    weights: Weights = "float32",
) -> GenerativeModel:
    """Join the parts of a model; `params` is a tree as of `llama.init`, of which `weights` rounds a copy."""
    # Beside smaller weights a pool in float32 is most of what a step of many rows reads.
    kv_dtype = jnp.dtype(jnp.float32 if weights == "float32" else jnp.float16)
    kernels = {"panels": native.available(), "paged_attention": paged_attention.available(kv_dtype.name)}
    config = replace(config, kernels=tuple(name for name, there in kernels.items() if there))
    facts = _facts(config, left_out, chat is not None) | {"weights": weights}
    if weights == "int8":
        config, params = quantize(config, params)
    else:
        dtype = jnp.bfloat16 if weights == "bfloat16" else jnp.float32
        fits = native.available()
        params = panels(params, tables=True, dtype=dtype) if fits else turned(params, dtype)
    kv_sizes = (config.num_layers, config.num_kv_heads, config.head_size)
    return GenerativeModel(
        name=name,
        step=functools.partial(llama.step, config),
        mixed_step=functools.partial(llama.mixed_step, config),
        verify_step=functools.partial(llama.verify_step, config),
        forward=functools.partial(llama.forward, config),
        params=params,
        kv_shapes=functools.partial(pool_shapes, *kv_sizes, dtype=kv_dtype),
        limits={"tokens": config.max_tokens},
        tokenizer=tokenizer,
        chat=chat,
        eos_ids=config.eos_ids,
        vocab_size=config.vocab_size,
        kv_bytes_per_token=2 * kv_dtype.itemsize * math.prod(kv_sizes),
        config=facts,
    )


def from_gguf(
    name: str, path: Path, max_tokens: int | None = None, *, weights: Weights = "float32"
) -> GenerativeModel:
    """Load a GGUF file, dequantised to float32, and from there to other weights.

    Raises:
        ModelNotFound: no such file.
        UnsupportedModel: another architecture, tokenizer or block format than are computed here.
        CheckpointError: the file is torn or contradicts itself.
    """
    file = GGUFFile(path)
    config = _limited(llama_gguf.config(file), max_tokens)
    words = bpe.from_metadata(file.metadata)
    tokenizer = GenerationTokenizer(words, **_sizes(config))
    source = file.metadata.get("tokenizer.chat_template")
    marks = {
        f"{kind}_token": _word(words, file.metadata.get(f"tokenizer.ggml.{kind}_token_id"))
        for kind in ("bos", "eos")
    }
    params, left_out = llama_gguf.params(file, config)
    chat = ChatTemplate(source, **marks) if source else None
    return make(name, config, params, tokenizer, chat=chat, left_out=left_out, weights=weights)


def from_folder(
    name: str, folder: Path, max_tokens: int | None = None, *, weights: Weights = "float32"
) -> GenerativeModel:
    """Load a Hugging Face folder of a Llama-family decoder, in float32 or other weights.

    Raises:
        UnsupportedModel: the configuration asks for something that is not computed here.
        CheckpointError: files are absent or malformed, or tensors do not match the configuration.
    """
    raw = checkpoint.read_json(folder, "config.json", required=True)
    generation = checkpoint.read_json(folder, "generation_config.json")
    config = _limited(llama_config.from_huggingface(raw, generation), max_tokens)
    # A class method, so it makes what it is called on.
    tokenizer = cast(
        GenerationTokenizer, GenerationTokenizer.from_file(folder / "tokenizer.json", **_sizes(config))
    )
    tensors = checkpoint.list_tensors(folder)
    names, left_out = llama_weights.match(config, {key: info.shape for key, info in tensors.items()})
    read = checkpoint.read_float32(tensors, names.values())
    params = llama_weights.assemble(config, {plain: read[key] for plain, key in names.items()})
    chat = _folder_chat(folder)
    return make(name, config, params, tokenizer, chat=chat, left_out=left_out, weights=weights)


def _limited(config: LlamaConfig, asked: int | None) -> LlamaConfig:
    return replace(config, max_tokens=llama_config.with_limit(config.max_tokens, asked))


def _sizes(config: LlamaConfig) -> dict[str, int]:
    return {"max_tokens": config.max_tokens, "vocab_size": config.vocab_size, "pad_id": config.pad_id}


def _word(tokenizer: Any, token: int | None) -> str:
    return "" if token is None else str(tokenizer.id_to_token(token) or "")


def _folder_chat(folder: Path) -> ChatTemplate | None:
    """The template of `tokenizer_config.json`, or of a file of its own, which newer checkpoints have."""
    settings = checkpoint.read_json(folder, "tokenizer_config.json") or {}
    source = settings.get("chat_template")
    if isinstance(source, list):  # several by name
        source = next((item.get("template") for item in source if item.get("name") == "default"), None)
    own = folder / "chat_template.jinja"
    if own.is_file():
        source = own.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    # A mark is written as a text, or as an object that holds it.
    marks = {key: settings.get(key) or "" for key in ("bos_token", "eos_token")}
    return ChatTemplate(
        source, **{key: str(v.get("content", "") if isinstance(v, dict) else v) for key, v in marks.items()}
    )


def _facts(config: LlamaConfig, left_out: tuple[str, ...], chat: bool) -> dict[str, Any]:
    return {
        "architecture": config.architecture,
        "width": config.hidden_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "vocab_size": config.vocab_size,
        "max_tokens": config.max_tokens,
        "eos_ids": list(config.eos_ids),
        "tied": config.tied,
        "chat_template": chat,
        "dtype": "float32",
        "kernels": list(config.kernels),
        "tensors_left_out": list(left_out),
    }
