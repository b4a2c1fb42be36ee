"""Options of the HTTP front and of `servax serve`, validated once."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class HttpConfig(BaseModel):
    """Limits of the HTTP front.

    Attributes:
        max_body_bytes: a larger request body is refused with 413.
        retry_after_s: seconds named in `Retry-After` while the server is starting or draining.
        tokenize_inline_chars: texts of together fewer characters are tokenized on the event loop;
            more go to a worker thread. A tokenizer does about 2 million characters a second, so the
            default holds the loop for at most 10 ms, and a thread hop costs about 0.1 ms.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(default=64 << 20, gt=0)
    retry_after_s: float = Field(default=2.0, gt=0)
    tokenize_inline_chars: int = Field(default=20_000, ge=0)


class GrpcConfig(BaseModel):
    """Limits of the gRPC front.

    Attributes:
        max_message_bytes: a larger request is refused with RESOURCE_EXHAUSTED, unpacked if it came
            compressed. One of more than twice that is refused by gRPC itself, before it is in memory; our
            metrics and details do not see that one.
        retry_after_s: seconds of advice to retry while the server is starting or draining.
        health_watch_s: seconds between two looks at readiness for a client that watches health.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_message_bytes: int = Field(default=64 << 20, gt=0, lt=1 << 30)
    retry_after_s: float = Field(default=2.0, gt=0)
    health_watch_s: float = Field(default=0.5, gt=0)


class ServeConfig(BaseModel):
    """Everything `servax serve` and `servax warmup` can be told.

    Attributes:
        model: what to serve: a built-in name, a checkpoint folder, a hub id, or `module:attribute` that
            names a `Servable`.
        name: the model's name on the wire; None takes the model's own.
        host: address to listen on.
        port: TCP port; 0 lets the system choose.
        max_batch: rows of the largest bucket; None means 32.
        max_length: limit of the length axis, in tokens; None takes the model's own.
        scheme: ladder of the varying axes, as `name` or `name:argument,...`; None means
            `powers_of_two:16`.
        max_wait_ms: how long an idle device may wait for more rows.
        store: where programs are kept between starts: a directory or an fsspec URL; None means the user's
            cache directory.
        use_store: whether programs are kept at all.
        store_max_bytes: most bytes of stored programs; None for no bound.
        grpc_port: TCP port of the same protocol over gRPC; None for none, 0 lets the system choose.
        seal: whether JAX tracing is switched off in the whole process after warm-up.
        drain_s: seconds that admitted requests get after a stop signal.
        log_level: of the HTTP server's log.
        http: limits of the HTTP front.
        grpc: limits of the gRPC front.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="minilm", min_length=1)
    name: str | None = Field(default=None, min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_batch: int | None = Field(default=None, gt=0)
    max_length: int | None = Field(default=None, gt=0)
    scheme: str | None = None
    max_wait_ms: float = Field(default=0.0, ge=0)
    store: str | None = Field(default=None, min_length=1)
    use_store: bool = True
    store_max_bytes: int | None = Field(default=None, gt=0)
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    seal: bool = True
    drain_s: float = Field(default=30.0, ge=0)
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "warning"
    http: HttpConfig = HttpConfig()
    grpc: GrpcConfig = GrpcConfig()
