"""A servable: parameters of any kind, limits, schemes, and what is refused at registration."""

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from servax.bucketing import BucketingError, CoverageError, Grid, powers_of_two
from servax.jit_cache import Servable, SignatureError, from_nnx

X = {"x": "float32[length]"}


def identity(x):
    return x


def make(apply=identity, params=None, **options):
    return Servable(apply, params, **({"inputs": X, "limits": {"length": 32}} | options))


class Weights(NamedTuple):
    scale: object
    shift: object


def scaled(params, x):
    scale, shift = jax.tree.leaves(params)
    return x * scale + shift


@pytest.mark.parametrize(
    "params",
    [
        {"a": np.float32(2), "b": np.ones(1, np.float32)},
        [jnp.float32(2), jnp.ones(1)],
        (2.0, 1.0),
        (2, True),
        Weights(np.float32(2), 1.0),
        {"a": {"none": None, "w": np.float32(2)}, "b": [None, 1.0]},
    ],
)
def test_params_may_be_any_tree(harness, params):
    model = harness(scaled, params, inputs=X, limits={"length": 8})
    (got,) = model.run((1, 8), {"x": [1.0, 2.0, 3.0]})
    np.testing.assert_array_equal(got, [3.0, 5.0, 7.0])
    assert got.dtype == np.float32


def test_python_numbers_stay_weak(harness, strict_numerics):
    """As in a plain call: a bfloat16 input times a Python float stays bfloat16."""
    model = harness(
        lambda p, x: x * p["scale"], {"scale": 2.0}, inputs={"x": "bfloat16[length]"}, limits={"length": 8}
    )
    (got,) = model.run((1, 8), {"x": [1.0, 2.0]})
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), [2.0, 4.0])


@pytest.mark.parametrize("params", [{}, [], (None, None)])
def test_a_tree_without_leaves_is_passed_on(harness, params):
    def apply(given, x):
        assert given == params
        return x

    (got,) = harness(apply, params, inputs=X, limits={"length": 8}).run((1, 8), {"x": [1.0]})
    np.testing.assert_array_equal(got, [1.0])


def test_wide_numpy_params_become_what_jax_computes_with():
    model = make(scaled, (np.float64(2), np.arange(3)))
    assert [leaf.dtype for leaf in model.abstract_leaves] == [np.float32, np.int32]


def test_programs_need_no_weights_to_be_compiled(harness):
    abstract = jax.ShapeDtypeStruct((), np.float32)
    servable = make(lambda p, x: x * p, abstract)
    assert servable.outputs.leaves[0].dims == ("length",)


@pytest.mark.parametrize(
    ("params", "where"),
    [({"w": 1.0, "act": "gelu"}, r"params\['act'\] is str"), ([np.ones(2), len], r"params\[1\] is builtin")],
)
def test_a_leaf_that_is_no_number_is_refused_by_name(params, where):
    with pytest.raises(SignatureError, match=where):
        make(scaled, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": {}}, r"every varying axis needs a limit; \['length'\] have none"),
        ({"limits": {"length": 32, "width": 3}}, r"limits are for the axes.*got \['width'\]"),
        ({"limits": {"length": 0}}, "whole number from 1 up; axis 'length' has 0"),
        ({"limits": {"length": 1.5}}, "whole number from 1 up; axis 'length' has 1.5"),
        ({"limits": {"length": True}}, "whole number from 1 up; axis 'length' has True"),
        ({"scheme": {"width": "exact"}}, r"schemes are for the axes.*got \['width'\]"),
        ({"grid": Grid.parse("1x32", ("batch", "width"))}, r"limits are for the axes|a grid has the axes"),
        ({"grid": Grid.parse("1x32", ("batch", "length")), "scheme": "single"}, "got both: drop one"),
        ({"grid": Grid.parse("1x32", ("batch", "length")), "max_elements": 8}, "got both: drop one"),
        (
            {"grid": Grid.parse("1x32,4x8", ("batch", "length")), "limits": {"batch": 8}},
            "those of the largest bucket, 4; the limit of 'batch' is 8",
        ),
        (
            {"apply": lambda ids: ids},
            "called with .* its declared inputs as keywords.*missing a required argument: 'ids'",
        ),
        ({"apply": lambda x, y: x}, "does not take that: missing a required argument: 'y'"),
        ({"apply": lambda: 0, "params": 1.0}, "does not take that: too many positional arguments"),
        ({"apply": 3}, "int does not take that: 3 is not a callable"),
    ],
)
def test_what_is_refused_at_registration(options, message):
    with pytest.raises(SignatureError, match=message):
        make(**options)


def test_a_grid_with_a_hole_is_refused():
    with pytest.raises(CoverageError, match="length=9 has none"):
        make(grid=Grid.parse("1x8", ("batch", "length")))


def test_functions_without_a_signature_are_taken():
    class Opaque:
        @property
        def __signature__(self):
            raise ValueError("none")

        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match="none"):
        inspect.signature(Opaque())
    assert make(Opaque()).outputs.leaves[0].dims == ("length",)


@pytest.mark.parametrize("scheme", [[8, 32], (8, 32), range(8, 33, 24), np.array([8, 32]), "explicit:8,32"])
def test_a_scheme_may_be_a_list_or_text(scheme):
    assert make(scheme=scheme).grid.rungs("length") == (8, 32)


def test_defaults_are_powers_of_two():
    grid = make(limits={"length": 20, "batch": 3}).grid
    assert grid.rungs("length") == (8, 16, 20)
    assert grid.rungs("batch") == (1, 2, 3)
    assert make(scheme={"batch": [1, 6]}).grid.rungs("batch") == (1, 6, 32)
    assert make(scheme=powers_of_two(16)).grid.rungs("length") == (16, 32)


def test_a_grid_brings_its_limits():
    model = make(grid=Grid.parse("1x8,4x8,1x24", ("batch", "length")), limits=None)
    assert model.limits == {"batch": 4, "length": 24}


def test_the_limit_of_rows_is_what_a_bucket_holds():
    model = make(limits={"length": 32, "batch": 64}, max_elements=64)
    assert model.limits == {"batch": 8, "length": 32}
    assert model.grid.max_rows == 8


def test_no_varying_axis(harness):
    model = harness(lambda x: x + 1, inputs={"x": "float32[3]"}, limits={"batch": 4})
    assert [str(bucket) for bucket in model.servable.grid.buckets] == ["1", "2", "4"]
    got = model.run((4,), {"x": [1.0, 2, 3]}, {"x": [4.0, 5, 6]})
    np.testing.assert_array_equal(got, [[2, 3, 4], [5, 6, 7]])


def test_scalars_only(harness):
    model = harness(lambda a, b: {"sum": a + b}, inputs={"a": "int32[]", "b": "int32[]"}, limits={"batch": 2})
    first, second = model.run((2,), {"a": 1, "b": 2}, {"a": 3, "b": 4})
    assert first["sum"].shape == ()
    assert (int(first["sum"]), int(second["sum"])) == (3, 7)


def test_a_repr_says_what_it_is():
    assert (
        repr(make(name="m", limits={"length": 8, "batch": 2})) == "Servable('m', axes=['length'], buckets=2)"
    )


@pytest.fixture
def module():
    from flax import nnx

    class Small(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 4, (3, 3), strides=2, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(4, 5, rngs=rngs)
            self.nothing = None

        def __call__(self, image):
            hidden = self.drop(self.norm(self.conv(image.astype(jnp.float32) / 255.0)))
            return self.head(hidden.mean(axis=(1, 2)))

    return Small(nnx.Rngs(0))


IMAGE = {"inputs": {"image": "uint8[height, width, 3]"}, "limits": {"height": 16, "width": 16, "batch": 2}}


def test_a_flax_module(harness, module):
    model = harness(from_nnx(module, **IMAGE))
    image = np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8)
    (got,) = model.run((2, 8, 8), {"image": image})
    np.testing.assert_allclose(got, module(image[None])[0], rtol=1e-5, atol=1e-6)
    program = model.program(2, 8, 8)
    assert len(program.used_leaves) < len(model.leaves), "the dropout's random state is not used"


def test_a_flax_modules_state_as_params(module):
    from flax import nnx

    graphdef, state = nnx.split(module)
    servable = Servable(lambda p, image: nnx.merge(graphdef, p)(image), state, **IMAGE)
    assert len(servable.leaves) == len(jax.tree.leaves(state))
    assert servable.outputs.leaves[0].dims == (5,)


@pytest.mark.parametrize("thing", [identity, {"w": 1}, None])
def test_from_nnx_takes_modules_only(thing):
    with pytest.raises(SignatureError, match=r"from_nnx takes a flax.nnx.Module; got "):
        from_nnx(thing, **IMAGE)


def test_from_nnx_checks_the_call(module):
    with pytest.raises(SignatureError, match=r"\['picture'\]; .*Small.__call__ does not take that"):
        from_nnx(module, inputs={"picture": "uint8[height, width, 3]"}, limits={"height": 16, "width": 16})


@pytest.mark.parametrize(("scheme", "got"), [(8, "got 8"), ({"length": None, "batch": 3.5}, "got 3.5")])
def test_what_is_no_scheme_is_refused(scheme: object, got: str) -> None:
    with pytest.raises(BucketingError, match=rf"A scheme is an object.*{got}"):
        Servable(lambda ids: ids, inputs={"ids": "int32[length]"}, limits={"length": 8}, scheme=scheme)
