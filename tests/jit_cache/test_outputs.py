"""What a servable returns: inferred dims, and cutting a batch back to its items."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servax.bucketing import Grid
from servax.jit_cache import OutputError, Outputs, Servable, Signature, SignatureError, infer_outputs

pytestmark = pytest.mark.usefixtures("strict_numerics")
X = {"x": "float32[length]"}


def dims(apply, inputs=X, params=None, limit=64, **options):
    """Dims by output name, as a servable infers them."""
    axes = Signature.parse(inputs).axes
    servable = Servable(apply, params, inputs=inputs, limits=dict.fromkeys(axes, limit), **options)
    return {leaf.name: leaf.dims for leaf in servable.outputs.leaves}


@dataclass
class Pair:
    first: jax.Array
    second: jax.Array


jax.tree_util.register_dataclass(Pair)


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


@pytest.mark.parametrize(
    ("apply", "wanted"),
    [
        (lambda x: x, {"output": ("length",)}),
        (lambda x: x[:, 0], {"output": ()}),
        (lambda x: {"b": x, "a": x[:, :1]}, {"a": (1,), "b": ("length",)}),
        (lambda x: (x, x[:, 0]), {"output_0": ("length",), "output_1": ()}),
        (lambda x: [x], {"output_0": ("length",)}),
        (
            lambda x: (x, (x, x)),
            {"output_0": ("length",), "output_1.0": ("length",), "output_1.1": ("length",)},
        ),
        (lambda x: {"deep": {"x": x, "none": None}}, {"deep.x": ("length",)}),
        (lambda x: Pair(x, x[:, 0]), {"first": ("length",), "second": ()}),
        (lambda x: Point(x, x[:, 0]), {"x": ("length",), "y": ()}),
        (lambda x: jnp.concatenate([x, x[:, 1:]], axis=1), {"output": ("2*length - 1",)}),
        (lambda x: x[:, ::2], {"output": ("floordiv(length + 1, 2)",)}),
        (lambda x: x[:, :16], {"output": ("min(length, 16)",)}),
        (lambda x: x[:, :, None] * x[:, None, :], {"output": ("length", "length")}),
        (lambda x: x.reshape(x.shape[0], -1, 1), {"output": ("length", 1)}),
        (lambda x: jnp.zeros((x.shape[0], 5), jnp.bfloat16), {"output": (5,)}),
    ],
)
def test_dims_follow_from_the_axes(apply, wanted):
    assert dims(apply) == wanted


def test_dtypes_are_those_of_the_function():
    servable = Servable(lambda x: (x.astype(jnp.bfloat16), x > 0), inputs=X, limits={"length": 8})
    assert [leaf.dtype for leaf in servable.outputs.leaves] == [jnp.bfloat16, np.bool_]


IMAGE = {"image": "float32[height, width, 3]"}


def conv(params, image):
    return jax.lax.conv_general_dilated(
        image, params, (2, 3), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_a_convolution_strided_on_two_axes(harness):
    kernel = np.random.default_rng(0).normal(size=(3, 3, 3, 4)).astype(np.float32)
    strided = harness(conv, kernel, inputs=IMAGE, limits={"height": 16, "width": 16})
    shape = strided.servable.outputs.leaves[0]
    for height, width in [(1, 1), (5, 7), (16, 16), (6, 9)]:
        wanted = jax.eval_shape(conv, kernel, jax.ShapeDtypeStruct((1, height, width, 3), np.float32)).shape
        assert strided.servable.outputs.item_shape(shape, (height, width)) == wanted[1:]
    images = [np.ones((5, 7, 3), np.float32), np.ones((8, 8, 3), np.float32)]
    small, large = strided.run((2, 8, 8), *({"image": image} for image in images))
    assert small.shape == (3, 3, 4)
    np.testing.assert_allclose(large, conv(kernel, images[1][None])[0], rtol=1e-5)


def test_a_flax_module_with_its_own_output_type():
    from flax import nnx

    class Out(nnx.Pytree):
        def __init__(self, tokens, pooled):
            self.tokens = nnx.data(tokens)
            self.pooled = nnx.data(pooled)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(1, 4, rngs=rngs)

        def __call__(self, x):
            tokens = self.layer(x[..., None])
            return Out(tokens, tokens[:, 0])

    from servax.jit_cache import from_nnx

    model = from_nnx(Model(nnx.Rngs(0)), inputs=X, limits={"length": 8})
    assert {leaf.name: leaf.dims for leaf in model.outputs.leaves} == {
        "pooled": (4,),
        "tokens": ("length", 4),
    }


def test_a_table_of_positions_may_be_cut_to_the_length():
    table = np.zeros((64, 4), np.float32)
    assert dims(lambda p, x: x[..., None] + p[: x.shape[1]][None], params=table) == {"output": ("length", 4)}


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda x: x.sum(), r"batch as its first dim; output 'output' has dims \[\]"),
        (lambda x: x.sum(0), r"batch as its first dim; output 'output' has dims \['length'\]"),
        (lambda x: x.sum(0, keepdims=True), r"batch as its first dim; .* has dims \[1, 'length'\]"),
        (lambda x: x.T, r"batch as its first dim; .* has dims \['length', 'batch'\]"),
        (lambda x: jnp.concatenate([x, x]), r"batch as its first dim; .* has dims \['2\*batch', 'length'\]"),
        (lambda x: {"n": 3, "x": x}, r"batch as its first dim; output 'n' has dims \[\]"),
        (
            lambda x: x @ x.T,
            r"must follow from the axes of one item; .* has dims \['batch', 'batch'\]: declare",
        ),
        (lambda x: {"a.b": x, "a": {"b": x}}, r"distinct names.*\['a.b'\] come twice"),
        (
            lambda x: (lambda x, train: x)(x),
            "missing 1 required .* argument: 'train': bind the argument with functools.partial, or declare",
        ),
        (lambda x: "text", "must be traceable with its declared inputs; .*TypeError"),
        (lambda x: x + undefined, "must be traceable.*failed with NameError: name 'undefined'"),  # noqa: F821
        (lambda x: jax.random.split(jax.random.key(0), x.shape[0]), "arrays of numbers; .*has key"),
    ],
)
def test_what_no_batch_of_items_can_return(apply, message):
    with pytest.raises(SignatureError, match=message):
        dims(apply)


def test_an_axis_may_have_batch_in_its_name():
    assert dims(lambda x: x, {"x": "float32[batches]"}) == {"output": ("batches",)}


def branching(x):
    """Looks at concrete sizes, so it has no symbolic shape."""
    return x * 2 if np.log2(int(x.shape[1])) > 4 else x + 1


@pytest.mark.parametrize("scheme", [None, "single", [5, 40, 64], {"length": [64], "batch": [2]}])
def test_a_function_that_looks_at_sizes_is_probed(scheme):
    assert dims(branching, scheme=scheme) == {"output": ("length",)}
    assert dims(lambda x: (branching(x)[:, 0], jnp.zeros((int(x.shape[0]), 8))), scheme=scheme) == {
        "output_0": (),
        "output_1": (8,),
    }


def test_probing_tells_axes_apart():
    inputs = {"image": "uint8[height, width]"}

    def apply(image):
        assert int(image.shape[1]) > 0
        return image.swapaxes(1, 2), image[:, :1]

    assert dims(apply, inputs) == {"output_0": ("width", "height"), "output_1": (1, "width")}


def test_probing_without_a_grid():
    signature = Signature.parse(X)
    outputs = infer_outputs(lambda _, x: branching(**x), [], signature)
    assert [leaf.dims for leaf in outputs.leaves] == [("length",)]
    with pytest.raises(SignatureError, match="must be traceable"):
        infer_outputs(lambda _, x: x["missing"], [], signature)


def test_what_probing_cannot_tell_is_asked_for():
    def apply(x):
        return jnp.repeat(branching(x), 2, axis=1)

    with pytest.raises(SignatureError, match=r"has dims \['batch', '\?'\]: declare its .*outputs=.*'float32"):
        dims(apply)
    declared = {"output": "float32[2*length]"}
    assert dims(apply, outputs=declared) == {"output": ("2*length",)}


def square(image):
    assert int(image.shape[1]) == int(image.shape[2])
    return image


def test_only_sizes_of_one_bucket_need_go_together():
    inputs = {"image": "float32[height, width]"}
    axes = ("batch", "height", "width")
    grid = Grid.explicit(axes, [(1, 8, 8), (4, 8, 8), (1, 16, 16)])
    with pytest.raises(SignatureError, match=r"has dims \['batch', '\?', '\?'\]: declare"):
        dims(square, inputs, limit=16, grid=grid)
    declared = {"output": "float32[height, width]"}
    assert dims(square, inputs, limit=16, grid=grid, outputs=declared) == {"output": ("height", "width")}


def test_a_structure_that_changes_with_the_size_is_refused():
    def apply(x):
        return (x, x) if int(x.shape[1]) > 8 else x

    with pytest.raises(SignatureError, match="the same structure at every size"):
        dims(apply)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"output": "float32"}, r"declared as 'dtype\[dims\]'"),
        ({"output": "float32[]"}, "agrees with what the model returns; .* is float32 with 1 dims"),
        ({"output": "int32[length]"}, "agrees with what the model returns"),
        ({"output": "float32[width]"}, "an expression of the axes"),
        ({"output": "float32[batch]"}, "an expression of the axes"),
        ({"other": "float32[length]"}, r"outputs are \['output'\]; declared but not returned: \['other'\]"),
    ],
)
def test_a_declaration_must_agree(declared, message):
    with pytest.raises(SignatureError, match=message):
        dims(lambda x: x, outputs=declared)


def test_a_declaration_may_be_an_expression():
    declared = {"output": "float32[floordiv(length + 1, 2), max(length, 3), 4]"}

    def apply(x):
        return jnp.zeros((*x.shape, x.shape[1], 4))

    assert dims(apply, outputs=declared) == {"output": ("floordiv(length + 1, 2)", "max(length, 3)", 4)}


def test_a_declaration_does_not_excuse_a_missing_batch():
    with pytest.raises(SignatureError, match="batch as its first dim"):
        dims(lambda x: x.sum(0), outputs={"output": "float32[]"})


def outputs_of(apply, inputs=X, limit=64):
    axes = Signature.parse(inputs).axes
    return Servable(apply, inputs=inputs, limits=dict.fromkeys(axes, limit)).outputs


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_cutting_a_padded_batch_gives_back_its_items(data):
    outputs = CUTTING
    rows = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 9)), max_size=rows))
    ragged, fixed, scalar = (np.random.default_rng(0).integers(0, 99, (rows, *s)) for s in ((9, 2), (3,), ()))
    cut = outputs.cut([ragged, fixed, scalar], sizes)
    assert len(cut) == len(sizes)
    for row, ((length,), item) in enumerate(zip(sizes, cut, strict=True)):
        for got, wanted in zip(item, (ragged[row, :length], fixed[row], scalar[row]), strict=True):
            assert isinstance(got, np.ndarray)
            assert got.base is None, "an answer must not share memory with the batch"
            np.testing.assert_array_equal(got, wanted)


CUTTING = outputs_of(lambda x: (x[..., None] * jnp.ones((1, 1, 2)), x[:, :1] * jnp.ones((1, 3)), x[:, 0]))


def test_P6_a_wrong_number_of_rows_is_a_fault():
    outputs = outputs_of(lambda x: x)
    outputs.check_batch([np.zeros((4, 8))], 4)
    with pytest.raises(OutputError, match="output 'output': expected 4 rows, got 3"):
        outputs.check_batch([np.zeros((3, 8))], 4)
    with pytest.raises(OutputError, match="expected 4 rows, got no batch dim"):
        outputs.check_batch([np.zeros(())], 4)


@pytest.mark.parametrize("shape", [(2, 3), (2,), (2, 4, 1)])
def test_an_answer_is_never_cut_from_less_than_it_needs(shape):
    with pytest.raises(OutputError, match=r"here \[4\]; the model returned"):
        outputs_of(lambda x: x).cut([np.zeros(shape)], [(4,)])


def test_a_dim_that_gets_negative_is_a_fault():
    outputs = outputs_of(lambda x: x)
    negative = Outputs((type(outputs.leaves[0])("y", np.dtype("f4"), ("length - 8",)),), None, ("length",))
    with pytest.raises(OutputError, match=r"here \[-4\]"):
        negative.cut([np.zeros((1, 8))], [(4,)])


def test_a_declared_fixed_dim_is_cut_too():
    servable = Servable(
        lambda x: jnp.zeros((x.shape[0], 8)), inputs=X, limits={"length": 8}, outputs={"output": "float32[5]"}
    )
    (item,) = servable.outputs.cut([np.arange(8.0)[None]], [(3,)])
    np.testing.assert_array_equal(item[0], np.arange(5.0))


def test_a_grid_of_one_row():
    assert dims(lambda x: x * 2, scheme={"batch": [1]}, limit=4) == {"output": ("length",)}


def test_the_declaration_in_the_refusal_is_one_that_is_understood():
    with pytest.raises(SignatureError, match="must follow from the axes of one item") as refused:
        dims(lambda x: x @ x.T)
    shown = re.search(r"'(float32\[[^\]]*\])'}", str(refused.value))
    assert shown is not None

    def apply(x):
        return jnp.zeros((x.shape[0], (x.shape[1] + 1) // 2, 64))

    assert dims(apply, outputs={"output": shown[1]}) == {"output": ("(length + 1)//2", 64)}
