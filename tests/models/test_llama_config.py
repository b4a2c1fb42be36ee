"""Configurations: what they mean, and what is refused with its name."""

import math

import numpy as np
import pytest
from servax.models import CheckpointError, UnsupportedModel
from servax.models.llama_config import LlamaConfig, from_huggingface
from servax.models.rope import divisors, frequencies

RAW = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "eos_token_id": [2, 0],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_sizes_are_read_and_defaults_are_the_familys():
    config = from_huggingface(RAW)
    assert (config.head_size, config.num_kv_heads, config.max_tokens) == (8, 2, 64)
    assert (config.eos_ids, config.bos_id, config.tied, config.rms_norm_eps) == ((2, 0), None, False, 1e-6)
    assert from_huggingface(RAW | {"num_key_value_heads": None}).num_kv_heads == 4
    assert from_huggingface(RAW | {"head_dim": 16}).head_size == 16
    assert from_huggingface(RAW, {"eos_token_id": 7}).eos_ids == (7,)


@pytest.mark.parametrize(
    ("kind", "bias", "norm"),
    [("llama", False, False), ("mistral", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_members_of_the_family_differ_in_biases_and_norms(kind, bias, norm):
    config = from_huggingface(RAW | {"model_type": kind})
    assert (config.qkv_bias, config.qk_norm, config.architecture) == (bias, norm, kind)


def test_sliding_windows_limit_the_context():
    assert from_huggingface(RAW | {"model_type": "mistral", "sliding_window": 40}).max_tokens == 40
    assert from_huggingface(RAW | {"model_type": "mistral", "sliding_window": None}).max_tokens == 64
    qwen = RAW | {"model_type": "qwen2", "sliding_window": 40, "use_sliding_window": False}
    assert from_huggingface(qwen).max_tokens == 64


def test_rotary_settings_of_old_and_new_files_are_the_same():
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = from_huggingface(RAW | {"rope_scaling": scaling})
    new = from_huggingface(RAW | {"rope_theta": None, "rope_parameters": scaling | {"rope_theta": 500.0}})
    assert old == new
    assert (old.rope_theta, old.rope_divisors) == (500.0, (4.0,) * 4)


def test_llama3_frequencies_keep_short_waves_and_stretch_long_ones():
    plain = frequencies(1e4, 64)
    scaled = frequencies(1e4, 64, divisors(LLAMA3, 1e4, 64))
    turns = 32 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns >= 1) & (turns <= 4)
    assert between.any()
    smooth = (turns[between] - 1) / 3
    blend = (1 - smooth) * plain[between] / 8 + smooth * plain[between]
    np.testing.assert_allclose(scaled[between], blend, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of llama, mistral, qwen2, qwen3, got 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "default, linear or llama3, got 'yarn'"),
        ({"num_attention_heads": 5, "head_dim": 8}, "must divide num_attention_heads, got 2 for 5"),
        ({"head_dim": 7}, "head_dim must be even to be rotated, got 7"),
        ({"eos_token_id": [2, 300]}, r"eos ids must be rows of the word table \(0..99\), got \[300\]"),
        ({"num_hidden_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_what_is_not_computed_is_refused(change, words):
    with pytest.raises(UnsupportedModel, match=words):
        from_huggingface(RAW | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size as an integer, got None"),
        ({"vocab_size": True}, "vocab_size as an integer, got True"),
        ({"rope_scaling": {"type": "linear"}}, "factor as a positive number, got None"),
        ({"eos_token_id": "2"}, "special token ids must be integers, got '2'"),
    ],
)
def test_malformed_values_are_named(change, words):
    with pytest.raises(CheckpointError, match=words):
        from_huggingface(RAW | change)


def test_divisors_must_fit_the_head():
    with pytest.raises(UnsupportedModel, match="one for each of the 4 frequencies, got 1"):
        LlamaConfig(10, 32, 1, 4, 2, 8, 64, rope_divisors=(1.0,))
