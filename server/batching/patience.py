"""How long callers wait before they leave, learned from those who left. Pure; time is an argument.

A caller who is refused can go elsewhere; one who waits in vain costs a place in the queue, and a run too if
he leaves while it is on. With first come, first served every request that reaches the device then is one
about to be left: at five times the capacity and a patience of five runs nobody was answered at all
(`experiments/overload`). So where many leave, nobody is let in who would wait longer than those did.
"""

import math

# Who left counts ten times as much as who got an answer: once the bound holds hardly anybody leaves, and it
# must not be forgotten for that. A hundred answers lift it.
_LEFT, _ANSWERED = 0.1, 0.01
_MANY = 0.2
# Who leaves sooner did not leave for waiting; and so short a bound would refuse those who do wait.
_NOTICED_S = 0.02


class Patience:
    """A bound on predicted waits.

    Attributes:
        share: of callers who left, among those who left or were answered lately.
        age_s: how long those who left had waited.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self.age_s = 0.0

    def left(self, age_s: float, least_s: float) -> None:
        """A caller left.

        Args:
            age_s: how long he had waited; below 20 ms, or below `least_s`, he did not leave for waiting.
            least_s: the least time of an answer.
        """
        if age_s < max(least_s, _NOTICED_S):
            return
        self.age_s += (_LEFT if self.age_s else 1.0) * (age_s - self.age_s)
        self.share += _LEFT * (1.0 - self.share)

    def answered(self) -> None:
        """A caller was answered."""
        if self.share:
            self.share -= _ANSWERED * self.share
            if self.share < _MANY / 10:
                self.share = self.age_s = 0.0

    @property
    def bound_s(self) -> float:
        """How long a newcomer may be predicted to wait; infinity while few leave."""
        return self.age_s if self.share > _MANY else math.inf
