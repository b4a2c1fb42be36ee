"""How each kind of server is asked for a vector, and where the vector stands in its answer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """One request shape.

    Attributes:
        path: of the POST.
        body: from a text to what is sent as JSON.
        vector: from the JSON that came back to the numbers.
    """

    path: str
    body: Callable[[str], Any]
    vector: Callable[[Any], list[float]]

    def request(self, text: str) -> bytes:
        """The whole HTTP/1.1 request."""
        return post(self.path, self.body(text))


def post(path: str, body: Any) -> bytes:
    """A POST of JSON that keeps the connection open."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def _plain(path: str) -> Shape:
    return Shape(path, lambda text: {"text": text}, lambda answer: list(answer["y"]))


def _openai(path: str, model: str, **more: Any) -> Shape:
    return Shape(
        path,
        lambda text: {"model": model, "input": [text], **more},
        lambda answer: list(answer["data"][0]["embedding"]),
    )


def _tensor(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]}


SHAPES: Mapping[str, Shape] = {
    "ours": _openai("/v1/embeddings", "minilm", truncate=True),
    "embed": _plain("/embed"),
    "inference": _plain("/inference"),
    "predict": _plain("/predict"),
    "bentoml": Shape("/embed", lambda text: {"text": [text]}, lambda answer: list(answer[0])),
    "v2": Shape("/v2/models/minilm/infer", _tensor, lambda answer: list(answer["outputs"][0]["data"])),
    "infinity": _openai("/embeddings", "model"),
    "vllm": _openai("/v1/embeddings", "model", truncate_prompt_tokens=MAX_TOKENS),
}


def completion(model: str, prompt: str | list[int], tokens: int, *, stream: bool = True) -> bytes:
    """A greedy completion of exactly so many tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return post("/v1/completions", {**body, "ignore_eos": True, **options})
