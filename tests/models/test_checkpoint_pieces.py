"""Tensors are read some rows at a time, whatever their shape and precision."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from servax.models import checkpoint

SHAPES = [(), (0, 3), (5,), (3, 4, 5), (7, 300_000), (600_001,)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", ml_dtypes.bfloat16], ids=str)
def test_what_is_read_in_pieces_is_what_was_written(tmp_path, dtype):
    rng = np.random.default_rng(0)
    written = {str(place): rng.random(shape).astype(dtype) for place, shape in enumerate(SHAPES)}
    written = {name: np.asarray(array, dtype) for name, array in written.items()}
    save_file(written, tmp_path / "model.safetensors")
    tensors = checkpoint.list_tensors(tmp_path)
    read = checkpoint.read_float32(tensors, tensors)
    assert read.keys() == written.keys()
    for name, array in written.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], array.astype(np.float32))
