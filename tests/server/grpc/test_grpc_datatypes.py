"""Values over gRPC: every datatype raw and typed, and what is refused of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servax.server.fake import FakeModel, Spec
from servax.server.http.encode import DATATYPES
from servax.server.rpc.testing import infer_request, output_of


def tensor(name: str, shape: list[int], datatype: str, data: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def infer(model: str, *inputs: dict[str, Any], **fields: Any) -> Any:
    return infer_request(model, inputs, **fields)


X8 = tensor("x", [1, 8], "FP32", [1.5] * 8)


@pytest.mark.parametrize("as_typed", [True, False])
@pytest.mark.parametrize("datatype", list(DATATYPES))
def test_every_datatype_comes_back_as_it_went(datatype: str, as_typed: bool, site: Any) -> None:
    dtype = DATATYPES[datatype]
    model = FakeModel("same", dict, (Spec("x", dtype, ("length",)),), (Spec("x", dtype, ("length",)),))
    site.engine.models["same"] = model
    values = np.array([[0, 1, 1], [1, 0, 1]] if dtype.kind == "b" else [[0, 1, 100], [3, 0, 7]], dtype)
    if dtype.kind == "i":
        values[0, 0] = np.iinfo(dtype).min
    data = values.ravel().tolist() if as_typed else values.tobytes()
    answer = site.send(infer("same", tensor("x", [2, 3], datatype, data)))
    assert answer.outputs[0].datatype == datatype
    np.testing.assert_array_equal(output_of(answer, "x"), values)
    assert model.calls[0][0]["x"].dtype == dtype


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40)
    | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)
    | st.lists(st.booleans(), min_size=1, max_size=40)
)
def test_typed_values_are_the_raw_values(site: Any, values: list[Any]) -> None:
    datatype = {float: "FP32", int: "INT64", bool: "BOOL"}[type(values[0])]
    array = np.array([values], DATATYPES[datatype])
    model = FakeModel(
        "same",
        dict,
        (Spec("x", array.dtype, ("n",)),),
        (Spec("x", array.dtype, ("n",)),),
        allow_nonfinite=True,
    )
    site.engine.models["same"] = model
    answer = site.send(infer("same", tensor("x", [1, len(values)], datatype, values)))
    assert answer.raw_output_contents[0] == array.tobytes()


def test_values_in_the_wrong_field_or_of_no_known_type(site: Any) -> None:
    wrong = infer("double", X8 | {"data": []})
    wrong.inputs[0].contents.int_contents.extend([1] * 8)
    assert "fp32_contents, got int_contents" in site.refused(wrong).message
    two = infer("double", X8)
    two.inputs[0].contents.int_contents.append(1)
    assert "int_contents, fp32_contents" in site.refused(two).message
    unknown = infer("double", tensor("x", [1, 8], "FP8", bytes(8)))
    assert "got 'FP8'" in site.refused(unknown).message
    latin = infer("toy", tensor("text", [1], "BYTES", b"\x01\x00\x00\x00\xe9"))
    assert "must be UTF-8" in site.refused(latin).message
    torn = infer("toy", tensor("text", [1], "BYTES", b"\x09\x00\x00\x00a"))
    assert "got length 9 with 1 bytes left" in site.refused(torn).message
