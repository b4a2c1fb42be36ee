"""Whether and when a call is tried again: a pure policy, and a budget that all calls of a client share.

Backoff with full jitter: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. The
budget is that of gRPC's retry throttling (proposal A6): an outage costs each client a few retries and not a
multiple of its traffic.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigError, Overloaded, ServerError, Unavailable


@dataclass(frozen=True, slots=True)
class Retry:
    """When a call is tried again: after 429, after 503, and if the server was not reached.

    Attributes:
        attempts: tries of one call in all; 1 never retries.
        base_s: the first backoff is at most this; each later one at most twice the one before.
        longest_s: no backoff is longer. A `Retry-After` beyond it ends the call at once: who asks for so
            long a wait should be asked again by the caller, not by a sleeping thread.
        budget: retries that a client may have in hand, over all its calls.
        refund: what each success gives back to the budget; 0.1 allows one retry for ten successes.
    """

    attempts: int = 4
    base_s: float = 0.1
    longest_s: float = 30.0
    budget: float = 10.0
    refund: float = 0.1

    def __post_init__(self) -> None:
        numbers = (self.base_s, self.longest_s, self.budget, self.refund)
        if self.attempts < 1 or not all(math.isfinite(one) and one >= 0 for one in numbers):
            raise ConfigError(f"Retries are counted from 1 try, in seconds of 0 or more; got {self}")

    def wait_s(self, tries: int, error: ServerError, jitter: Callable[[], float]) -> float | None:
        """Seconds until the next try; None to give up.

        Args:
            tries: that were made.
            error: how the last one ended.
            jitter: draws from [0, 1).
        """
        if tries >= self.attempts or not isinstance(error, Overloaded | Unavailable):
            return None
        backoff_s = jitter() * min(self.longest_s, self.base_s * 2.0 ** (tries - 1))
        asked_s = error.retry_after_s
        if asked_s is None:
            return backoff_s
        # Never before the time that was asked for; behind it, spread out.
        return None if asked_s > self.longest_s else asked_s + backoff_s


class Budget:
    """Retries that may still be made; thread-safe.

    Args:
        policy: how many at first and at most, and what a success gives back.
    """

    def __init__(self, policy: Retry) -> None:
        self._most, self._refund = policy.budget, policy.refund
        self._left = policy.budget
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        """Retries left."""
        return self._left

    def take(self) -> bool:
        """Pay for a retry; False if there is not enough left."""
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True

    def refund(self) -> None:
        """A call succeeded."""
        with self._lock:
            self._left = min(self._most, self._left + self._refund)
