"""FastAPI, whose hot routes go past its layers while nobody but us has put any there."""

from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from .hot import HOT, HotPaths

# Each so-manieth request goes all the way, to see whether FastAPI traces by now.
_LOOKS_EVERY = 256


class Application(FastAPI):
    """The application that `create_app` makes.

    A request of a hot route passes what we put in front of it and nothing else. Middleware that an owner adds
    brings every request the whole way, and so does tracing by FastAPI itself, which wants to see its routes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._front: ASGIApp | None = None
        self._hot: HotPaths | None = None
        self._own = 0
        self._count = -1

    def go_past(self, front: ASGIApp, hot: HotPaths) -> None:
        """From now on hot routes are answered by `front`, which does what the middleware added so far does.

        Args:
            front: finds the application of the route in the scope, under `HOT`.
            hot: finds the routes.
        """
        self._front, self._hot, self._own = front, hot, len(self.user_middleware)

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
        if scope["type"] != "http" or len(self.user_middleware) != self._own or self.root_path:
            return False
        self._count += 1
        return self._count % _LOOKS_EVERY > 0 and not (self._hot and self._hot.traced)
