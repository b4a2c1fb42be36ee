"""What other servers read, made from our weights: the ONNX file and the Hugging Face folder."""

from pathlib import Path

import numpy as np
import pytest
from servax.experiments.errors import ExperimentError


def test_the_onnx_file_is_the_encoder(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
    from onnx.reference import ReferenceEvaluator
    from servax.experiments.float64_bert import embed_float64, random_params
    from servax.experiments.peers.onnx_export import export_encoder
    from servax.models import BertConfig, TextModel

    config = BertConfig(50, 16, 2, 2, 32, max_position_embeddings=12, normalize=True)
    facts = {
        "pooling": "mean",
        "normalize": True,
        "activation": "gelu",
        "dimensions": 16,
        "heads": 2,
        "layers": 2,
    }
    params = random_params(config, seed=3)
    model = TextModel("m", None, None, params, {}, {}, None, config=facts)
    loaded = onnx.load(export_encoder(model, tmp_path / "m.onnx"))
    assert [one.name for one in loaded.graph.input] == ["input_ids", "attention_mask"]
    assert {node.domain for node in loaded.graph.node} == {""}
    ids = np.array([[4, 9, 7, 2, 0], [3, 2, 0, 0, 0]], np.int64)
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int64)
    got = ReferenceEvaluator(loaded).run(None, {"input_ids": ids, "attention_mask": mask})[0]
    wanted = embed_float64(config, params, [ids[0, :4].astype(np.int32), ids[1, :2].astype(np.int32)])
    assert np.abs(got - wanted).max() < 1e-5
    own = onnx.load(export_encoder(model, tmp_path / "own.onnx", attention="onnxruntime"))
    attention = [node for node in own.graph.node if node.domain == "com.microsoft"]
    assert [node.op_type for node in attention] == ["Attention", "Attention"]
    with pytest.raises(ExperimentError, match="mean pooling"):
        export_encoder(
            TextModel("m", None, None, params, {}, {}, None, config={**facts, "pooling": "cls"}), tmp_path
        )


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A random llama of one layer whose words are the bytes."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    from servax.models import bpe

    words = ["<|end|>", *sorted(bpe.byte_characters(), key=lambda word: bpe.byte_characters()[word]), "hi"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    numbers = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
               "head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 500.0,
               "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["h i"])
    layer = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32),
             "attn_norm": (32,), "ffn_norm": (32,), "ffn_gate": (48, 32), "ffn_up": (48, 32),
             "ffn_down": (32, 48)}  # fmt: skip
    top = {"token_embd": (len(words), 32), "output_norm": (32,)}
    rng = np.random.default_rng(0)
    for name, shape in {**top, **{f"blk.0.{part}": shape for part, shape in layer.items()}}.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_a_decoder_becomes_a_folder_that_we_read_alike(gguf_file: Path, tmp_path: Path) -> None:
    import jax
    from servax.experiments.peers.folders import decoder_folder
    from servax.models import load

    original, again = load(gguf_file), load(decoder_folder(gguf_file, tmp_path / "folder"))
    ids = [model.tokenizer.encode(["hi, world! 123"])[0].tolist() for model in (original, again)]
    assert ids[0] == ids[1]
    assert (original.eos_ids, original.limits) == (again.eos_ids, again.limits)
    for a, b in zip(jax.tree.leaves(original.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
