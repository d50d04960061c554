"""The text of each token of a model, in which markers are looked for."""

from collections.abc import Sequence
from functools import cached_property


class MarkerTexts:
    """The text of each token, with that of the markers that are special tokens.

    spelled  bytes of each id; b"" for an id without a text
    """

    def __init__(self, spelled: Sequence[bytes]) -> None:
        self.spelled = spelled
        self._beyond: dict[bytes, list[int]] = {}

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.spelled) if piece}

    @cached_property
    def blanks(self) -> list[int]:
        """Return the ids of line breaks."""
        return [token for token, piece in enumerate(self.spelled) if piece in (b"\n", b"\n\n")]

    def of(self, token: int) -> bytes:
        return self.spelled[token] if token < len(self.spelled) else b""

    def beginnings(self, text: bytes) -> list[int]:
        """Return the ids whose text is the whole text or its beginning."""
        return [token for size in range(1, len(text) + 1) if (token := self._ids.get(text[:size])) is not None]

    def beyond(self, text: bytes) -> list[int]:
        """Return the ids whose text begins with this text and goes on behind it."""
        if text not in self._beyond:
            size = len(text)
            self._beyond[text] = [
                token for token, piece in enumerate(self.spelled) if len(piece) > size and piece.startswith(text)
            ]
        return self._beyond[text]
