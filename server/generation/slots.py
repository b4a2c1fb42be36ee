"""Slots: a sequence's place in the state on the device and in the host's tables of per-row data.

A slot outlives its sequence until every launched step that names it was read: an answer is therefore never
booked to a newcomer, and its last token on the device is never another's.
"""

from .errors import SlotFault


class Slots:
    """Gives out slots `0` to `count - 1`; slot `count` is the sink of padded rows.

    Args:
        count: more than the rows that run, so that one still in flight delays no newcomer.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sink = count
        self._free = list(range(count - 1, -1, -1))
        self._flying = [0] * count

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """A slot that no launched step names.

        Raises:
            SlotFault: there is none, or its last step was not read.
        """
        if not self._free:
            raise SlotFault(f"all {self.count} slots are in use; wait for one")
        slot = self._free[-1]
        if self._flying[slot]:
            raise SlotFault(f"slot {slot} is in {self._flying[slot]} launched steps that were not read")
        return self._free.pop()

    def launched(self, slot: int) -> None:
        """A step that names the slot was launched."""
        self._flying[slot] += 1

    def landed(self, slot: int) -> None:
        """Its answer was read."""
        self._flying[slot] -= 1

    def release(self, slot: int) -> None:
        """The sequence is over.

        Raises:
            SlotFault: a launched step that names it was not read, or it is free already.
        """
        if self._flying[slot]:
            raise SlotFault(
                f"a slot is released once its steps were read; {self._flying[slot]} of slot {slot} were not"
            )
        if slot in self._free:
            raise SlotFault(f"a slot is released once; slot {slot} is free")
        self._free.append(slot)
