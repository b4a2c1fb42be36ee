"""One row of a packed run: the oldest item, and of those behind it the subset that fills the row best."""

from collections.abc import Sequence


def fill_row(lengths: Sequence[int], line: Sequence[int], columns: int, most: int, enough: int) -> list[int]:
    """Places of the items that share a row; the first in line is one of them.

    Exact sums of subsets (Bellman 1957), kept as the bits of an integer: bit s is set if some of the items
    looked at so far add up to s. The line is looked at only until a row is full enough, and of what adds up
    to the same the youngest are left out; so those who wait longest go first, and nobody is passed over whom
    the row has room for.

    Args:
        lengths: of all items.
        line: places of those that wait, the first at most as long as the row, in the order of their turn.
        columns: of the row.
        most: items in it at most; where that binds, those that go along are the longest first.
        enough: elements with which the row is full enough, at most `columns`.
    """
    seed, free = line[0], columns - lengths[line[0]]
    mask, reached, seen = (1 << free + 1) - 1, 1, list[tuple[int, int]]()
    for place in line[1:]:
        if reached.bit_length() > enough - lengths[seed]:
            break
        if lengths[place] <= free:
            seen.append((place, reached))
            reached |= reached << lengths[place] & mask
    left, chosen = reached.bit_length() - 1, [seed]
    for place, before in reversed(seen):
        if not before >> left & 1:
            chosen.append(place)
            left -= lengths[place]
    if len(chosen) > most:
        return [seed, *_longest(lengths, [place for place, _ in seen], free, most - 1)]
    return [seed, *reversed(chosen[1:])]


def _longest(lengths: Sequence[int], line: Sequence[int], free: int, most: int) -> list[int]:
    chosen: list[int] = []
    for place in sorted(line, key=lambda one: -lengths[one]):
        if len(chosen) < most and lengths[place] <= free:
            chosen.append(place)
            free -= lengths[place]
    return chosen
