"""FastAPI, whose hot routes go past its layers while nobody but us has put any there."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from .hot import HOT, HotPaths

# Each so-manieth request goes all the way, to see whether FastAPI traces by now.
_LOOKS_EVERY = 256


class Application(FastAPI):
    """The application that `create_app` makes.

    A request of a hot route passes what we put in front of it and nothing else. Middleware that an owner
    adds, in whatever way, brings every request the whole way, and so does tracing by FastAPI itself, which
    wants to see its routes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._front: ASGIApp | None = None
        self._hot: HotPaths | None = None
        self._own: list[object] = []
        self._stack: ASGIApp | None = None
        self._alone = False
        self._count = -1

    def go_past(self, front: ASGIApp, hot: HotPaths, own: Sequence[type]) -> None:
        """From now on hot routes are answered by `front`, which does what our own middleware does.

        Args:
            front: finds the application of the route in the scope, under `HOT`.
            hot: finds the routes.
            own: classes of our middleware, the first of them in front.
        """
        self._front, self._hot, self._own = front, hot, list(own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if self._front is not None and self._hot is not None and self._may_go_past(scope):
            found = self._hot.find(scope)
            if found is not None:
                scope[HOT] = found
                await self._front(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _may_go_past(self, scope: Scope) -> bool:
        if scope["type"] != "http" or self.root_path:
            return False
        self._count += 1
        if self._count % _LOOKS_EVERY == 0 or (self._hot and self._hot.traced):
            return False
        stack = self.middleware_stack  # made at the first request, and anew by some of those that trace
        if stack is not self._stack:
            self._stack, self._alone = stack, stack is not None and self._is_alone(stack)
        return self._alone

    def _is_alone(self, stack: ASGIApp) -> bool:
        """Whether nothing but the framework and we ourselves stands in front of the routes."""
        added = [one.cls for one in self.user_middleware]
        limited = getattr(self, "max_body_size", None) is not None
        if added != self._own or limited or not (_untouched(FastAPI) and _untouched(Starlette)):
            return False
        layer: object = stack
        while layer is not None and type(layer) is not self._own[0]:
            if not type(layer).__module__.startswith(("starlette.", "fastapi.")):
                return False
            layer = getattr(layer, "app", None)
        return layer is not None


def _untouched(kind: type) -> bool:
    """Whether nobody has wrapped how such applications are called, as agents that trace do."""
    call = vars(kind).get("__call__")
    return type(call) is FunctionType and call.__globals__["__name__"] == kind.__module__
