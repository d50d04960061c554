"""Choose which pages of the prompt cache are given up when an answer needs pages. Pure.

The package gives up the page that was used longest ago. Pages of a text are used in order, so its first page goes
first, and what stands behind cannot be found any more; and a page may go that the same prompt is about to hit. Here
pages that the prompt hits stay. Of the others empty pages go first, then pages that cannot be found, then texts from
their ends.

Which text goes first is chosen by hindsight. Usually it is the one whose last use is the oldest. Where agents take
turns and their texts do not fit together, that is the text which is needed next, and the one used last is the better
choice. So both rules are followed with names alone, and the one that would have hit more pages of late is used.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_MEMORY = 0.95
"""What a page that a rule has hit still counts one request later: some twenty requests decide."""
_ADVANTAGE = 1.2
"""How much more pages the other rule has to hit before it is used."""


class Held(NamedTuple):
    """A page that nobody uses.

    name    made of its tokens and all before them, if it is full
    parent  the name of the page before it; None: it begins a text
    used    rises with each use of a page
    tokens  that are known; 0: it is empty
    """

    name: bytes
    parent: bytes | None
    used: int
    tokens: int


def victims(
    held: Iterable[Held], in_use: Collection[bytes], kept: Collection[bytes], count: int, *, newest: bool
) -> list[Held]:
    """Return ``count`` pages to give up, the first one first; fewer if there are no more.

    in_use  names of pages that are not ``held``, and have their texts before them
    kept    names of pages that stay, and have the names of all pages before them
    newest  whether the text used last goes first, else the one used longest ago
    """
    pages = {page.name: page for page in held}
    behind: dict[bytes | None, list[Held]] = {}
    for page in pages.values():
        behind.setdefault(page.parent, []).append(page)
    found: set[bytes] = set()
    look = [page for page in pages.values() if page.parent is None or page.parent in in_use]
    while look:
        page = look.pop()
        found.add(page.name)
        look += behind.get(page.name, ())
    free = [page for page in pages.values() if page.name not in kept]
    chosen = [page for page in free if not page.tokens]
    chosen += sorted((page for page in free if page.tokens and page.name not in found), key=lambda page: page.used)
    if len(chosen) >= count:
        return chosen[:count]
    gone = {page.name for page in chosen}
    followers = Counter(page.parent for page in pages.values() if page.name not in gone)

    def turn(page: Held) -> tuple[int, bytes]:
        # What an earlier answer has left behind a page would otherwise hold up the pages before it.
        before = pages.get(page.parent) if newest and page.parent is not None else None
        last = max(page.used, before.used) if before is not None else page.used
        return -last if newest else last, page.name

    ends = [turn(page) for page in free if page.name not in gone and not followers[page.name]]
    heapq.heapify(ends)
    while ends and len(chosen) < count:
        page = pages[heapq.heappop(ends)[1]]
        chosen.append(page)
        followers[page.parent] -= 1
        parent = pages.get(page.parent) if page.parent is not None else None
        if parent is not None and parent.name not in kept and not followers[parent.name]:
            heapq.heappush(ends, turn(parent))
    return chosen


class Followed:
    """A prompt cache of names alone, under one rule.

    pages  its size
    """

    def __init__(self, pages: int, *, newest: bool) -> None:
        self._pages, self.newest = pages, newest
        self._held: dict[bytes, Held] = {}
        self._uses = 0

    def use(self, names: Sequence[bytes], answer: int) -> int:
        """Return how many pages of a prompt are found, from the first. ``answer``: pages that its answer takes."""
        hits = 0
        while hits < len(names) and names[hits] in self._held:
            hits += 1
        missing = sum(name not in self._held for name in names) + answer - (self._pages - len(self._held))
        if missing > 0:
            for page in victims(self._held.values(), (), set(names), missing, newest=self.newest):
                del self._held[page.name]
        for number, name in enumerate(names):
            self._uses += 1
            self._held[name] = Held(name, names[number - 1] if number else None, self._uses, 1)
        return hits


class VictimRule:
    """The rule that the last requests have shown to be the better one.

    pages  the size of the cache
    """

    def __init__(self, pages: int) -> None:
        self.newest = False
        self._followed = {newest: Followed(pages, newest=newest) for newest in (False, True)}
        self._hits = dict.fromkeys(self._followed, 0.0)

    def use(self, names: Sequence[bytes], answer: int) -> None:
        """Take in a request: the names of its prompt's full pages, and the number of pages that its answer takes."""
        for newest, followed in self._followed.items():
            self._hits[newest] = self._hits[newest] * _MEMORY + followed.use(names, answer)
        if self._hits[not self.newest] > _ADVANTAGE * self._hits[self.newest] + 1:
            self.newest = not self.newest
