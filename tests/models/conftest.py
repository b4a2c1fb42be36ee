"""Small checkpoints with random weights, a plain NumPy BERT to compare with, and pages to decode in."""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from servax.models import load, native, tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors

GOLDEN = Path(__file__).parent.parent / "golden"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
SMALL = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def _strict_numerics():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def minilm():
    return load("minilm")


@pytest.fixture(scope="session")
def golden():
    texts = json.loads((GOLDEN / "minilm_texts.json").read_text(encoding="utf-8"))
    return texts, np.load(GOLDEN / "minilm_embeddings.npy")


@pytest.fixture(scope="session")
def small_config():
    return dict(SMALL)


@pytest.fixture(scope="session")
def random_tensors():
    """Tensors of a Hugging Face BERT, named as its files name them."""

    def make(raw=SMALL, seed=0):
        rng = np.random.default_rng(seed)
        hidden, inner = raw["hidden_size"], raw["intermediate_size"]

        def draw(*shape):
            return rng.normal(0, 0.3, shape).astype(np.float32)

        tensors = {
            "embeddings.word_embeddings.weight": draw(raw["vocab_size"], hidden),
            "embeddings.position_embeddings.weight": draw(raw["max_position_embeddings"], hidden),
            "embeddings.token_type_embeddings.weight": draw(raw["type_vocab_size"], hidden),
        }
        norms = ["embeddings.LayerNorm"]
        for i in range(raw["num_hidden_layers"]):
            layer = f"encoder.layer.{i}."
            sizes = {"attention.self.query": (hidden, hidden), "attention.self.key": (hidden, hidden)}
            sizes |= {"attention.self.value": (hidden, hidden), "attention.output.dense": (hidden, hidden)}
            sizes |= {"intermediate.dense": (inner, hidden), "output.dense": (hidden, inner)}
            for name, (out, inside) in sizes.items():
                tensors[layer + name + ".weight"] = draw(out, inside)
                tensors[layer + name + ".bias"] = draw(out)
            norms += [layer + "attention.output.LayerNorm", layer + "output.LayerNorm"]
        for norm in norms:
            tensors[norm + ".weight"], tensors[norm + ".bias"] = 1 + draw(hidden), draw(hidden)
        return tensors

    return make


@pytest.fixture
def folder(tmp_path, random_tensors):
    """Write a Hugging Face folder; `tensors` and each extra JSON file may be given."""

    def write(raw=SMALL, tensors=None, files=(), name="model"):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(raw))
        for file, content in dict(files).items():
            (path / file).parent.mkdir(exist_ok=True)
            (path / file).write_text(json.dumps(content))
        save_file(random_tensors(raw) if tensors is None else tensors, path / "model.safetensors")
        small_tokenizer().save(str(path / "tokenizer.json"))
        return path

    return write


def small_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    return tokenizer


@pytest.fixture(scope="session")
def reference():
    return embed_reference


_ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def embed_reference(raw, tensors, ids, how="mean", normalize=False, offset=0):
    """One unpadded text in float64, straight from the checkpoint's own names."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x, name):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + raw["layer_norm_eps"])
        return x * w[name + ".weight"] + w[name + ".bias"]

    positions = np.arange(len(ids)) + offset
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][positions]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    heads, size = raw["num_attention_heads"], raw["hidden_size"] // raw["num_attention_heads"]
    for i in range(raw["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{layer}attention.self.{part}").reshape(-1, heads, size).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = np.exp(q @ k.transpose(0, 2, 1) / math.sqrt(size))
        mixed = (scores / scores.sum(2, keepdims=True)) @ v
        mixed = linear(mixed.transpose(1, 0, 2).reshape(len(ids), -1), layer + "attention.output.dense")
        x = norm(x + mixed, layer + "attention.output.LayerNorm")
        inner = _ACTIVATIONS[raw["hidden_act"]](linear(x, layer + "intermediate.dense"))
        x = norm(x + linear(inner, layer + "output.dense"), layer + "output.LayerNorm")
    pooled = {
        "mean": x.mean(0),
        "cls": x[0],
        "max": x.max(0),
        "mean_sqrt_len": x.sum(0) / math.sqrt(len(ids)),
    }[how]
    return pooled / np.linalg.norm(pooled) if normalize else pooled


@functools.cache
def llama(*, kernel=True, **changes):
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(native, "available", lambda: False)
        return tiny(**changes)


@functools.cache
def compiled_step(**changes):
    return jax.jit(llama(**changes).step)


class Pool:
    """A pool full of NaN, and sequences that own shuffled pages of it."""

    def __init__(self, changes=None, *, page_size=4, pages=40, width=8, seed=0, dtype=jnp.float32):
        self.model, self.step = llama(**(changes or {})), compiled_step(**(changes or {}))
        self.page_size, self.width = page_size, width
        spec = self.model.kv_shapes(pages=pages, page_size=page_size, dtype=dtype)
        self.kv = {name: jnp.full(part.shape, jnp.nan, part.dtype) for name, part in spec.items()}
        self.free = list(np.random.default_rng(seed).permutation(np.arange(2, pages)))
        self.tables, self.lengths = {}, {}

    def append(self, chunks, *, rows=4, chunk=8, junk=0):
        """Append `chunks[name]` to each named sequence in one step; logits by name."""
        ids = np.random.default_rng(junk).integers(-5, 10_000, (rows, chunk)).astype(np.int32)
        table = np.zeros((rows, self.width), np.int32)
        context, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, (name, tokens) in enumerate(chunks.items()):
            pages = self.tables.setdefault(name, [])
            context[row], lengths[row] = self.lengths.get(name, 0), len(tokens)
            self.lengths[name] = int(context[row]) + len(tokens)
            while len(pages) * self.page_size < self.lengths[name]:
                pages.append(self.free.pop())
            ids[row, : len(tokens)], table[row, : len(pages)] = tokens, pages
        logits, self.kv = self.step(
            self.model.params,
            self.kv,
            ids=ids,
            page_table=table,
            context_lengths=context,
            chunk_lengths=lengths,
        )
        logits = np.asarray(logits)
        assert np.isfinite(logits).all()
        return dict(zip(chunks, logits, strict=False))


@pytest.fixture(scope="session")
def llama_of():
    """Makes a tiny decoder of a changed configuration, the same one for the same changes.

    Without `kernel` it is what this machine would serve if it had none for panels.
    """
    return llama


@pytest.fixture(scope="session")
def pool_of():
    """Makes a pool for the decoder of a changed configuration."""
    return Pool
