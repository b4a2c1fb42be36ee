# mypy: ignore-errors
"""MiniLM for CTranslate2, made from its safetensors file as the library's own converter would."""

import json
import os
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.converters import utils
from ctranslate2.specs import common_spec, transformer_spec
from encoder import THREADS
from safetensors.numpy import load_file


def _fill(target, tensors, name):
    target.weight = tensors[f"{name}.weight"]
    target.bias = tensors[f"{name}.bias"]


def _norm(target, tensors, name):
    target.gamma = tensors[f"{name}.weight"]
    target.beta = tensors[f"{name}.bias"]


def convert(source, target):
    """Write the encoder of a Hugging Face folder into a folder for CTranslate2."""
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    encoder = transformer_spec.TransformerEncoderSpec(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        pre_norm=False,
        activation=common_spec.Activation.GELU,
        layernorm_embedding=True,
        num_source_embeddings=2,
        embeddings_merge=common_spec.EmbeddingsMerge.ADD,
    )
    encoder.scale_embeddings = False
    encoder.embeddings[0].weight = tensors["embeddings.word_embeddings.weight"]
    encoder.embeddings[1].weight = tensors["embeddings.token_type_embeddings.weight"]
    encoder.position_encodings.encodings = tensors["embeddings.position_embeddings.weight"]
    _norm(encoder.layernorm_embedding, tensors, "embeddings.LayerNorm")
    for i, layer in enumerate(encoder.layer):
        here, parts = f"encoder.layer.{i}", [common_spec.LinearSpec() for _ in range(3)]
        for part, name in zip(parts, ("query", "key", "value"), strict=True):
            _fill(part, tensors, f"{here}.attention.self.{name}")
        utils.fuse_linear(layer.self_attention.linear[0], parts)
        _fill(layer.self_attention.linear[1], tensors, f"{here}.attention.output.dense")
        _norm(layer.self_attention.layer_norm, tensors, f"{here}.attention.output.LayerNorm")
        _fill(layer.ffn.linear_0, tensors, f"{here}.intermediate.dense")
        _fill(layer.ffn.linear_1, tensors, f"{here}.output.dense")
        _norm(layer.ffn.layer_norm, tensors, f"{here}.output.LayerNorm")
    spec = transformer_spec.TransformerEncoderModelSpec(encoder)
    spec.register_vocabulary((source / "vocab.txt").read_text().splitlines())
    spec.config.unk_token = "[UNK]"
    spec.config.layer_norm_epsilon = config["layer_norm_eps"]
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(target))


def run():
    """From ids and mask, as the ONNX runtimes take them, to unit vectors; padding is left out of the work."""
    with tempfile.TemporaryDirectory() as folder:
        convert(Path(os.environ["PEER_ENCODER"]), Path(folder))
        encoder = ctranslate2.Encoder(folder, device="cpu", intra_threads=THREADS, compute_type="float32")

    def embed(ids, mask):
        lengths = mask.sum(1).astype(np.int32)
        out = encoder.forward_batch(
            ctranslate2.StorageView.from_array(ids.astype(np.int32)),
            lengths=ctranslate2.StorageView.from_array(lengths),
        )
        states = np.array(out.last_hidden_state)
        mean = (states * mask[..., None]).sum(1) / lengths[:, None]
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    return embed
