"""A list of the audit events of Python that a decoder causes. A decoder should cause none.

An audit hook cannot be removed, so only a process of its own may use this module.
"""

import sys

# The interpreter itself raises these events when it looks at objects, without reading, running or opening anything.
_HARMLESS = frozenset({"object.__getattr__", "sys._getframe", "builtins.id", "array.__new__"})


class Witness:
    """A recorder of the first 20 audit events while it is ``armed``."""

    def __init__(self) -> None:
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.armed and event not in _HARMLESS and len(self.seen) < 20:
            self.seen.append(f"{event} {arguments!r}"[:300])
