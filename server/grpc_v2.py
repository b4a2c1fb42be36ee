"""Open Inference Protocol v2 over gRPC: the service, and the server that carries it."""

from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import BaseModel, ConfigDict, Field

from .. import _version
from .asgi import find_listed
from .encode import dumps
from .errors import ConfigError, PayloadTooLarge, ServerError, UnknownModel
from .grpc_call import GrpcCall, Handler, Method
from .grpc_codec import GrpcInputs, decode, encode, encode_metadata, parse
from .grpc_health import Health
from .grpc_messages import MESSAGES, POOL, SERVICE
from .kserve import (
    TEXT,
    Rows,
    check_row_count,
    check_text_shape,
    join,
    model_metadata,
    split,
    truncation,
    wanted_outputs,
)
from .kserve_codec import whole
from .metrics import Metrics
from .seam import Engine, ModelHandle, find_model
from .text import Cut, Embedder


class GrpcConfig(BaseModel):
    """Limits of the gRPC front.

    Attributes:
        max_message_bytes: a larger request is refused with RESOURCE_EXHAUSTED.
        retry_after_s: seconds of advice to retry while the server is starting or draining.
        health_watch_s: seconds between two looks at readiness for a client that watches health.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_message_bytes: int = Field(default=64 << 20, gt=0, lt=1 << 31)
    retry_after_s: float = Field(default=2.0, gt=0)
    health_watch_s: float = Field(default=0.5, gt=0)


def create_grpc_server(
    engine: Engine,
    *,
    texts: Mapping[str, Embedder] | None = None,
    metrics: Metrics | None = None,
    config: GrpcConfig | None = None,
) -> grpc.aio.Server:
    """Builds the gRPC server over an engine; to be called on the event loop that will run it.

    Args:
        engine: holds the models; may still be warming up.
        texts: text fronts by model name; read at each request, so that it may be filled later.
        metrics: counts requests, under the route `grpc`.
        config: limits of the front.

    Returns:
        A server without a port: `bind` it, `await server.start()`, and `await server.stop(grace_s)` at
        the end, after the engine is closed, so that health is told until then.
    """
    config = config or GrpcConfig()
    service = Service(engine, {} if texts is None else texts, metrics or Metrics(), config)
    options = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Else a second server binds the same port in silence, and gets some of the connections.
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((service.handlers(),))
    health_pb2_grpc.add_HealthServicer_to_server(Health(engine, config.health_watch_s), server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_reflected())
    return server


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Opens a port in plain text; returns it, which matters for port 0.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise ConfigError(
            f"The gRPC server needs a free address, got {address}: {error}; choose another."
        ) from error


def _reflected() -> Any:
    """The pool that reflection answers from: ours, and the two standard services beside it."""
    for standard in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        POOL.AddSerializedFile(standard.serialized_pb)
    return POOL


class Service:
    """The methods of `inference.GRPCInferenceService`, bytes to bytes."""

    def __init__(
        self, engine: Engine, texts: Mapping[str, Embedder], metrics: Metrics, config: GrpcConfig
    ) -> None:
        self._engine = engine
        self._texts = texts
        self._metrics = metrics
        self._config = config
