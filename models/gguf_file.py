"""GGUF files: metadata, and tensors as float32.

The header is read here: the `gguf` package makes several NumPy arrays for each word of the vocabulary,
1.7 s for 49,152 words against 0.05 s. Block formats are undone by the package.
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import CheckpointError, ModelNotFound, UnsupportedModel

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_VERSIONS = (2, 3)


class GGUFTensor(NamedTuple):
    """Where one tensor lies: `shape` in NumPy's order, `kind` the number of its block format."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """A GGUF file, opened by memory map.

    Attributes:
        path: where it lies.
        metadata: values by key; arrays as lists.
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelNotFound: there is no such file.
            CheckpointError: it is no whole GGUF file of a version read here.
        """
        if not path.is_file():
            raise ModelNotFound(f"a GGUF model must be a file, got {str(path)!r}: check the path")
        self.path = path
        self._data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
        try:
            header = _Header(self._data.data)
            self.metadata, self.tensors, self._start = header.read()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path.name} must be a whole GGUF file, got {error!r}: fetch it again"
            ) from error

    def read_float32(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor, dequantised.

        Raises:
            CheckpointError: the file ends before the tensor does.
            UnsupportedModel: the block format is not known, or the `gguf` package is not installed.
        """
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError as error:
            raise UnsupportedModel(
                f"a GGUF file needs the gguf package, which is not installed; got {self.path.name}: "
                "run `pip install 'servax[models]'`"
            ) from error
        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            # The innermost axis is cut into blocks.
            width = tensor.shape[-1] // block * block_bytes
            size = int(np.prod(tensor.shape[:-1], dtype=np.int64)) * width
            begin = self._start + tensor.offset
            raw = np.asarray(self._data[begin : begin + size])
            if raw.size != size:
                raise CheckpointError(
                    f"{self.path.name} must hold {size} bytes of {name}, got {raw.size}: fetch it again"
                )
            if kind == GGMLQuantizationType.F32:
                return raw.view(np.float32).reshape(tensor.shape)
            blocks = raw.reshape(*tensor.shape[:-1], width)
            return np.asarray(dequantize(blocks, kind), np.float32).reshape(tensor.shape)
        except (ValueError, KeyError, NotImplementedError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise UnsupportedModel(
                f"{name} must be of a block format that gguf undoes, got {tensor.kind} ({error}): "
                "use another quantisation"
            ) from error


class _Header:
    """Reads the little-endian header from front to back."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor], int]:
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError("no GGUF mark at its begin")
        self._at = 4
        version = self._one("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, not one of {_VERSIONS}")
        tensor_count, key_count = self._one("Q"), self._one("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._one("I"))
        tensors = {}
        for _ in range(tensor_count):
            name = self._string()
            rank = self._one("I")
            shape = tuple(reversed(self._many("Q", rank)))
            tensors[name] = GGUFTensor(shape, self._one("I"), self._one("Q"))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"an alignment of {alignment!r}")
        return metadata, tensors, -(-self._at // alignment) * alignment

    def _one(self, code: str) -> Any:
        return self._many(code, 1)[0]

    def _many(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        # A torn length must not become an allocation of that size.
        if count > len(self._data):
            raise ValueError(f"an array of {count} items")
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        size = self._one("Q")
        text = bytes(self._data[self._at : self._at + size])
        if len(text) != size:
            raise ValueError("its end inside a string")
        self._at += size
        return text.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._one(_SCALARS[kind])
        inner, count = self._one("I"), self._one("Q")
        if inner in _SCALARS:
            return list(self._many(_SCALARS[inner], count))
        return [self._value(inner) for _ in range(count)]
