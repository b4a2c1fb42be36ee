"""Interceptor that gives each gRPC call a span; added only where calls are traced."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from ..tracing import Tracing


class Traced(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the methods with one answer of the inference service; health and reflection have no spans.

    Args:
        tracing: makes the spans.
        service: full name of the service that is traced.
    """

    def __init__(self, tracing: Tracing, service: str) -> None:
        self._tracing, self._service = tracing, service

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The handler of a method, with a span around it."""
        handler = await continuation(handler_call_details)
        full = str(handler_call_details.method).lstrip("/")
        if handler is None or handler.response_streaming or not full.startswith(f"{self._service}/"):
            return handler
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def traced(given: Any, context: Any) -> Any:
            headers = {
                key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
            }
            service, method = full.rsplit("/", 1)
            known = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
            call = self._tracing.begin(full, headers, known)
            failed = "the call did not end"
            try:
                answer = await behaviour(given, context)
                failed = ""
                return answer
            finally:
                code = context.code()
                number = code.value[0] if isinstance(code, grpc.StatusCode) else int(code or 0)
                said = failed and (context.details() or failed)
                call.end({"rpc.grpc.status_code": number}, str(said) if number not in _CALLERS else "")

        wrap = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return wrap(traced, handler.request_deserializer, handler.response_serializer)


# What the caller could have kept from happening is no failure of the server.
_CALLERS = {
    code.value[0]
    for code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
}
