"""A site of fake models behind gRPC on a real socket, and the same models over REST for comparison."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from servax.server.fake import FakeEngine, FakeTokenizer, counting_embedder, doubler
from servax.server.http.asgi import create_app
from servax.server.metrics import Metrics
from servax.server.rpc.messages import MESSAGES, SERVICE
from servax.server.rpc.service import GrpcConfig, create_grpc_server
from servax.server.rpc.testing import Refusal, infer_request, output_of, running_grpc
from servax.server.text import Embedder


class GrpcSite:
    """Fake models behind gRPC on a socket, and behind REST in process."""

    def __init__(self) -> None:
        self.toy = counting_embedder()
        self.double = doubler()
        self.ragged = doubler("ragged", shape=("length",))
        self.bf16 = doubler("bf16", ml_dtypes.bfloat16, ("length",))
        self.half = doubler("half", np.float16, (2,))
        self.tiny = doubler("tiny", np.int8, ("length",))
        self.flags = doubler("flags", np.bool_, ("length",))
        models = (self.toy, self.double, self.ragged, self.bf16, self.half, self.tiny, self.flags)
        self.engine = FakeEngine(*models)
        self.metrics = Metrics()
        self.texts = {"toy": Embedder(self.toy, FakeTokenizer(), inline_chars=200)}
        self.app = create_app(self.engine, texts=self.texts, metrics=self.metrics)

    def make(self) -> grpc.aio.Server:
        config = GrpcConfig(max_message_bytes=200_000, health_watch_s=0.01)
        return create_grpc_server(self.engine, texts=self.texts, metrics=self.metrics, config=config)

    def open(self, address: str) -> None:
        self.address = address
        self.channel = grpc.insecure_channel(address)
        self.client = triton.InferenceServerClient(address)

    def close(self) -> None:
        self.client.close()
        self.channel.close()

    def call(self, method: str = "ModelInfer") -> Any:
        """One method, bytes to bytes."""
        return self.channel.unary_unary(f"/{SERVICE}/{method}")

    def send(self, request: Any, **options: Any) -> Any:
        """One infer call; returns the answer's message."""
        content = request if isinstance(request, bytes) else request.SerializeToString()
        return MESSAGES["ModelInferResponse"].FromString(self.call()(content, **options))

    def infer(self, model: str, *inputs: dict[str, Any], **fields: Any) -> Any:
        return self.send(infer_request(model, inputs, **fields))

    def refused(self, request: Any, code: str = "INVALID_ARGUMENT", reason: str = "bad_tensor") -> Refusal:
        """Checks that a request is refused, with its remedy, and that a normal one works after."""
        with pytest.raises(grpc.RpcError) as caught:
            self.send(request)
        refusal = Refusal(caught.value)
        assert (refusal.code, refusal.reason) == (code, reason), refusal.message
        assert (refusal.info.reason, refusal.info.domain) == (reason.upper(), "servax")
        assert (refusal.status.code, refusal.status.message) == (
            grpc.StatusCode[code].value[0],
            refusal.message,
        )
        assert ";" in refusal.message
        self.check_healthy()
        return refusal

    def refused_infer(self, model: str, *inputs: dict[str, Any], reason: str, **fields: Any) -> str:
        return self.refused(infer_request(model, inputs, **fields), reason=reason).message

    def check_healthy(self) -> None:
        """A normal request still works."""
        x = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.5] * 8}
        answer = self.infer("double", x, id="fine")
        assert answer.id == "fine"
        assert output_of(answer, "y").tolist() == [[3.0] * 8]

    def rest(self, model: str, *inputs: dict[str, Any], **body: Any) -> httpx.Response:
        """The same request over REST."""

        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://servax") as client:
                return await client.post(f"/v2/models/{model}/infer", json={"inputs": list(inputs), **body})

        return asyncio.run(go())

    def requests(self, **labels: str) -> float:
        return self.metrics.value("servax_requests_total", route="grpc", **labels)


@pytest.fixture(scope="module")
def module_site() -> Iterator[GrpcSite]:
    site = GrpcSite()
    with running_grpc(site.make) as address:
        site.open(address)
        yield site
        site.close()


@pytest.fixture
def site(module_site: GrpcSite) -> GrpcSite:
    """The module's site, with its models as new."""
    for model in module_site.engine.models.values():
        model.calls.clear()
        model.options.clear()
        model.error, model.allow_nonfinite = None, False
    module_site.engine.heat()
    return module_site
