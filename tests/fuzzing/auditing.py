"""Python's own audit hook as a witness: what a decoder has no business with ends up in a list.

A hook cannot be taken off again, hence for processes of their own only.
"""

import sys

# What the interpreter itself raises where nothing is read, run or opened: objects looked at.
_HARMLESS = frozenset({"object.__getattr__", "sys._getframe", "builtins.id", "array.__new__"})


class Witness:
    """Notes every audit event while it is ``armed``."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and event not in _HARMLESS and len(self.seen) < 20:
            self.seen.append(f"{event} {arguments!r}"[:300])
