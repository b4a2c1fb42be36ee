"""The OpenAI-compatible routes: embeddings, the list of models, and the shape of their errors."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from typing_extensions import TypedDict

from ..errors import BadRequest, BadTensor, NotReady, ServerError, TooLong, TooManyRows, UnknownModel
from ..metrics import Metrics
from ..seam import Engine, ModelHandle, find_model
from ..text import Cut, Embedder, EmbedResult
from .encode import base64_float32, dumps
from .rows import check_texts
from .wire import Call, Header, Reply


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/embeddings`.

    `input` is a text, a list of texts, a list of token ids (special tokens included), or a list of such
    lists. `truncate` and `truncate_side` are extensions of servax.
    """

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    user: str | None = None
    truncate: bool = False
    truncate_side: Literal["left", "right"] = "right"


class Embedding(msgspec.Struct):
    """One embedding: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Usage(msgspec.Struct):
    """Real tokens that the model saw, special ones included, padding not."""

    prompt_tokens: int
    total_tokens: int


class Truncated(msgspec.Struct, rename={"before": "from", "after": "to"}):
    """One input that was cut, from so many tokens to so many."""

    index: int
    before: int
    after: int


class EmbeddingResponse(msgspec.Struct):
    """Answer of `POST /v1/embeddings`; `truncated` is present only if something was cut."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: str = "list"
    truncated: list[Truncated] | msgspec.UnsetType = msgspec.UNSET


class ErrorDetail(msgspec.Struct):
    """What went wrong: the rule, the value, the remedy; `code` is stable and machine-readable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    """Body of every 4xx and 5xx answer under `/v1`."""

    error: ErrorDetail


class ModelCard(TypedDict):
    """One model, as OpenAI lists it."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelList(TypedDict):
    """The served models."""

    object: str
    data: list[ModelCard]


_decoder = msgspec.json.Decoder(EmbeddingRequest)
_field_in_message = re.compile(r"(?:field `|`\$\.)(\w+)")


class Embeddings:
    """Handler of `POST /v1/embeddings`.

    Args:
        engine: holds the models.
        texts: text fronts by model name.
        metrics: counts the inputs that were cut.
    """

    def __init__(self, engine: Engine, texts: Mapping[str, Embedder], metrics: Metrics) -> None:
        self._engine = engine
        self._texts = texts
        self._metrics = metrics

    async def __call__(self, call: Call) -> Reply:
        """Answers one call; raises `ServerError`."""
        request = decode_request(call)
        call.param = "model"
        model = find_model(self._engine, request.model)
        call.model = model.name
        embedder = self._texts.get(model.name)
        if embedder is None:
            if not model.inputs:
                raise UnknownModel(
                    f"/v1/embeddings needs a model of embeddings, got {model.name!r}, which generates text; "
                    "send the prompt to /v1/completions, or messages to /v1/chat/completions."
                )
            raise UnknownModel(
                f"/v1/embeddings needs a model with a tokenizer, got {model.name!r}, which makes no "
                f"embeddings of texts; send tensors to /v2/models/{model.name}/infer."
            )
        call.param = "input"
        inputs = as_inputs(request.input, model)
        call.param = "dimensions" if request.dimensions is not None else "input"
        try:
            result = await embedder.embed(
                inputs,
                truncate=request.truncate,
                truncate_side=request.truncate_side,
                dimensions=request.dimensions,
            )
        except (TooLong, BadTensor):
            call.param = "input"
            raise
        self._metrics.cut(model.name, len(result.truncated))
        as_base64 = request.encoding_format == "base64"
        return Reply(
            encode_response(model.name, result, as_base64), headers=truncated_header(result.truncated)
        )


def decode_request(call: Call) -> EmbeddingRequest:
    """Parses the body; raises `BadRequest` that names the field."""
    try:
        return _decoder.decode(call.body)
    except msgspec.ValidationError as error:
        match = _field_in_message.search(str(error))
        call.param = match.group(1) if match else None
        raise BadRequest(
            f"The body must be an embeddings request, got: {error}; see /openapi.json for its fields."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(
            f"The body must be JSON in UTF-8, got {len(call.body)} bytes: {error}; correct it."
        ) from None


def as_inputs(value: str | list[Any], model: ModelHandle) -> list[str] | list[np.ndarray]:
    """Brings the four forms of `input` to one list, of texts or of int64 id vectors.

    Raises:
        BadTensor: there is no input, a text is empty, the list mixes forms, or an id does not fit 64 bits.
        TooManyRows: more inputs than the model takes in one request.
    """
    if isinstance(value, str):
        value = [value]
    if not value:  # zero rows, as over the other protocols, where a client's batch happens to be empty
        return value
    kinds = set(map(type, value))
    if kinds == {int}:
        return [_ids(value, 0)]
    if len(value) > model.max_request_rows:
        raise TooManyRows(
            f"A request to {model.name!r} has at most {model.max_request_rows} inputs, got {len(value)}; "
            "send several requests."
        )
    if kinds == {str}:
        check_texts(value)
        return value
    if kinds == {list}:
        return [_ids(ids, index) for index, ids in enumerate(value)]
    names = sorted({"str": "text", "int": "token id", "list": "token list"}[kind.__name__] for kind in kinds)
    raise BadTensor(f"An input list has one kind of item, got {' and '.join(names)}; send separate requests.")


def _ids(ids: list[int], index: int) -> np.ndarray:
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        raise BadTensor(
            f"Token ids fit 64 bits, got {max(ids, key=abs)} at index {index}; use the model's own tokenizer."
        ) from None


def encode_response(model: str, result: EmbedResult, as_base64: bool) -> bytes:
    """JSON bytes of the answer; floats are written from the array, without a Python loop over them."""
    vectors = map(base64_float32, result.vectors) if as_base64 else iter(result.vectors)
    tokens = sum(result.token_counts)
    body: dict[str, Any] = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    if result.truncated:
        body["truncated"] = [{"index": c.at, "from": c.before, "to": c.after} for c in result.truncated]
    return dumps(body)


def truncated_header(cuts: list[Cut]) -> list[Header]:
    """`x-servax-truncated: n` if n inputs were cut."""
    return [(b"x-servax-truncated", b"%d" % len(cuts))] if cuts else []


def error_body(call: Call, error: ServerError, status: Mapping[str, Any] | None = None) -> bytes:
    """An error in OpenAI's shape; `status` is where warm-up stands, for `not_ready`."""
    kind = "invalid_request_error" if error.http_status < 500 and error.http_status != 429 else "server_error"
    if error.http_status == 401:
        kind = "authentication_error"
    if error.http_status == 429:
        kind = "rate_limit_error"
    param = call.param if isinstance(error, BadRequest) else None
    body: dict[str, Any] = {
        "error": {"message": str(error), "type": kind, "param": param, "code": error.reason}
    }
    if isinstance(error, NotReady) and status is not None:
        body["status"] = status
    return dumps(body)


def model_card(name: str, created: int) -> ModelCard:
    """One model in OpenAI's list; `created` is the server's start in Unix seconds."""
    return {"id": name, "object": "model", "created": created, "owned_by": "servax"}


def list_models(engine: Engine, created: int) -> ModelList:
    """Answer of `GET /v1/models`."""
    return {"object": "list", "data": [model_card(name, created) for name in sorted(engine.models)]}
