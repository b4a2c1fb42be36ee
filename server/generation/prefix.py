"""The prefix cache: full pages of finished tokens, found again by the tokens that lead to them.

Blocks of one page are chained: an entry names its parent, the entry of the block before. Entries are found
by a hash of the chain and then compared, tokens, parent and namespace, so a collision costs time and never
reuses another text's keys and values. Pages that nobody holds are given up from the least recently used on;
a child is always older in that order than its parent, since whoever holds a block holds those before it and
lets go of the last one first.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from .pages import PagePool


class Namespace(NamedTuple):
    """What besides its tokens decides the keys and values of a text, or who may share them."""

    adapter: str | None = None
    salt: str | None = None


class Entry:
    """One published block."""

    __slots__ = ("generation", "key", "namespace", "page", "parent", "tokens")

    def __init__(
        self,
        page: int,
        generation: int,
        key: int,
        parent: "Entry | None",
        namespace: Namespace,
        tokens: bytes,
    ) -> None:
        self.page, self.generation, self.key = page, generation, key
        self.parent, self.namespace, self.tokens = parent, namespace, tokens


Hasher = Callable[[Hashable], int]


class PrefixCache:
    """Finds, publishes and evicts blocks of a pool; its only owner is the engine.

    Args:
        pool: whose pages.
        enabled: False finds and publishes nothing.
        hasher: hash of a chain; a test may pass a constant one.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True, hasher: Hasher = hash) -> None:
        self.pool = pool
        self._enabled, self._hash = enabled, hasher
        self._buckets: dict[int, list[Entry]] = {}
        self._by_page: dict[int, Entry] = {}
        self._idle: OrderedDict[int, Entry] = OrderedDict()
        self.hit_tokens = 0

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones and kept ones that nobody holds."""
        return self.pool.free + len(self._idle)

    def __len__(self) -> int:
        return len(self._by_page)

    def match(self, tokens: np.ndarray, namespace: Namespace) -> list[Entry]:
        """Entries of the longest published prefix, first block first; changes nothing.

        Args:
            tokens: int32 `(n,)`.
            namespace: see `Namespace`.
        """
        found: list[Entry] = []
        size = self.pool.page_size
        if not self._enabled or not self._by_page:
            return found
        parent: Entry | None = None
        for begin in range(0, len(tokens) - size + 1, size):
            entry = self._find(parent, namespace, tokens[begin : begin + size].tobytes())
            if entry is None:
                break
            found.append(entry)
            parent = entry
        return found

    def adopt(self, entries: Sequence[Entry]) -> list[int]:
        """Hold the pages of entries; returns them."""
        pages = [entry.page for entry in entries]
        self.pool.share(pages)
        for page in pages:
            self._idle.pop(page, None)
        return pages

    def take(self, count: int) -> list[int]:
        """Free pages for one holder, evicting kept ones where needed; raises as `PagePool.take`."""
        while self.pool.free < count and self._idle:
            self._evict(next(iter(self._idle.values())))
        return self.pool.take(count)

    def release(self, pages: Sequence[int]) -> None:
        """Let go of a holder's pages, given in the order of its text."""
        for page in self.pool.release(pages[::-1]):
            self._idle[page] = self._by_page[page]

    def publish(
        self, page: int, parent: Entry | None, namespace: Namespace, tokens: np.ndarray
    ) -> Entry | None:
        """Let others find a page, which its caller holds and which is full of finished tokens.

        Args:
            page: the block's page.
            parent: entry of the block before; its page is in the same holder's table.
            namespace: see `Namespace`.
            tokens: int32 `(page_size,)`.

        Returns:
            The new entry, or None if the same block is published with another page, or nothing is.
        """
        if not self._enabled:
            return None
        raw = tokens.tobytes()
        if self._find(parent, namespace, raw) is not None:
            return None
        key = self._key(parent, namespace, raw)
        entry = Entry(page, int(self.pool.generations[page]), key, parent, namespace, raw)
        self.pool.keep(page)
        self._buckets.setdefault(key, []).append(entry)
        self._by_page[page] = entry
        return entry

    def clear(self) -> None:
        """Forget every entry; pages held by nobody become free."""
        for entry in list(self._by_page.values()):
            self._evict(entry)

    def _evict(self, entry: Entry) -> None:
        self._idle.pop(entry.page, None)
        del self._by_page[entry.page]
        bucket = self._buckets[entry.key]
        bucket.remove(entry)
        if not bucket:
            del self._buckets[entry.key]
        self.pool.drop(entry.page)

    def _key(self, parent: Entry | None, namespace: Namespace, raw: bytes) -> int:
        return self._hash((parent.key if parent else None, namespace, raw))

    def _find(self, parent: Entry | None, namespace: Namespace, raw: bytes) -> Entry | None:
        for entry in self._buckets.get(self._key(parent, namespace, raw), ()):
            if entry.parent is parent and entry.namespace == namespace and entry.tokens == raw:
                return entry
        return None
