"""What a call to a language model's server may say, and how a thread takes its answer."""

import queue
from typing import TypedDict

from ..errors import ServerError
from .desk import Event
from .output import Delta


class ThreadSink:
    """Keeps what comes until a thread takes it."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def deliver(self, event: Event) -> None:
        """Take the next delta, or the error that ended the text."""
        self.events.put(event)


class Options(TypedDict, total=False):
    """What a call may say besides its prompt and parameters.

    Attributes:
        priority: 1 (most urgent) to 9.
        timeout_s: seconds until the text must be complete.
        salt: only requests with the same one share cached prefixes.
    """

    priority: int
    timeout_s: float | None
    salt: str | None


def checked(event: Event) -> Delta:
    """A delta, or its error raised."""
    if isinstance(event, ServerError):
        raise event
    return event
