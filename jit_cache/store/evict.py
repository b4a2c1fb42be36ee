"""Which entries leave when a store grows beyond its cap: a pure function."""

from collections.abc import Collection, Iterable

from .disk import Stored


def choose(
    stored: Iterable[Stored], cap_bytes: int, incoming_bytes: int, kept: Collection[str]
) -> list[str] | None:
    """The least recently used entries that must go so that a new one fits.

    Args:
        stored: what is there, without the entry that is about to be replaced.
        cap_bytes: most bytes of all entries together.
        incoming_bytes: size of the new entry; 0 only brings the store below its cap.
        kept: digests that stay whatever happens: what this process uses or plans to use.

    Returns:
        Digests to delete, oldest first; None if the new entry cannot fit beside those that stay.
    """
    by_age = sorted(stored, key=lambda one: (one.used_ns, one.digest))
    excess = sum(one.nbytes for one in by_age) + incoming_bytes - cap_bytes
    leaving = []
    for one in by_age:
        if excess <= 0:
            break
        if one.digest not in kept:
            leaving.append(one.digest)
            excess -= one.nbytes
    return leaving if excess <= 0 or not incoming_bytes else None
