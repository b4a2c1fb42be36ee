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
        request_id: of the request that it answered; known to clients only.
    """

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "internal"
    request_id: str | None = None


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


class UnknownPath(BadRequest):
    """Nothing is served at this path."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    reason = "unknown_path"


class MethodNotAllowed(BadRequest):
    """The path exists, but does not take this method."""

    http_status = 405
    grpc_status = "UNIMPLEMENTED"
    reason = "method_not_allowed"


class Unauthorized(ServerError):
    """The server asks for an API key, and the request has none or a wrong one."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    reason = "unauthorized"


class Forbidden(ServerError):
    """The server does not do this for clients, or was not told to."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    reason = "forbidden"


class PayloadTooLarge(BadRequest):
    """The request's body is larger than the configured limit."""

    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"
    reason = "payload_too_large"


class Overloaded(ServerError):
    """A queue is full, or would answer too late.

    Attributes:
        retry_after_s: seconds after which what waits now is predicted to be through.
        cause: what ran out, a label of the metrics: `rows`, `elements` or `bytes` of the queue, `client` for
            the share of one client, `deadline` if the answer would come too late, `displaced` by a more
            urgent one, `tokenizer` for texts that wait for it, `memory` for anything else that is full.
    """

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    reason = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0, cause: str = "memory") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.cause = cause


class Unavailable(ServerError):
    """The server is starting, draining, or its device loop has failed.

    Args:
        message: rule, value, remedy.
        lasting: whether it does not pass by itself, so that the answer advises no retry.

    Attributes:
        lasting: the same.
        retry_after_s: seconds after which the server asked to be asked again; known to clients only.
    """

    http_status = 503
    grpc_status = "UNAVAILABLE"
    reason = "unavailable"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class Left(Unavailable):
    """A version gave way and has left; inside the server only, the request goes to its successor."""


class DeviceFailed(Unavailable):
    """The device failed, and not on account of this request."""

    reason = "device"


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


class LoadFailed(ServerError):
    """A model could not be loaded anew; the version that was served stays."""

    reason = "load_failed"


class NanOutput(ModelError):
    """The model answered this request with NaN, and outputs are checked."""

    reason = "nan_output"


class StillAnswers(TimeoutError):
    """A new version serves, but the one before it did not let go in time; it does with its last answer.

    Told to who swaps versions, never to a client.
    """


class ConfigError(ServerError, ValueError):
    """The server was set up in a way that cannot work; raised before it opens a socket."""

    reason = "config"
