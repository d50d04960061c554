"""The prompt in an answer: its text (``echo``), and log-probabilities of its tokens in OpenAI's and in vLLM's shape.

A prompt may have a million log-probabilities. They are turned into JSON piece by piece, so that other requests do not
wait, and kept as JSON.
"""

import asyncio
import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import orjson

from protocol.client.answers import PromptLogprobs, TokenLogprob

# Log-probabilities of an answer's tokens in OpenAI's shapes.


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


_KEYS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_AT_ONCE: Final = 64
"""Entries of vLLM's list that are made before other requests have their turn: 5 ms with 20 likeliest tokens each. The
256 places of a piece in OpenAI's shape take 8 ms."""


class PromptPlace:
    """The place of the prompt's next token in the prompt's text.

    A special token, such as the one that begins every prompt, is not in the text. Some tokenizers put a blank before
    the first word.
    """

    def __init__(self, text: str) -> None:
        self._text, self._data, self._at = text, text.encode(), 0
        self._offset = TextOffset()
        self._taken = 0

    def add(self, token: bytes) -> int:
        """Return where this token begins, in characters."""
        for part in (token, token.removeprefix(b" ")):
            if self._data.startswith(part, self._at):
                self._at += len(part)
                return self._offset.add(part)
        return self._offset.add(b"")

    def take(self, *, rest: bool = False) -> str:
        """Return the text of the tokens since the last call; with ``rest`` all the text that is left."""
        begin, self._taken = self._taken, len(self._text) if rest else self._offset.at
        return self._text[begin : self._taken]


class EchoedPrompt:
    """One prompt that is sent back.

    top  the number of likeliest tokens at each place; None to send no log-probabilities
    """

    def __init__(self, text: str, top: int | None) -> None:
        self.text, self.top = text, top
        self.place = PromptPlace(text)
        self._begun = False

    def logprobs(self, piece: PromptLogprobs) -> dict[str, Any]:
        """Return the ``logprobs`` of the prompt's next tokens, as ``completion_logprobs``. The first one has none."""
        lists: tuple[list[Any], list[Any], list[Any], list[Any]] = ([], [], [], [])
        tokens, token_logprobs, top_logprobs, offsets = lists
        if not self._begun:
            self._begun = True
            before = piece.before[1]
            tokens.append(spelled(before))
            token_logprobs.append(None)
            top_logprobs.append(None)
            offsets.append(self.place.add(before))
        names = {token: spelled(data) for token, data in piece.known.items()}
        shown = min(self.top or 0, piece.top)
        for own, values in _places(piece):
            ids, logprobs = values
            likely: dict[str, float] = {}
            for token, logprob in zip(ids[1 : 1 + shown], logprobs[1 : 1 + shown], strict=True):
                likely.setdefault(names[token], logprob)
            tokens.append(names[own])
            token_logprobs.append(logprobs[0])
            top_logprobs.append(likely if names[own] in likely else likely | {names[own]: logprobs[0]})
            offsets.append(self.place.add(piece.known[own]))
        return dict(zip(_KEYS, lists, strict=True))


def _places(piece: PromptLogprobs) -> Iterator[tuple[int, tuple[Sequence[int], Sequence[float]]]]:
    """Yield for each token its id, and (its id and the likeliest ones, their log-probabilities)."""
    width = 1 + piece.top
    for at in range(0, len(piece.ids), width):
        logprobs = [max(value, LEAST_LOGPROB) for value in piece.logprobs[at : at + width]]
        yield piece.ids[at], (piece.ids[at : at + width], logprobs)


def vllm_logprobs(piece: PromptLogprobs, top: int) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of vLLM's ``prompt_logprobs`` for some tokens. The rank of a token that is not among the
    likeliest is not known."""
    texts = {token: data.decode(errors="replace") for token, data in piece.known.items()}
    for own, (ids, logprobs) in _places(piece):
        entry = {str(own): {"logprob": logprobs[0], "rank": None, "decoded_token": texts[own]}}
        for rank in range(1, len(ids)):
            if rank <= top or ids[rank] == own:
                token = ids[rank]
                entry[str(token)] = {"logprob": logprobs[rank], "rank": rank, "decoded_token": texts[token]}
        yield entry


@dataclass(slots=True)
class WholePrompt:
    """The prompt in an answer that is not streamed.

    text      the text before the answer's own; empty unless it is sent back
    logprobs  by key the JSON of the lists' elements, in parts; empty unless the prompt is sent back with them
    vllm      the JSON of the elements of ``prompt_logprobs``, in parts; None if they were not asked for
    """

    text: str = ""
    logprobs: dict[str, list[bytes]] = field(default_factory=dict)
    vllm: list[bytes] | None = None

    def with_answer(self, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the ``logprobs`` of prompt and answer."""
        if not self.logprobs:
            return logprobs
        own = logprobs or dict.fromkeys(_KEYS, ())
        return {key: _joined([*self.logprobs[key], orjson.dumps(own[key])[1:-1]]) for key in _KEYS}

    @property
    def prompt_logprobs(self) -> dict[str, Any]:
        """The key ``prompt_logprobs``, if it was asked for."""
        return {} if self.vllm is None else {"prompt_logprobs": _joined(self.vllm)}


def _joined(parts: Sequence[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[%b]" % b",".join(part for part in parts if part))


async def whole_prompt(
    pieces: Sequence[PromptLogprobs], echoed: EchoedPrompt | None, vllm_top: int | None
) -> WholePrompt:
    """Return the prompt of an answer.

    echoed    the prompt if it is sent back
    vllm_top  the number of likeliest tokens in vLLM's ``prompt_logprobs``; None for none
    """
    whole = WholePrompt(echoed.text if echoed is not None else "", vllm=None if vllm_top is None else [b"null"])
    for piece in pieces:
        if echoed is not None and echoed.top is not None:
            for key, values in echoed.logprobs(piece).items():
                whole.logprobs.setdefault(key, []).append(orjson.dumps(values)[1:-1])
        if vllm_top is not None and whole.vllm is not None:
            entries = vllm_logprobs(piece, vllm_top)
            while some := list(islice(entries, _AT_ONCE)):
                whole.vllm.append(orjson.dumps(some)[1:-1])
                await asyncio.sleep(0)
        await asyncio.sleep(0)
    return whole
