"""Collect what the gateway ignored in a request, and what the gateway changed, and tell the client and the operator.

The readers of all three APIs fill one ``Notes`` object for each request. It becomes the headers ``x-modelctl-ignored``
and ``x-modelctl-changed`` of the answer, notes in the request's story, and lines in the gateway's log.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from starlette.requests import Request
from starlette.types import Scope

from gateway.http.errors import ApiError
from protocol.client.stream_base import StreamBase
from protocol.presets import changed_option

_log = logging.getLogger(__name__)
IGNORED: Final = "x-modelctl-ignored"
CHANGED: Final = "x-modelctl-changed"
NOTES: Final = "gateway.notes"
"""Key of the scope with the request's ``Notes``."""
MOST_NAMED: Final = 16
"""Names that one header says. Further ones are counted."""
LONGEST_CHANGE: Final = 200
"""Characters of one change that are written."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names that are written. Any other name is only counted, since it could be a text of the request."""


class IgnoredLog:
    """Tells the operator which options are ignored, or what is left out: each name once a minute.

    clock  seconds that only grow
    """

    EVERY_S: Final = 60.0
    MOST: Final = 256
    """Names that are remembered. While all of them are younger than a minute, further names are not logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}
        """When each name was logged last, the oldest first."""

    def tell(self, name: str, message: str = "requests have the unknown option %s, which is ignored") -> None:
        """Log a name, unless that was done less than a minute ago. ``message`` has its place."""
        now = self._clock()
        if name in self._told and now - self._told[name] < self.EVERY_S:
            return
        if name not in self._told and len(self._told) >= self.MOST:
            oldest = next(iter(self._told))
            if now - self._told[oldest] < self.EVERY_S:
                return
            del self._told[oldest]
        self._told.pop(name, None)
        self._told[name] = now
        _log.info(message, name)


_ignored_log = IgnoredLog()
_changed_log = IgnoredLog()


class Notes:
    """The notes of one request. The readers of its body fill them.

    refuse  whether unknown options are refused (``gateway.unknown_options`` of models.yaml)
    """

    def __init__(self, *, refuse: bool = False) -> None:
        self.refuse = refuse
        self._ignored: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._omitted: dict[str, int] = {}
        self._streams: Sequence[StreamBase] = ()
        self._names: Mapping[str, str] = {}
        self._budget: str | None = None

    def ignore(self, name: str, param: str | None = None) -> None:
        """Note an unknown option that is ignored.

        name   the option. A key within an object has the object's name before it: ``messages.foo``
        param  where the option stands, such as ``messages[3].foo``, for the error; unset: ``name``

        Raises ApiError where unknown options are refused.
        """
        if self.refuse:
            shown = (param or name)[:128]
            raise ApiError(400, f"unknown option {shown!r}: leave it out", param=shown)
        if name not in self._ignored:
            self._ignored[name] = None
            if len(self._ignored) <= MOST_NAMED and _NAME.fullmatch(name):
                _ignored_log.tell(name)

    def change(self, what: str) -> None:
        """Note something that was cut, left out or replaced.

        what  an option (``metadata``), an option with its new value (``max_tokens=3071``), or what was
              left out of an option (``tools: web_search``). Only ``named`` texts of the request may
              stand in it
        """
        self._changed[what] = None
        _changed_log.tell(what[:LONGEST_CHANGE], "of requests this is changed or left out: %s")

    def omit(self, what: str) -> None:
        """Note that a thing was left out that has no name of its own. The things are counted: ``images: 2``."""
        self._omitted[what] = self._omitted.get(what, 0) + 1
        _changed_log.tell(what, "of requests this is changed or left out: %s")

    def watch(self, streams: Sequence[StreamBase], names: Mapping[str, str], budget: str | None = None) -> None:
        """Note also what only the worker knows, as soon as a stream tells it: that the context has cut the answers of
        these streams, that models.yaml forces the value of an option, and that a model whose reasoning is not known has
        ignored a budget for it.

        names   options that the sender calls otherwise: {our name: the sender's}
        budget  the sender's name of ``reasoning_budget``, if the request has ``budget_if_reasoning``
        """
        self._streams, self._names, self._budget = streams, names, budget

    @property
    def ignored_names(self) -> int:
        """The number of names that were ignored so far."""
        return len(self._ignored)

    @property
    def ignored(self) -> str:
        """The ignored options, in one line; empty if there are none."""
        left_out = self._budget is not None and any("reasoning_budget" in stream.left_out for stream in self._streams)
        names = [*self._ignored, *([self._budget] if left_out else [])]
        return _listed(name if name is not None and _NAME.fullmatch(name) else None for name in names)

    @property
    def changed(self) -> str:
        """The changes, in one line; empty if there are none."""
        cut = [stream.max_tokens for stream in self._streams if stream.max_tokens is not None]
        by_worker = {name: value for stream in self._streams for name, value in stream.forced.items()}
        by_worker |= {"max_tokens": min(cut)} if cut else {}
        told = (changed_option(named(self._names.get(name, name)), value) for name, value in by_worker.items())
        return _listed([*self._all_changed(), *told])

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer that tell the notes."""
        told = ((IGNORED, self.ignored), (CHANGED, self.changed))
        return [(name.encode(), text.encode("ascii", "replace")) for name, text in told if text]

    def for_story(self) -> list[str]:
        """Return the notes as the request's story has them. The supervisor adds what only the worker knows."""
        named = [name for name in self._ignored if _NAME.fullmatch(name)][:MOST_NAMED]
        changed = [what[:LONGEST_CHANGE] for what in self._all_changed()][:MOST_NAMED]
        return [f"ignored {name}" for name in named] + [f"changed {what}" for what in changed]

    def _all_changed(self) -> list[str]:
        return [*self._changed, *(f"{what}: {count}" for what, count in self._omitted.items())]


def named(name: object) -> str:
    """Return a name of the request as headers and logs may have it: as it is, or else a word in its place."""
    return name if isinstance(name, str) and _NAME.fullmatch(name) else "other"


def notes_of(request: Request) -> Notes:
    """Return the notes of a request. The first call makes them."""
    notes = request.scope.get(NOTES)
    if not isinstance(notes, Notes):
        refuse = request.app.state.settings.unknown_options == "refuse"
        notes = request.scope[NOTES] = Notes(refuse=refuse)
    return notes


def headers_of(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell the notes of a request."""
    notes = scope.get(NOTES)
    return notes.headers() if isinstance(notes, Notes) else []


def _listed(entries: Iterable[str | None]) -> str:
    """Return at most ``MOST_NAMED`` entries, and the number of further ones. An entry that is None only counts."""
    all_of_them = list(entries)
    shown = [each[:LONGEST_CHANGE] for each in all_of_them if each is not None][:MOST_NAMED]
    more = len(all_of_them) - len(shown)
    return ", ".join([*shown, *([f"{more} more" if shown else f"{more} of other names"] if more else [])])
