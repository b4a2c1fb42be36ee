"""Errors of this room that no caller should ever see: each is a broken invariant of the engine.

What callers see are the errors of `servax.server`.
"""


class GenerationFault(RuntimeError):
    """Root of this folder's errors."""


class PoolFault(GenerationFault):
    """A page was released twice, taken while none is free, or used after it was returned."""


class SlotFault(GenerationFault):
    """A slot was given out again although a launched step that names it was not read yet."""


class StateFault(GenerationFault):
    """The device's state is not what a donating program may be given."""
