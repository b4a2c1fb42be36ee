"""The default language model against continuations made once with PyTorch, and its tokenizer and template."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.models import load

TIE = 1e-3  # below this gap of the two best logits another order of summation may choose the other token


@pytest.fixture(scope="module")
def model():
    return load("smollm2")


@pytest.fixture(scope="module")
def params(model):
    return jax.device_put(model.params)


@pytest.fixture(scope="module")
def texts():
    path = Path(__file__).parent.parent / "golden" / "smollm2_greedy.json"
    return json.loads(path.read_text(encoding="utf-8"))


class Runner:
    """Greedy decoding over a pool that starts full of NaN, in buckets of given sizes."""

    def __init__(self, model, params, *, page_size, pages, width):
        spec = model.kv_shapes(pages=pages, page_size=page_size)
        self.kv = {name: jnp.full(part.shape, jnp.nan) for name, part in spec.items()}
        step = jax.jit(model.step, donate_argnums=1)
        self.step = lambda kv, **inputs: step(params, kv, **inputs)
        self.page_size, self.width = page_size, width
        self.free = list(np.random.default_rng(0).permutation(np.arange(2, pages)))
        self.pages, self.held, self.best = {}, {}, {}

    def append(self, chunks, rows, chunk):
        ids, table = np.full((rows, chunk), 7, np.int32), np.zeros((rows, self.width), np.int32)
        context, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for row, (name, tokens) in enumerate(chunks.items()):
            owned = self.pages.setdefault(name, [])
            context[row], lengths[row] = self.held.get(name, 0), len(tokens)
            self.held[name] = int(context[row] + len(tokens))
            while len(owned) * self.page_size < self.held[name]:
                owned.append(self.free.pop())
            ids[row, : len(tokens)], table[row, : len(owned)] = tokens, owned
        logits, self.kv = self.step(
            self.kv, ids=ids, page_table=table, context_lengths=context, chunk_lengths=lengths
        )
        best = np.asarray(jnp.argmax(logits, axis=1))
        self.best |= {name: int(token) for name, token in zip(chunks, best, strict=False)}

    def prefill(self, name, ids, chunk):
        for begin in range(0, len(ids), chunk):
            self.append({name: ids[begin : begin + chunk]}, 1, chunk)

    def finish(self, name):
        self.free += self.pages.pop(name)
        del self.held[name]


def check(text, got):
    ties = [i for i, gap in enumerate(text["top2_gap"]) if gap < TIE]
    until = min([*ties, len(got)])
    assert got[:until] == text["tokens"][:until]


def test_P14_all_golden_texts_at_once(model, params, texts):
    runner = Runner(model, params, page_size=64, pages=64, width=7)
    for name, text in enumerate(texts):
        runner.prefill(name, text["prompt_ids"], 64)
    got = {name: [runner.best[name]] for name in range(len(texts))}
    for _ in range(47):
        runner.append({name: tokens[-1:] for name, tokens in got.items()}, 32, 1)
        for name, tokens in got.items():
            tokens.append(runner.best[name])
    for name, text in enumerate(texts):
        check(text, got[name])


@pytest.mark.parametrize(("which", "chunk", "page_size", "width"), [(20, 50, 16, 16), (24, 7, 32, 3)])
def test_golden_text_alone(model, params, texts, which, chunk, page_size, width):
    runner = Runner(model, params, page_size=page_size, pages=20, width=width)
    runner.prefill("a", texts[which]["prompt_ids"], chunk)
    got = [runner.best["a"]]
    for _ in range(15):
        runner.append({"a": got[-1:]}, 1, 1)
        got.append(runner.best["a"])
    check(texts[which], got)


def test_texts_join_and_leave_and_pages_are_used_again(model, params, texts):
    """Four rows, each text leaves after its own number of tokens and the next one takes its place."""
    runner = Runner(model, params, page_size=16, pages=26, width=6)
    waiting, got = list(range(20)), {}
    active = []
    while waiting or active:
        while waiting and len(active) < 4:
            active.append(waiting.pop(0))
            runner.prefill(active[-1], texts[active[-1]]["prompt_ids"], 16)
            got[active[-1]] = [runner.best[active[-1]]]
        runner.append({name: got[name][-1:] for name in active}, 4, 1)
        for name in list(active):
            got[name].append(runner.best[name])
            if len(got[name]) == 5 + name % 7:
                active.remove(name)
                runner.finish(name)
    assert sorted(runner.free) == list(range(2, 26))
    for name, tokens in got.items():
        check(texts[name], tokens)


def test_prompts_have_the_golden_ids(model, texts):
    for text in texts:
        if text["kind"] == "chat":
            [ids] = model.tokenizer.encode_rendered([model.chat.render(text["prompt"])])
        else:
            [ids] = model.tokenizer.encode([text["prompt"]])
        assert ids.tolist() == text["prompt_ids"]


def test_streams_join_to_the_whole_text_and_show_no_half_character(model, texts):
    streamed = 0
    for text in texts:
        stream = model.tokenizer.stream(skip_special=False)
        parts = [stream.push([token]) for token in text["tokens"]]
        streamed += sum(not part for part in parts)
        assert not any("�" in part for part in parts)
        assert "".join(parts) + stream.flush() == text["text"]
        assert model.tokenizer.decode(text["tokens"], skip_special=False) == text["text"]
    assert streamed, "no token of these texts ends inside a character"


def test_marks_are_left_out_unless_asked_for(model):
    ids = model.tokenizer.encode(["<|im_start|>user\nhi<|im_end|>"])[0].tolist()
    assert model.tokenizer.decode(ids) == "user\nhi"
    assert model.tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"
    assert {1, 2} <= model.tokenizer.special_ids


def test_what_is_served_is_declared(model):
    assert model.task == "generation"
    assert model.limits == {"tokens": 8192}
    assert (model.vocab_size, model.eos_ids, model.kv_bytes_per_token) == (49_152, (2,), 46_080)
    assert model.config["heads"] == 9
    assert model.config["tensors_left_out"] == []
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {np.dtype("float32")}
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == 134_515_008
