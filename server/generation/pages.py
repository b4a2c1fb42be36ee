"""Pages of the KV pool: who holds them. Pure bookkeeping; the arrays themselves live on the device.

A page is free, held by one or more sequences, or kept: full of finished tokens and held by nobody, so that
a later prompt may share it, until its memory is wanted. Each return to the free list raises the page's
generation, and a table remembers the generations it was made with, so a stale page is noticed before it is
read.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from .errors import PoolFault
from .seam import FIRST_PAGE


class PagePool:
    """Reference counts and generations of pages `FIRST_PAGE` to `pages - 1`.

    Attributes:
        size: pages that sequences can hold.
        page_size: tokens in a page.
        generations: int64 `(pages,)`.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages <= FIRST_PAGE or page_size < 1:
            raise ValueError(
                f"a pool needs more than {FIRST_PAGE} pages of at least 1 token; got {pages} pages of "
                f"{page_size}: give it more memory"
            )
        self.size = pages - FIRST_PAGE
        self.page_size = page_size
        self.generations = np.zeros(pages, np.int64)
        self._refs = [0] * pages
        self._kept = [False] * pages
        self._free = list(range(pages - 1, FIRST_PAGE - 1, -1))

    @property
    def free(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Pages for one new holder.

        Raises:
            PoolFault: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise PoolFault(f"pages are taken from the free ones; {count} were asked, {len(self._free)} are")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._refs[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for held or kept pages.

        Raises:
            PoolFault: a page is free.
        """
        for page in pages:
            if not self._refs[page] and not self._kept[page]:
                raise PoolFault(f"a page is shared while somebody holds it; page {page} is free")
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """One holder less for each.

        Returns:
            Kept pages that nobody holds any more, in the given order.

        Raises:
            PoolFault: nobody holds a page.
        """
        idle = []
        for page in pages:
            if self._refs[page] < 1:
                raise PoolFault(f"a page is released once by each holder; nobody holds page {page}")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._kept[page]:
                    idle.append(page)
                else:
                    self._return(page)
        return idle

    def keep(self, page: int) -> None:
        """Hold a page's memory back from the free list when its last holder leaves."""
        if not self._refs[page]:
            raise PoolFault(f"only a held page can be kept; nobody holds page {page}")
        self._kept[page] = True

    def drop(self, page: int) -> None:
        """Keep a page no longer; it is free at once if nobody holds it."""
        self._kept[page] = False
        if not self._refs[page]:
            self._return(page)

    def refs(self, page: int) -> int:
        """How many hold a page."""
        return self._refs[page]

    def kept(self, page: int) -> bool:
        """Whether a page outlives its holders."""
        return self._kept[page]

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Compare the books with the tables of all holders.

        Raises:
            PoolFault: a page is lost, counted wrongly or free and held at once.
        """
        counted = [0] * len(self._refs)
        for pages in held:
            for page in pages:
                counted[page] += 1
        if counted != self._refs:
            wrong = [page for page, refs in enumerate(self._refs) if refs != counted[page]]
            raise PoolFault(f"each page is counted once a holder; pages {wrong} are not")
        idle = [not self._refs[page] and not self._kept[page] for page in range(len(self._refs))]
        free = set(self._free)
        lost = [page for page in range(FIRST_PAGE, len(idle)) if idle[page] != (page in free)]
        if lost or len(free) != len(self._free):
            raise PoolFault(f"a page is free exactly if nobody holds or keeps it; pages {lost} are not so")

    def _return(self, page: int) -> None:
        self.generations[page] += 1
        self._free.append(page)
