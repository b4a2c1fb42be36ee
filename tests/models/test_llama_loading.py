"""Decoders from Hugging Face folders and GGUF files: the same model by either way, and every fault named."""

import json
import re

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from servax.models import (
    CheckpointError,
    ModelNotFound,
    TensorMismatch,
    UnsupportedModel,
    bpe,
    generative,
    llama_weights,
    load,
)
from servax.models.gguf_file import GGUFFile
from servax.models.llama_config import from_huggingface

RAW = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 0],
}
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = [c for c, _ in sorted(bpe.byte_characters().items(), key=lambda pair: pair[1])]
WORDS = [*MARKS, *BYTES, "hi"]
MERGES = ["h i"]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_tensors(raw=RAW, seed=0):
    rng = np.random.default_rng(seed)
    shapes = llama_weights.expected(from_huggingface(raw))
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    def write(raw=RAW, tensors=None, files=(), name="model"):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(raw))
        for file, content in dict(files).items():
            (path / file).write_text(content if isinstance(content, str) else json.dumps(content))
        save_file(random_tensors(raw) if tensors is None else tensors, path / "model.safetensors")
        bpe.build(WORDS, MERGES, pre="gpt-2", special=MARKS).save(str(path / "tokenizer.json"))
        return path

    return write


def gguf_name(name):
    stem, _, end = name.rpartition(".")
    if layer := re.match(r"model\.layers\.(\d+)\.(.*)", stem):
        return f"blk.{layer[1]}.{GGUF_NAMES[layer[2]]}.{end}"
    return f"{GGUF_NAMES.get(stem, stem)}.{end}"


def in_pairs(rows, heads):
    """Row order that llama.cpp rotates: of each head, rows 0, half, 1, half + 1, ..."""
    size = rows.shape[0] // heads
    order = np.arange(size).reshape(2, size // 2).T.reshape(-1)
    return rows.reshape(heads, size, *rows.shape[1:])[:, order].reshape(rows.shape)


@pytest.fixture
def gguf_file(tmp_path):
    def write(raw=RAW, tensors=None, metadata=(), drop=(), kind=gguf.GGMLQuantizationType.F32):
        path = tmp_path / "model.gguf"
        arch = raw["model_type"]
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(raw["num_hidden_layers"])
        writer.add_context_length(raw["max_position_embeddings"])
        writer.add_embedding_length(raw["hidden_size"])
        writer.add_feed_forward_length(raw["intermediate_size"])
        writer.add_head_count(raw["num_attention_heads"])
        writer.add_head_count_kv(raw["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
        writer.add_rope_freq_base(raw["rope_theta"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(WORDS)
        writer.add_token_types([3] * 3 + [1] * 257)
        writer.add_token_merges([*MERGES])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(0)
        for key, value in dict(metadata).items():
            getattr(writer, f"add_{key}")(value)
        rotated = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
        for name, tensor in (random_tensors(raw) if tensors is None else tensors).items():
            if name in drop:
                continue
            if arch == "llama" and (heads := rotated.get(name.split(".")[-2])):
                tensor = in_pairs(tensor, heads)
            matrix = tensor.ndim == 2 and kind != gguf.GGMLQuantizationType.F32
            data = gguf.quants.quantize(tensor, kind) if matrix else np.ascontiguousarray(tensor)
            spelled = gguf_name(name)
            writer.add_tensor(spelled, data, raw_dtype=kind if matrix else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def logits(model, ids=(5, 70, 200, 8)):
    row = np.array([ids], np.int32)
    return np.asarray(model.forward(model.params, ids=row, lengths=np.array([len(ids)], np.int32)))[0]


VARIANTS = {
    "llama": {},
    "free_head": {"tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_and_a_gguf_file_give_the_same_model(folder, gguf_file, variant):
    raw = RAW | VARIANTS[variant]
    from_folder, from_file = load(folder(raw)), load(gguf_file(raw))
    assert (from_folder.task, from_file.task) == ("generation", "generation")
    np.testing.assert_array_equal(logits(from_folder), logits(from_file))
    assert from_folder.eos_ids == from_file.eos_ids == (2, 0)
    assert from_file.limits == {"tokens": 64}
    assert from_file.config["tied"] is raw["tie_word_embeddings"]
    assert from_file.tokenizer.encode(["hi h"])[0].tolist() == [259, 3 + ord(" "), 3 + ord("h")]


def test_limit_name_and_revision(folder, gguf_file):
    assert load(folder(), max_tokens=10).limits == {"tokens": 10}
    path = gguf_file()
    model = load(str(path), max_tokens=12)
    assert (model.name, model.limits) == (str(path), {"tokens": 12})
    with pytest.raises(CheckpointError, match=r"must be 1 to 64, .* got 65"):
        load(path, max_tokens=65)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
def test_quantised_tensors_are_close(folder, gguf_file, kind):
    got, want = logits(load(gguf_file(kind=kind))), logits(load(folder()))
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


def test_rotary_scaling_of_a_gguf_file_equals_that_of_a_config(folder, gguf_file):
    scaling = {"rope_type": "linear", "factor": 4.0}
    linear = gguf_file(
        metadata={"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    )
    want = logits(load(folder(RAW | {"rope_scaling": scaling})))
    np.testing.assert_array_equal(logits(load(linear)), want)
    tensors = random_tensors() | {"rope_freqs.weight": np.full(4, 4.0, np.float32)}
    np.testing.assert_array_equal(logits(load(gguf_file(tensors=tensors))), want)
    modern = folder(RAW | {"rope_theta": None, "rope_parameters": scaling | {"rope_theta": 500.0}})
    np.testing.assert_array_equal(logits(load(modern)), want)


def test_every_missing_unexpected_and_misshapen_tensor_is_named(folder, gguf_file):
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((64, 32), np.float32)
    tensors["model.norm.weight"] = np.zeros(33, np.float32)
    with pytest.raises(TensorMismatch, match="1 missing, 1 unexpected and 1 of the wrong shape") as caught:
        load(folder(tensors=tensors))
    assert caught.value.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert caught.value.unexpected == ("model.layers.2.mlp.up_proj.weight",)
    assert caught.value.wrong == {"model.norm.weight": ((32,), (33,))}
    with pytest.raises(TensorMismatch, match=r"blk\.1\.ffn_gate\.extra") as caught:
        load(
            gguf_file(
                tensors=random_tensors() | {"blk.1.ffn_gate.extra": np.zeros(3, np.float32)},
                drop=["model.layers.0.self_attn.k_proj.weight"],
            )
        )
    assert caught.value.missing == ("model.layers.0.self_attn.k_proj.weight",)


def test_a_tied_head_that_is_written_down_too_is_left_out(folder):
    extra = {
        "lm_head.weight": np.zeros((260, 32), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    model = load(folder(tensors=random_tensors() | extra))
    assert model.config["tensors_left_out"] == sorted(extra)


def test_pooling_is_for_encoders(folder):
    with pytest.raises(UnsupportedModel, match="pooling and normalize are for encoders"):
        load(folder(), pooling="mean")


def test_chat_templates_of_a_folder(folder):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    hello = [{"role": "user", "content": "hi"}]
    assert load(folder()).chat is None
    for i, settings in enumerate(
        (
            {"chat_template": template, "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}},
            {
                "chat_template": [
                    {"name": "tool_use", "template": "x"},
                    {"name": "default", "template": template},
                ],
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
            },
        )
    ):
        model = load(folder(files={"tokenizer_config.json": settings}, name=f"model{i}"))
        text = model.chat.render(hello)
        assert text == "<|im_start|>hi<|im_end|>"
        assert model.tokenizer.encode_rendered([text])[0].tolist() == [1, 259, 2]
    own = folder(files={"chat_template.jinja": "own {{ messages[0].content }}"}, name="own")
    assert load(own).chat.render(hello) == "own hi"


def test_the_header_reader_agrees_with_the_gguf_package(gguf_file):
    path = gguf_file(kind=gguf.GGMLQuantizationType.Q8_0)
    reader, file = gguf.GGUFReader(path), GGUFFile(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents(), key
    assert len(file.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(int(n) for n in tensor.shape[::-1])
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.read_float32(tensor.name), want)


def test_torn_and_foreign_gguf_files_are_named(gguf_file, tmp_path):
    path = gguf_file()
    whole = path.read_bytes()
    for cut in (0, 3, 10, 100, 2000):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="whole GGUF file"):
            load(path)
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"must hold \d+ bytes of .*, got \d+"):
        load(path)
    path.write_bytes(b"GGUF" + b"\x01" + whole[5:])
    with pytest.raises(CheckpointError, match="version 1"):
        load(path)
    with pytest.raises(ModelNotFound, match="must be a file"):
        load(tmp_path / "absent.gguf")


def test_foreign_architectures_tokenizers_and_formats_are_refused(gguf_file):
    with pytest.raises(UnsupportedModel, match=r"must be one of llama, qwen2, qwen3, got 'bert'"):
        load(gguf_file(RAW | {"model_type": "bert"}, tensors=random_tensors()))
    path = gguf_file(metadata={"rope_dimension_count": 4})
    with pytest.raises(UnsupportedModel, match="all 8 features of a head must be rotated, got 4"):
        load(path)
    path = gguf_file()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"smollm", b"smallm"))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre must be one of .*, got 'smallm'"):
        load(path)
    path.write_bytes(data.replace(b"gpt2", b"bert"))
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model must be 'gpt2'"):
        load(path)


def test_a_block_format_that_nobody_knows_is_named(gguf_file):
    file = GGUFFile(gguf_file())
    file.tensors["token_embd.weight"] = file.tensors["token_embd.weight"]._replace(kind=250)
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight must be of a block format .* got 250"):
        generative.llama_gguf.params(file, generative.llama_gguf.config(file))
