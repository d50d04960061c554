"""Follow the unfinished requests of one key, without being told of each token and each end. Pure."""

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

CLEAR_AT = 64
"""The most requests that are kept before ended ones are removed for the first time. Later they are removed when the
number of kept requests has doubled, and is above CLEAR_AT."""


class Counted(Hashable, Protocol):
    """A request that counts the tokens of its answer."""

    @property
    def tokens(self) -> int: ...


Request = TypeVar("Request", bound=Counted)


class Unfinished(Generic[Request]):
    """The requests of one key that may be unfinished, and the tokens of their answers.

    holds  request → whether that request is unfinished

    Ended requests stay until the next check. The limit on kept requests is CLEAR_AT, or twice the number that remained
    after the last check if that is more.
    """

    def __init__(self, holds: Callable[[Request], bool]) -> None:
        self._holds = holds
        self._counted: dict[Request, int] = {}
        """For each request, the tokens that are part of ``_new_tokens`` or were taken already."""
        self._new_tokens = 0
        self._clear_at = CLEAR_AT

    def __len__(self) -> int:
        return len(self._counted)

    def add(self, request: Request) -> None:
        self._counted[request] = 0
        if len(self._counted) > self._clear_at:
            self._clear()

    def count(self, limit: int) -> int:
        """Return the number of unfinished requests. It is exact if it is ``limit`` or more, else it may be too high."""
        if len(self._counted) >= limit:
            self._clear()
        return len(self._counted)

    def take_tokens(self) -> int:
        """Return the tokens of all answers that have come since the last call, those of ended requests included."""
        self._clear()
        tokens, self._new_tokens = self._new_tokens, 0
        return tokens

    def _clear(self) -> None:
        kept = {}
        for request, counted in self._counted.items():
            tokens = request.tokens
            self._new_tokens += tokens - counted
            if self._holds(request):
                kept[request] = tokens
        self._counted = kept
        self._clear_at = max(CLEAR_AT, 2 * len(kept))
