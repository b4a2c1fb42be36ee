"""Every error the server answers with, as a tree, each with its HTTP and gRPC status.

A message states the rule, the value it got and the remedy, in that order.
"""

from typing import ClassVar


class ServerError(Exception):
    """Root of the server's errors.

    Attributes:
        http_status: HTTP status code of the answer.
        grpc_status: name of the gRPC status code of the answer.
        reason: short, stable, machine-readable word; also the label in `/metrics`.
    """

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "internal"


class BadRequest(ServerError, ValueError):
    """The request breaks a rule that the caller can keep."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    reason = "bad_request"


class TooLong(BadRequest):
    """One item is larger than the model's limit on some axis."""

    reason = "too_long"


class BadTensor(BadRequest):
    """A tensor's name, dtype, shape or byte count is not what the model declares."""

    reason = "bad_tensor"


class NonFiniteInput(BadRequest):
    """NaN or infinity in an input of a model that refuses them."""

    reason = "non_finite_input"


class TooManyRows(BadRequest):
    """One request holds more rows than the server takes at once."""

    reason = "too_many_rows"


class UnknownModel(BadRequest):
    """No model of that name (or version) is served."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    reason = "unknown_model"


class PayloadTooLarge(BadRequest):
    """The request's body is larger than the configured limit."""

    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"
    reason = "payload_too_large"


class Overloaded(ServerError):
    """A queue is full; retry after `retry_after_s` seconds."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    reason = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(ServerError):
    """The server is starting, draining, or its device loop has failed."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    reason = "unavailable"


class NotReady(Unavailable):
    """Warm-up has not reached coverage yet."""

    reason = "not_ready"


class Closed(Unavailable):
    """The server is draining or closed."""

    reason = "closed"


class DeadlineExceeded(ServerError):
    """The request's deadline passed before its answer was ready."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    reason = "deadline"


class Cancelled(ServerError):
    """The caller went away before the answer was ready; never sent over the wire."""

    http_status = 499
    grpc_status = "CANCELLED"
    reason = "cancelled"


class ModelError(ServerError):
    """The model failed on this request, or returned what its signature does not allow."""

    reason = "model"


class ConfigError(ServerError, ValueError):
    """The server was set up in a way that cannot work; raised before it opens a socket."""

    reason = "config"
