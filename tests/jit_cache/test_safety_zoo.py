"""Planted padding faults, each beside its correct twin: the check refuses the one and passes the other.

A specimen is a model built with ``good=False`` or ``good=True``; the names say which axes its fault is
blamed on.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from servax.jit_cache import Servable
from servax.jit_cache.safety import check_padding

F32 = jnp.float32
FEATURES = {"x": "float32[length, 4]", "mask": "mask[length]"}
Model = Callable[..., Any]
ZOO: dict[str, tuple[Callable[[bool], Model], dict[str, str], set[str]]] = {}


def specimen(*axes: str, **inputs: str) -> Callable[[Callable[[bool], Model]], Callable[[bool], Model]]:
    def register(make: Callable[[bool], Model]) -> Callable[[bool], Model]:
        ZOO[make.__name__] = (make, inputs or FEATURES, set(axes))
        return make

    return register


def selected(x: Any, mask: Any, other: float = 0.0) -> Any:
    return jnp.where(mask[..., None], x, F32(other))


def masked_mean(x: Any, mask: Any) -> Any:
    count = jnp.maximum(mask.sum(1, dtype=F32), F32(1))
    return selected(x, mask).sum(1) / count[:, None]


@specimen("length")
def unmasked_mean_pool(good: bool) -> Model:
    return lambda *, x, mask: masked_mean(x, mask) if good else x.mean(1)


@specimen("length")
def mean_over_padded_length(good: bool) -> Model:
    """The sum is masked, the count is the bucket's."""
    return lambda *, x, mask: masked_mean(x, mask) if good else selected(x, mask).mean(1)


@specimen("batch", "length")
def batch_norm_over_padding(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        mean, deviation = (F32(0.1), F32(2)) if good else (x.mean((0, 1)), x.std((0, 1)))
        return (x - mean) / (deviation + F32(1e-3))

    return apply


@specimen("length")
def P13_group_norm_over_time(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        if not good:
            return (x - x.mean((1, 2), keepdims=True)) / (x.std((1, 2), keepdims=True) + F32(1e-3))
        count = jnp.maximum(mask.sum(1, dtype=F32), F32(1))[:, None, None] * 4
        centred = selected(x - selected(x, mask).sum((1, 2), keepdims=True) / count, mask)
        return centred / jnp.sqrt((centred**2).sum((1, 2), keepdims=True) / count + F32(1e-3))

    return apply


@specimen("batch")
def infinite_mask_on_an_empty_row(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        scores = jnp.where(mask, x[..., 0], F32(-1e30) if good else -jnp.inf)
        weights = jax.nn.softmax(scores, axis=1)
        return jnp.einsum("bl,bld->bd", weights, selected(x, mask))

    return apply


@specimen("length")
def P4_first_token_under_left_padding(good: bool) -> Model:
    """Rows are moved to the right end; the first token then stands behind the padding."""

    def apply(*, x: Any, mask: Any) -> Any:
        length = x.shape[1]
        shift = length - mask.sum(1, dtype=jnp.int32)
        source = jnp.arange(length, dtype=jnp.int32) - shift[:, None]
        left = jnp.take_along_axis(x, jnp.maximum(source, 0)[..., None], axis=1)
        left = selected(left, source >= 0)
        first = shift if good else jnp.zeros_like(shift)
        return jnp.take_along_axis(left, jnp.minimum(first, length - 1)[:, None, None], axis=1)[:, 0]

    return apply


@specimen("length")
def last_position_in_place_of_last_token(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        last = jnp.maximum(mask.sum(1, dtype=jnp.int32) - 1, 0)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0] if good else x[:, -1]

    return apply


@specimen("batch")
def position_ids_from_the_row_index(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        rows, length, _ = x.shape
        if good:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=F32), (rows, length))
        else:
            positions = jnp.broadcast_to(jnp.arange(rows, dtype=F32)[:, None], (rows, length))
        return x + jnp.sin(positions)[..., None]

    return apply


@specimen("batch")
def cross_row_statistics(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        pooled = masked_mean(x, mask)
        return pooled - (F32(0) if good else pooled.mean(0))

    return apply


@specimen("batch")
def running_sum_over_the_batch(good: bool) -> Model:
    """Only the rows before a row reach it, so a row alone at the front is right."""
    return lambda *, x, mask: masked_mean(x, mask) if good else jnp.cumsum(masked_mean(x, mask), axis=0)


@specimen(
    "length", query="float32[4]", keys="float32[length, 4]", values="float32[length, 4]", mask="mask[length]"
)
def P11_masked_values_leak_nan(good: bool) -> Model:
    def apply(*, query: Any, keys: Any, values: Any, mask: Any) -> Any:
        scores = jnp.where(mask, jnp.einsum("bd,bld->bl", query, keys), F32(-1e30))
        weights = jax.nn.softmax(scores, axis=1)
        return jnp.einsum("bl,bld->bd", weights, selected(values, mask) if good else values)

    return apply


@specimen("batch")
def top_k_over_the_batch(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        pooled = masked_mean(x, mask)
        if good:
            return pooled
        score = pooled.sum(1)
        kept = score >= jax.lax.top_k(score, max(1, score.shape[0] // 2))[0][-1]
        return jnp.where(kept[:, None], pooled, F32(0))

    return apply


@specimen("batch", "length")
def P12_scale_by_the_maximum_of_the_whole_tensor(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        size = jnp.abs(selected(x, mask))
        scale = size.max((1, 2), keepdims=True) if good else jnp.abs(x).max()
        return jnp.round(x / jnp.maximum(scale, F32(1e-3)) * 127)

    return apply


@specimen("batch", "length")
def P12_expert_capacity(good: bool) -> Model:
    """Tokens of the whole batch queue for two experts of bounded room; later ones are dropped."""

    def apply(*, x: Any, mask: Any) -> Any:
        rows, length, _ = x.shape
        expert = (x[..., 0] > 0).astype(jnp.int32).reshape(-1)
        tokens = x.reshape(-1, 4)
        done = jnp.where(expert[:, None] == 0, tokens * 2, jnp.tanh(tokens))
        if not good:
            queue = jnp.cumsum(jax.nn.one_hot(expert, 2, dtype=jnp.int32), axis=0)
            place = jnp.take_along_axis(queue, expert[:, None], axis=1)
            done = jnp.where(place <= max(1, rows * length // 3), done, F32(0))
        return done.reshape(rows, length, 4)

    return apply


@specimen("batch")
def cut_at_the_longest_neighbour(good: bool) -> Model:
    """Attention over the longest row's length, not the own one: only ragged neighbours show it."""

    def apply(*, x: Any, mask: Any) -> Any:
        own = mask.sum(1, dtype=jnp.int32)[:, None]
        reach = own if good else jnp.max(own, axis=0, keepdims=True)
        return selected(x, mask).sum(1) / jnp.maximum(reach, 1).astype(F32)

    return apply


@specimen("length")
def reversed_with_its_padding(good: bool) -> Model:
    def apply(*, x: Any, mask: Any) -> Any:
        count = mask.sum(1, dtype=jnp.int32)[:, None]
        back = count - 1 - jnp.arange(x.shape[1], dtype=jnp.int32)
        return jnp.take_along_axis(x, jnp.maximum(back, 0)[..., None], axis=1) if good else x[:, ::-1]

    return apply


@specimen("length", ids="int32[length] = 1", mask="mask[length]")
def padding_ids_in_a_bag_of_words(good: bool) -> Model:
    table = jnp.sin(jnp.arange(64, dtype=F32)).reshape(16, 4)

    def apply(*, ids: Any, mask: Any) -> Any:
        vectors = table[ids]
        return (selected(vectors, mask) if good else vectors).sum(1)

    return apply


def served(make: Callable[[bool], Model], inputs: dict[str, str], good: bool) -> Servable:
    return Servable(
        make(good),
        inputs=inputs,
        limits={"length": 32, "batch": 16},
        scheme="powers_of_two:8",
        name=make.__name__,
    )


@pytest.mark.parametrize("name", ZOO)
def test_P11_P12_P13_a_planted_fault_is_refused_on_its_axis(name: str) -> None:
    make, inputs, axes = ZOO[name]
    report = check_padding(served(make, inputs, good=False))
    assert set(report.refused) == axes, report.explain()
    for axis in axes:
        finding = report[axis].findings[0]
        assert finding.output == "output"
        assert finding.difference > finding.allowed
        assert all(
            word in report.explain() for word in (axis, "'output'", "row ", finding.probe, finding.remedy)
        )


@pytest.mark.parametrize("name", ZOO)
def test_P11_P12_P13_its_correct_twin_passes(name: str) -> None:
    make, inputs, _ = ZOO[name]
    report = check_padding(served(make, inputs, good=True))
    assert report.ok, report.explain()
    assert all(verdict.probes > 5 for verdict in report.axes)
