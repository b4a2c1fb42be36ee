"""The padding-safety check: what it takes, what it says, and the models that must pass it."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket
from servax.jit_cache import InputError, Servable, SignatureError, compile_log, compile_program
from servax.jit_cache.errors import UnsafePaddingError
from servax.jit_cache.safety import check_padding, require_safe
from servax.jit_cache.safety_compare import compare

F32 = jnp.float32
TABLE = np.sin(np.arange(64, dtype=np.float32)).reshape(16, 4)


def mean_of_words(table: Any, *, ids: Any, mask: Any) -> Any:
    vectors = jnp.where(mask[..., None], jnp.take(table, ids, axis=0), F32(0))
    return vectors.sum(1) / jnp.maximum(mask.sum(1, dtype=F32), F32(1))[:, None]


def words(function: Any = mean_of_words, params: Any = TABLE, **options: Any) -> Servable:
    options = {"inputs": {"ids": "int32[length]", "mask": "mask[length]"}, **options}
    options = {"limits": {"length": 32, "batch": 8}, "scheme": "powers_of_two:8", **options}
    return Servable(function, params, **options)


def group_norm(*, x: Any, mask: Any) -> Any:
    return {"normed": (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + F32(1e-3))}


GROUP_NORM = {"inputs": {"x": "float32[length, 4]", "mask": "mask[length]"}, "name": "encoder"}


def test_P13_group_norm_over_time_is_refused_and_served_at_exact_lengths_only() -> None:
    servable = Servable(group_norm, **GROUP_NORM, limits={"length": 16, "batch": 4})
    with pytest.raises(UnsafePaddingError) as refused:
        require_safe(servable)
    message = str(refused.value)
    for part in ("axis 'length' of model 'encoder'", "output 'normed' at row 0", "moved by", "exact sizes"):
        assert part in message
    options = check_padding(servable).exact_options()
    limits = {"length": 16, **options["limits"]}
    exact = Servable(group_norm, **GROUP_NORM, limits=limits, scheme=options["scheme"])
    report = require_safe(exact)
    assert not any(verdict.padded for verdict in report.axes)


def test_P13_images_padded_on_two_axes_with_a_mask_pass() -> None:
    kernel = np.random.default_rng(0).standard_normal((3, 3, 3, 5)).astype(np.float32)

    def encode(kernel: Any, *, image: Any, mask: Any) -> Any:
        x = jnp.where(mask[..., None], image.astype(F32) / F32(255), F32(0))
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = jnp.where(mask[..., None], jax.nn.relu(y), F32(0))
        return {"map": y, "pooled": y.sum((1, 2)) / jnp.maximum(mask.sum((1, 2), dtype=F32), F32(1))[:, None]}

    servable = Servable(
        encode,
        kernel,
        inputs={"image": "uint8[height, width, 3]", "mask": "mask[height, width]"},
        limits={"height": 64, "width": 64, "batch": 2},
        scheme=[64],
    )
    image = np.random.default_rng(1).integers(0, 256, (30, 40, 3), np.uint8)
    report = require_safe(servable, items=[{"image": image}])
    assert [verdict.axis for verdict in report.axes] == ["batch", "height", "width"]
    assert all(verdict.probes for verdict in report.axes)


def test_P11_a_masked_bert_passes() -> None:
    pytest.importorskip("servax.models.registry")
    from servax.models.errors import WeightsNotInstalled
    from servax.models.registry import load

    try:
        model = load("minilm")
    except WeightsNotInstalled as absent:
        pytest.skip(str(absent))
    servable = Servable(
        model.apply,
        model.params,
        inputs=model.inputs,
        limits={**model.limits, "batch": 4},
        scheme={"length": [8, 16, 256], "batch": [4]},
    )
    report = require_safe(servable, ids_below={"ids": model.config["vocab_size"]})
    assert report.programs <= 4
    assert report["length"].worst < 1e-5


def test_P1_a_mask_that_callers_send_keeps_its_pad_value() -> None:
    inputs = {"ids": "int32[length]", "attention_mask": "int32[length]"}

    def apply(table: Any, *, ids: Any, attention_mask: Any) -> Any:
        return mean_of_words(table, ids=ids, mask=attention_mask != 0)

    assert check_padding(words(apply, inputs=inputs)).ok
    report = check_padding(words(apply, inputs=inputs), controls=[])
    assert report["length"].findings[0].source == "attention_mask"
    assert "attention_mask" in report.explain()


def test_P1_a_model_that_tells_padding_by_its_value_passes_only_where_that_is_trusted() -> None:
    def apply(table: Any, *, ids: Any) -> Any:
        return mean_of_words(table, ids=ids, mask=ids != 0)

    servable = words(apply, inputs={"ids": "int32[length]"})
    report = check_padding(servable)
    assert report.refused == ("length",)
    assert "declare a mask" in report.explain()
    assert "trust_pad=True" in report.explain()
    assert check_padding(servable, trust_pad=True).ok


def test_given_items_keep_to_their_values() -> None:
    """Ids 5 and 6 and the pad value are all that is ever sent: anything else would give NaN."""
    table = np.full((16, 4), np.nan, np.float32)
    table[[0, 5, 6]] = TABLE[[0, 5, 6]]
    report = check_padding(words(params=table), items=[{"ids": np.array([5, 6, 5])}])
    assert report.ok
    with pytest.raises(InputError, match="ids_below"):
        check_padding(words(params=table), ids_below={"ids": 16})


def test_a_vocabulary_that_was_guessed_too_large_is_guessed_smaller() -> None:
    assert check_padding(words(params=TABLE[:3])).ok


def test_answers_of_nan_are_no_reference() -> None:
    def nothing(*, ids: Any, mask: Any) -> Any:
        return jnp.full(ids.shape[:1], jnp.nan, F32)

    with pytest.raises(InputError, match="answered NaN in bucket 4x5: pass items"):
        check_padding(words(nothing, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids_below": {"idz": 3}}, "ids_below is for the integer inputs"),
        ({"controls": ["idz"]}, "controls are some of the inputs"),
        ({"items": [{"ids": np.zeros((2, 2), np.int32)}]}, "dims"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_padding(words(), **options)


def test_programs_come_from_a_given_compiler_each_bucket_once() -> None:
    servable = words()
    leaves = [jax.device_put(leaf) for leaf in servable.leaves]
    asked: list[Bucket] = []

    def compile_fn(bucket: Bucket) -> Any:
        asked.append(bucket)
        return compile_program(servable, bucket, leaves)

    report = check_padding(servable, compile_fn=compile_fn)
    assert len(asked) == len(set(asked)) == report.programs == 5


def test_exact_sizes_that_do_not_compile_fall_back_to_rungs() -> None:
    def patches(*, x: Any, mask: Any) -> Any:
        x = jnp.where(mask, x, F32(0))
        return x.reshape(x.shape[0], x.shape[1] // 8, 8).sum(2)

    inputs = {"x": "float32[length]", "mask": "mask[length]"}
    report = check_padding(words(patches, None, inputs=inputs))
    assert report.ok
    assert not report["length"].notes
    single = check_padding(words(patches, None, inputs=inputs, scheme="single"))
    assert single.ok
    assert "only 32 compiles" in single["length"].notes[0]


def test_an_output_of_low_precision_has_a_tolerance_of_its_own() -> None:
    def apply(table: Any, *, ids: Any, mask: Any) -> Any:
        return mean_of_words(table, ids=ids, mask=mask).astype(jnp.bfloat16)

    assert check_padding(words(apply)).ok


@pytest.mark.parametrize(
    ("dtype", "allowed"), [("float32", 1e-5), ("bfloat16", 2e-3), ("float16", 2e-3), ("int8", 1e-2)]
)
def test_weights_of_low_precision_allow_more_between_buckets(dtype: str, allowed: float) -> None:
    def apply(params: Any, *, ids: Any, mask: Any) -> Any:
        return mean_of_words(params["table"], ids=ids, mask=mask)

    servable = words(apply, {"table": TABLE, "other": np.ones(10 * TABLE.size, dtype)})
    assert check_padding(servable).tolerance == allowed
    assert check_padding(servable, tolerance=1e-4).tolerance == 1e-4
    few = words(apply, {"table": TABLE, "other": np.ones(3, dtype)})
    assert check_padding(few).tolerance == 1e-5


def test_infinity_for_real_rows_is_an_answer() -> None:
    def apply(table: Any, *, ids: Any, mask: Any) -> Any:
        return jnp.log(mean_of_words(jnp.zeros_like(table), ids=ids, mask=mask))

    assert check_padding(words(apply)).ok


def test_only_the_batch_varies() -> None:
    servable = Servable(lambda *, x: x * 2, inputs={"x": "float32[3]"}, limits={"batch": 8})
    assert check_padding(servable).ok
    mixed = Servable(lambda *, x: x - x.mean(0), inputs={"x": "float32[3]"}, limits={"batch": 8})
    report = check_padding(mixed)
    assert report.refused == ("batch",)
    assert report.exact_options() == {"limits": {"batch": 1}, "scheme": {"batch": [1]}}


def test_the_report_is_plain_json_and_the_same_for_the_same_seed() -> None:
    servable = Servable(group_norm, **GROUP_NORM, limits={"length": 16, "batch": 4})
    first, second = (check_padding(servable, seed=3).to_json() for _ in range(2))
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    for report in (first, second):
        report.pop("seconds")
    assert first == second


def test_nothing_is_compiled_but_the_buckets() -> None:
    servable = words()
    assert servable.outputs
    before = compile_log().total()[1]
    report = check_padding(servable)
    assert compile_log().total()[1] - before == report.programs


def test_a_servable_that_cannot_be_traced_says_so() -> None:
    def broken(*, ids: Any, mask: Any) -> Any:
        raise ValueError("no such thing")

    with pytest.raises(SignatureError, match="no such thing"):
        check_padding(words(broken, None))


floats = st.floats(-1e3, 1e3, width=32)


@given(st.lists(floats, min_size=1, max_size=6), st.data())
def test_compare_names_the_place_that_moved_most(values: list[float], data: st.DataObject) -> None:
    want = np.array(values, np.float32)
    assert compare([want], [want.copy()]) is None
    place = data.draw(st.integers(0, len(values) - 1))
    got = want.copy()
    got[place] += np.float32(5e3)
    moved = compare([want, got], [want, want], 1e-5)
    assert moved is not None
    assert (moved.leaf, moved.place, moved.outside) == (1, (place,), True)
    assert moved.allowed == pytest.approx(1e-5 * max(1.0, float(np.abs(want).max())))


def test_compare_counts_nan_and_shape_as_infinitely_far() -> None:
    want = np.array([1.0, np.inf], np.float32)
    assert compare([want], [want]) is None
    for got in (np.array([np.nan, np.inf], np.float32), np.zeros(3, np.float32)):
        moved = compare([got], [want], 1e-5)
        assert moved is not None
        assert moved.outside
        assert moved.difference == float("inf")


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": "float32[]"},
        {"x": "float32[]", "kind": "int32[]", "shift": "float32[3]"},
        {"words": "float32[length]", "mask": "mask[length]", "scale": "float32[]"},
    ],
)
def test_one_number_for_each_item_is_checked(inputs: dict[str, str]) -> None:
    def own(*, mask: Any = None, **given: Any) -> Any:
        wide = [one if mask is None or one.ndim == 1 else jnp.where(mask, one, 0) for one in given.values()]
        return sum(one if one.ndim == 1 else one.sum(1) for one in wide) * F32(1)

    def others(*, mask: Any = None, **given: Any) -> Any:
        return own(mask=mask, **given) - own(mask=mask, **given).mean()

    for function, safe in ((own, True), (others, False)):
        limits = {"batch": 4} | ({"length": 8} if "mask" in inputs else {})
        servable = Servable(function, inputs=inputs, limits=limits)
        report = check_padding(servable)
        assert report.ok is safe, report
