"""Open Inference Protocol v2 over gRPC: the service, and the server that carries it."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ... import _version
from .. import repository
from ..config import GrpcConfig
from ..errors import ConfigError, PayloadTooLarge, ServerError, UnknownModel
from ..http.asgi import find_listed
from ..http.entry import Keys
from ..http.kserve import EXTENSIONS, join, maybe_pinned, model_metadata, said_of, wanted_outputs
from ..http.kserve_codec import whole
from ..http.rows import rows_of
from ..metrics import Metrics
from ..repository import Load
from ..seam import Engine, find_model
from ..text import Embedder
from ..tracing import Tracing
from .call import Gated, GrpcCall, Method
from .codec import decode, encode, encode_metadata, parse
from .health import Health
from .lag import Lag, LagGate, asking, own_door
from .messages import MESSAGES, POOL, SERVICE
from .traced import Traced


def create_grpc_server(
    engine: Engine,
    *,
    texts: Mapping[str, Embedder] | None = None,
    metrics: Metrics | None = None,
    config: GrpcConfig | None = None,
    api_keys: Sequence[str] = (),
    tracing: Tracing | None = None,
    load: Load | None = None,
) -> grpc.aio.Server:
    """Builds the gRPC server over an engine; to be called on the event loop that will run it.

    Args:
        engine: holds the models; may still be warming up.
        texts: text fronts by model name; read at each request, so that it may be filled later.
        metrics: counts requests, under the route `grpc`.
        config: limits of the front.
        api_keys: keys, one of which a call must bring as `authorization: Bearer KEY`, but for probes.
        tracing: makes a span of each call; the same object that the engine has.
        load: loads a model anew when a client asks; None refuses to.

    Returns:
        A server without a port; `listening` opens one and runs it.
    """
    config = config or GrpcConfig()
    texts, metrics = {} if texts is None else texts, metrics or Metrics()
    service = Service(engine, texts, metrics, config, Keys(api_keys), load)
    options = [
        ("grpc.max_receive_message_length", 2 * config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Else a second server binds the same port in silence, and gets some of the connections.
        ("grpc.so_reuseport", 0),
    ]
    interceptors = [] if tracing is None else [Traced(tracing, SERVICE)]
    server = grpc.aio.server(options=options, interceptors=interceptors)
    methods = service.methods()
    # Without registering them: each registered method would wait by itself, and so would our own calls.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_generic_rpc_handlers((service.lag.handlers(),))
    server.servax_lag = service.lag  # found by `listening`
    health_pb2_grpc.add_HealthServicer_to_server(Health(engine, config.health_watch_s), server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_reflected())
    return server


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where a certificate chain and its private key lie, PEM."""

    cert: str
    key: str

    def read(self) -> Any:
        """Credentials for gRPC.

        Raises:
            ConfigError: a file cannot be read.
        """
        try:
            pair = Path(self.key).read_bytes(), Path(self.cert).read_bytes()
        except OSError as error:
            raise ConfigError(f"TLS needs files that can be read, got: {error}; check the paths.") from None
        return grpc.ssl_server_credentials([pair])


def bind(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None = None) -> int:
    """Opens a port, in plain text without TLS files; returns it, which matters for port 0.

    Raises:
        ConfigError: the address is taken or not ours, or a TLS file cannot be read.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is not None:
            return int(server.add_secure_port(address, tls.read()))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise ConfigError(
            f"The gRPC server needs a free address, got {address}: {error}; choose another."
        ) from error


@contextlib.asynccontextmanager
async def listening(
    server: grpc.aio.Server, host: str, port: int, grace_s: float = 5.0, *, tls: TlsFiles | None = None
) -> AsyncIterator[int]:
    """Runs a server while the block lasts; close the engine inside, so that health is told until then.

    Args:
        server: from `create_grpc_server`.
        host: address to listen on.
        port: TCP port; 0 lets the system choose.
        grace_s: seconds that calls get to end once the block has ended; those left are cancelled.
        tls: certificate and key; None for plain text.

    Yields:
        The port.

    Raises:
        ConfigError: the address is taken or not ours.
    """
    lag: Lag | None = getattr(server, "servax_lag", None)  # another's server has none
    with own_door(server) if lag else contextlib.nullcontext() as own:
        try:
            opened = bind(server, host, port, tls)
            await server.start()
            async with asking(lag, own) if lag else contextlib.nullcontext():
                yield opened
        finally:
            await server.stop(grace_s)


def _reflected() -> Any:
    """The pool that reflection answers from: ours, and the two standard services beside it."""
    for standard in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        POOL.AddSerializedFile(standard.serialized_pb)
    return POOL


class Service:
    """The methods of `inference.GRPCInferenceService`, bytes to bytes."""

    def __init__(
        self,
        engine: Engine,
        texts: Mapping[str, Embedder],
        metrics: Metrics,
        config: GrpcConfig,
        keys: Keys,
        load: Load | None = None,
    ) -> None:
        self._load = load
        self._engine = engine
        self._texts = texts
        self._metrics = metrics
        self._config = config
        self._keys = keys
        self.lag = Lag()

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """What gRPC calls, by method name. Only the inference has a gate."""
        retry_s = self._config.retry_after_s
        gate = LagGate(self.lag, self._config.most_lag_s, self._metrics.unread)
        infer = Gated(gate, self._infer, self._engine, retry_s, self._metrics, keys=self._keys)
        # Without a deserializer the handler gets bytes: so malformed ones are refused and counted by us.
        methods = {"ModelInfer": grpc.stream_unary_rpc_method_handler(infer.__call__)}
        for name, handler in {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load_model,
            "RepositoryModelUnload": self._unload_model,
        }.items():
            keys = None if name in ("ServerLive", "ServerReady") else self._keys
            method = Method(handler, self._engine, retry_s, keys=keys)
            methods[name] = grpc.unary_unary_rpc_method_handler(method.__call__)
        return methods

    async def _infer(self, raw: bytes, call: GrpcCall) -> bytes:
        if len(raw) > self._config.max_message_bytes:
            raise PayloadTooLarge(
                f"A request has at most {self._config.max_message_bytes} bytes, got {len(raw)}; split it."
            )
        request = parse("ModelInferRequest", raw)
        call.request_id = request.id
        inputs = decode(request)
        model = find_model(self._engine, request.model_name, request.model_version or None)
        call.model = model.name
        wanted = wanted_outputs(model, inputs.outputs, True)
        front = self._texts.get(model.name)
        rows, cuts = await rows_of(model, front, inputs.parameters, inputs.tensors, inputs.shapes)
        self._metrics.cut(model.name, len(cuts))
        timeout_us = whole(inputs.parameters, "timeout")
        priority = whole(inputs.parameters, "priority")
        timeout_s = call.timeout_s(timeout_us)
        with maybe_pinned(inputs.parameters) as pin:
            answers = await model.submit(rows, priority=priority, timeout_s=timeout_s) if rows else []
        return encode(model, request.id, join(model, answers, len(rows)), wanted, said_of(cuts, pin))

    async def _server_live(self, raw: bytes, call: GrpcCall) -> bytes:
        parse("ServerLiveRequest", raw)
        return _encoded("ServerLiveResponse", live=self._engine.live)

    async def _server_ready(self, raw: bytes, call: GrpcCall) -> bytes:
        parse("ServerReadyRequest", raw)
        return _encoded("ServerReadyResponse", ready=self._engine.ready and not self._engine.draining)

    async def _server_metadata(self, raw: bytes, call: GrpcCall) -> bytes:
        parse("ServerMetadataRequest", raw)
        return _encoded(
            "ServerMetadataResponse",
            name="servax",
            version=_version.__version__,
            extensions=EXTENSIONS,
        )

    async def _model_ready(self, raw: bytes, call: GrpcCall) -> bytes:
        request = parse("ModelReadyRequest", raw)
        try:
            find_model(self._engine, request.name, request.version or None)
        except UnknownModel:
            raise
        except ServerError:
            return _encoded("ModelReadyResponse", ready=False)
        return _encoded("ModelReadyResponse", ready=True)

    async def _model_metadata(self, raw: bytes, call: GrpcCall) -> bytes:
        request = parse("ModelMetadataRequest", raw)
        name = find_listed(self._engine, request.name, request.version or None)
        return encode_metadata(model_metadata(self._engine.models[name], name in self._texts))

    async def _index(self, raw: bytes, call: GrpcCall) -> bytes:
        request = parse("RepositoryIndexRequest", raw)
        models = repository.index(self._engine, ready=request.ready)
        if request.repository_name:  # there is one, and it has no name
            models = []
        return _encoded("RepositoryIndexResponse", models=models)

    async def _load_model(self, raw: bytes, call: GrpcCall) -> bytes:
        request = parse("RepositoryModelLoadRequest", raw)
        await repository.load(self._engine, self._load, request.model_name, list(request.parameters))
        return _encoded("RepositoryModelLoadResponse")

    async def _unload_model(self, raw: bytes, call: GrpcCall) -> bytes:
        repository.unload(parse("RepositoryModelUnloadRequest", raw).model_name)
        return _encoded("RepositoryModelUnloadResponse")


def _encoded(message: str, /, **fields: Any) -> bytes:
    encoded: bytes = MESSAGES[message](**fields).SerializeToString()
    return encoded
