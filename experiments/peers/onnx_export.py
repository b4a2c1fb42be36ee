"""A BERT encoder of ours as one ONNX file, for peers that read ONNX.

Both sizes, batch and length, are free. With `attention="onnxruntime"` the attention is that runtime's own
operator, as its offline optimizer would put there: 1.09 times as many tokens a second at 8x256, the same at
32x32. The file names no inner shapes: where it did, the runtime joined each sum and its norm into one kernel,
which gave 0.85 of the tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...models.panels import Panels, matrices
from ...models.registry import TextModel
from ..errors import ExperimentError

# Gelu is an operator since 20; the version of the format is that of the same release.
_OPSET, _IR_VERSION = 20, 9
_OWN_DOMAIN = "com.microsoft"
_LOWEST = float(np.finfo(np.float32).min)
_Mix = Callable[[str, Any, Any, int], str]
"""From `(batch, length, width)`, kernel and bias of query, key and value, and heads to the same shape."""


class _Graph:
    """Nodes and constants, named as they come."""

    def __init__(self, onnx: Any) -> None:
        self._onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        array = np.ascontiguousarray(value)
        self.constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name

    def add(self, kind: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(self._onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def real(self, value: float) -> str:
        return self.constant(np.array(value, np.float32))

    def linear(self, x: str, leaf: Mapping[str, Any], layer: int) -> str:
        product = self.add("MatMul", [x, self.constant(_kernel(leaf, layer))])
        return str(self.add("Add", [product, self.constant(leaf["bias"][layer])]))

    def norm(self, x: str, scale: Any, bias: Any) -> str:
        parts = [x, self.constant(scale), self.constant(bias)]
        return str(self.add("LayerNormalization", parts, axis=-1, epsilon=1e-12))


def _kernel(leaf: Mapping[str, Any], layer: int) -> Any:
    kernel = leaf["kernel"]
    return (matrices(kernel) if isinstance(kernel, Panels) else kernel)[layer]


def export_encoder(model: TextModel, path: Path, *, attention: str = "standard") -> Path:
    """Write an encoder with mean pooling and unit norm, as MiniLM is.

    Args:
        model: The encoder; its parameters are read as float32.
        path: The file to make. Inputs `input_ids` and `attention_mask`, int64 `(batch, length)`; output
            `embedding`, float32 `(batch, width)`.
        attention: `standard`, for any reader, or `onnxruntime`.

    Returns:
        The path.

    Raises:
        ExperimentError: if the package `onnx` is missing, or the model pools or activates in another way.
    """
    try:
        import onnx
    except ImportError as error:
        raise ExperimentError(
            "Peers that read ONNX need the package onnx, which is not installed: `pip install onnx`."
        ) from error
    facts = model.config
    shape = (facts["pooling"], facts["normalize"], facts["activation"])
    if shape != ("mean", True, "gelu"):
        raise ExperimentError(f"The export is for mean pooling, unit norm and gelu; got {shape}.")
    graph = _Graph(onnx)
    vectors = _encoder(graph, model, attention)
    graph.nodes.append(onnx.helper.make_node("Identity", [_pooled(graph, vectors)], ["embedding"]))
    _write(onnx, graph, int(facts["dimensions"]), path)
    return path


def _encoder(graph: _Graph, model: TextModel, attention: str) -> str:
    params, heads = model.params, int(model.config["heads"])
    # Positions count from 0 and all tokens are of type 0, so both tables become one.
    table = np.asarray(params["position"]) + np.asarray(params["token_type"])[:1]
    length = graph.add("Shape", ["input_ids"], start=1, end=2)
    place = graph.add("Slice", [graph.constant(table), graph.ints(0), length, graph.ints(0)])
    x = graph.add("Add", [graph.add("Gather", [graph.constant(params["word"]), "input_ids"]), place])
    x = graph.norm(x, params["norm"]["scale"], params["norm"]["bias"])
    mix = _own_attention(graph) if attention == "onnxruntime" else _attention(graph)
    layers = params["layers"]
    for i in range(int(model.config["layers"])):
        mixed = mix(x, _kernel(layers["qkv"], i), layers["qkv"]["bias"][i], heads)
        x = graph.add("Add", [graph.linear(mixed, layers["attended"], i), x])
        x = graph.norm(x, *(layers["attention_norm"][leaf][i] for leaf in ("scale", "bias")))
        inner = graph.add("Gelu", [graph.linear(x, layers["up"], i)])
        x = graph.add("Add", [graph.linear(inner, layers["down"], i), x])
        x = graph.norm(x, *(layers["output_norm"][leaf][i] for leaf in ("scale", "bias")))
    return str(x)


def _attention(graph: _Graph) -> _Mix:
    keep = graph.add("Cast", ["attention_mask"], to=1)
    hidden = graph.add("Mul", [graph.add("Sub", [graph.real(1.0), keep]), graph.real(_LOWEST)])
    mask = graph.add("Unsqueeze", [hidden, graph.ints(1, 2)])

    def mix(x: str, kernel: Any, bias: Any, heads: int) -> str:
        size = kernel.shape[0] // heads
        joined = graph.add("Add", [graph.add("MatMul", [x, graph.constant(kernel)]), graph.constant(bias)])
        parts = graph.add("Split", [joined], 3, axis=-1, num_outputs=3)
        split = [graph.add("Reshape", [part, graph.ints(0, 0, heads, size)]) for part in parts]
        q, v = (graph.add("Transpose", [split[i]], perm=[0, 2, 1, 3]) for i in (0, 2))
        k = graph.add("Transpose", [split[1]], perm=[0, 2, 3, 1])
        scores = graph.add("Mul", [graph.add("MatMul", [q, k]), graph.real(size**-0.5)])
        weights = graph.add("Softmax", [graph.add("Add", [scores, mask])], axis=-1)
        mixed = graph.add("Transpose", [graph.add("MatMul", [weights, v])], perm=[0, 2, 1, 3])
        return str(graph.add("Reshape", [mixed, graph.ints(0, 0, heads * size)]))

    return mix


def _own_attention(graph: _Graph) -> _Mix:
    mask = graph.add("Cast", ["attention_mask"], to=6)

    def mix(x: str, kernel: Any, bias: Any, heads: int) -> str:
        parts = [x, graph.constant(kernel), graph.constant(bias), mask]
        return str(graph.add("Attention", parts, domain=_OWN_DOMAIN, num_heads=heads))

    return mix


def _pooled(graph: _Graph, x: str) -> str:
    """The mean over real tokens, divided by its length; zeros where there is no real token."""
    keep = graph.add("Unsqueeze", [graph.add("Cast", ["attention_mask"], to=1), graph.ints(2)])
    total = graph.add("ReduceSum", [graph.add("Mul", [x, keep]), graph.ints(1)], keepdims=0)
    count = graph.add("ReduceSum", [keep, graph.ints(1)], keepdims=0)
    mean = graph.add("Div", [total, graph.add("Max", [count, graph.real(1.0)])])
    norm = graph.add("ReduceL2", [mean, graph.ints(1)], keepdims=1)
    return str(graph.add("Div", [mean, graph.add("Max", [norm, graph.real(1e-12)])]))


def _write(onnx: Any, graph: _Graph, width: int, path: Path) -> None:
    make, real, whole = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    body = make.make_graph(
        graph.nodes,
        "encoder",
        [
            make.make_tensor_value_info(name, whole, ["batch", "length"])
            for name in ("input_ids", "attention_mask")
        ],
        [make.make_tensor_value_info("embedding", real, ["batch", width])],
        graph.constants,
    )
    domains = {node.domain: 1 if node.domain else _OPSET for node in graph.nodes}
    opsets = [make.make_opsetid(name, version) for name, version in domains.items()]
    model = make.make_model(body, opset_imports=opsets, producer_name="servax")
    model.ir_version = _IR_VERSION
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    onnx.save(model, str(draft))
    draft.replace(path)
