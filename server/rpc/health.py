"""The standard health service, `grpc.health.v1`, over an engine: it says what readiness says."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from ..errors import ServerError
from ..seam import Engine, find_model
from .messages import SERVICE

_Status = health_pb2.HealthCheckResponse
_OF_SERVER = frozenset({"", SERVICE})
WARM = f"{SERVICE}/warm"


class Health:
    """Answers for `""` and the inference service as the server, and for a model's name as that model.

    `inference.GRPCInferenceService/warm` is served once every program is there, as HTTP's `/v2/health/warm`.

    Args:
        engine: what is asked; nothing is cached.
        watch_s: seconds between two looks at the engine while a client watches.
    """

    def __init__(self, engine: Engine, watch_s: float) -> None:
        self._engine = engine
        self._watch_s = watch_s

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The status now; NOT_FOUND for a service that is none of ours."""
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            served = ", ".join(["''", SERVICE, WARM, *sorted(self._engine.models)])
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"Health is known of {served}, got {request.service[:200]!r}; ask for one of them.",
            )
        return _Status(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The status now and at each change; the stream ends when the engine drains, so as not to hold it up.

        The seam has no event for readiness, so this looks again at an interval, only while somebody watches.
        """
        last = None
        while True:
            draining = self._engine.draining
            status = self._status(request.service)
            if status != last:
                last = status
                yield _Status(status=status)
            if draining:
                return
            await asyncio.sleep(self._watch_s)

    def _status(self, service: str) -> int:
        engine = self._engine
        if service in _OF_SERVER:
            good = engine.live and engine.ready and not engine.draining
        elif service in engine.models:
            try:
                find_model(engine, service)
                good = engine.live
            except ServerError:
                good = False
        elif service == WARM:
            good = bool(engine.status().get("warm"))
        else:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.SERVING if good else _Status.NOT_SERVING)
