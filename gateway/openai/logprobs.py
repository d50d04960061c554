"""Log-probabilities of an answer's tokens in OpenAI's shapes."""

import codecs
from collections.abc import Sequence
from typing import Any, Final

from protocol.client.answers import TokenLogprob

LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class TextOffset:
    """The place of the next token in a text, in characters. A token may end within a character.

    at  where the text begins that these tokens add to
    """

    def __init__(self, at: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.at = at

    def add(self, token: bytes) -> int:
        """Return where this token begins."""
        begins = self.at
        self.at += len(self._decoder.decode(token))
        return begins


def spelled(token: bytes) -> str:
    """Return a token as completions show it: its text, or ``bytes:\\xe2\\x80`` if it is an incomplete character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in token)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's choice."""
    return {
        "content": [_chat_logprob(e) | {"top_logprobs": [_chat_logprob(t) for t in e.top]} for e in entries],
        "refusal": None,
    }


def _chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": max(entry.logprob, LEAST_LOGPROB), "bytes": list(entry.bytes)}


def completion_logprobs(entries: Sequence[TokenLogprob], offset: TextOffset) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice. ``offset`` knows the tokens before these.

    The drawn token is among ``top_logprobs`` also if it is not one of the likeliest.
    """
    return {
        "tokens": [spelled(entry.bytes) for entry in entries],
        "token_logprobs": [max(entry.logprob, LEAST_LOGPROB) for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": [offset.add(entry.bytes) for entry in entries],
    }


def _top(entry: TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for token in (*entry.top, entry):  # two tokens may have the same text: the likelier one is shown
        found.setdefault(spelled(token.bytes), max(token.logprob, LEAST_LOGPROB))
    return found
