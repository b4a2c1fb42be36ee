"""What both clients are made from: checked once, in one place."""

from collections.abc import Callable, Mapping

import httpx

from ..errors import ConfigError, DeadlineExceeded, ServerError
from .clock import Clock
from .errors import Unreachable
from .flow import Rules
from .retry import Retry


def rules_of(
    url: str,
    api_key: str | None,
    timeout_s: float,
    retry: Retry | None,
    headers: Mapping[str, str] | None,
    clock: Clock,
    jitter: Callable[[], float],
) -> Rules:
    """Check the arguments of a client.

    Raises:
        ConfigError: the URL is none, or a header or time cannot be used.
    """
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(
            f"A client needs a server's URL, got {url!r}: {error}; try http://localhost:8000"
        ) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"A client needs a URL with http:// or https://, got {url!r}; try http://localhost:8000"
        )
    said = {name.lower(): value for name, value in (headers or {}).items()}
    if api_key is not None:
        said["authorization"] = f"Bearer {api_key}"
    rules = Rules(retry if retry is not None else Retry(), timeout_s, said, clock.now, jitter)
    rules.allowed_s(None)
    return rules


def failure(error: httpx.TransportError, url: str) -> ServerError:
    """What it means for a caller that an exchange failed below HTTP."""
    why = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        late = DeadlineExceeded(
            f"{url} must answer within timeout_s, got {why}; allow more, or look at its load."
        )
        late.__cause__ = error
        return late
    lost = Unreachable(f"{url} must be reachable, got: {why}; check that the server runs and the URL.")
    lost.__cause__ = error
    return lost
