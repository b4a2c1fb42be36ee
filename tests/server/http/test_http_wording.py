"""Errors of tensors say what to send instead."""

from collections.abc import Callable
from typing import Any

import numpy as np

X8 = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}


def ids(name: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": "INT32", "data": [5, 6, 7]}


def test_a_wrong_name_or_shape_is_answered_with_what_to_send(site: Any, refused: Callable[..., str]) -> None:
    wrong = ids("input_ids", [1, 3])
    refused(site.infer("toy", wrong), 400, "bad_tensor", "'ids' is missing, got 'input_ids'; rename it")
    flat = ids("ids", [3])
    words = ("'ids' must have the shape [rows, length], got [3]", "send [1, 3] for one item")
    refused(site.infer("toy", flat), 400, "bad_tensor", *words)
    refused(site.infer("double", X8 | {"shape": [2, 4]}), 400, "bad_tensor", "[rows, 8]", "reshape it")


def test_nan_in_json_names_its_likely_cause(site: Any, refused: Callable[..., str]) -> None:
    site.double.run = lambda row: {
        "y": np.where(row["x"] > 8, np.float32(np.nan), row["x"] * np.float32(2)),
        "n": np.array(8, np.int64),
    }
    words = ("output 'y'", "binary_data", "ids beyond the model's table", "--check-outputs")
    refused(site.infer("double", X8 | {"data": [9.0] * 8}), 400, "bad_request", *words)
