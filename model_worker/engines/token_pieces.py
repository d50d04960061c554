"""The text of each token, for tokenizers that decode by joining texts. Read once, when a model is loaded.

Byte-level BPE (GPT-2, Llama 3, Qwen): a token is bytes, each written as one printable character. Sentencepiece (Llama
2, Mistral, Gemma): a token is text with "▁" for a space, or one byte of a character that has no token. To check the
table, the whole vocabulary is decoded both with the table and by the tokenizer, and the results are compared.
"""

import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import tokenizers

from model_worker.text import PieceDetokenizer, Pieces

_SPACE = "▁"
_CHECKED_TOGETHER = 64
"""The number of ids decoded in one call when the table is checked."""

_REPLACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
_BYTES, _FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class NoPieces(Exception):
    """The tokenizer's text is not the joined text of its tokens, or this cannot be known. The message says why."""


def read_pieces(tokenizer: tokenizers.Tokenizer, size: int) -> Pieces:
    """Return the table of ids below ``size``. Raises NoPieces."""
    steps = _steps(tokenizer.decoder)
    special = special_tokens(tokenizer)
    tokens: list[str | None] = [None if i in special else tokenizer.id_to_token(i) for i in range(size)]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        pieces = Pieces(_byte_level(tokens))
    elif steps in ([_REPLACE, _BYTES, _FUSE], [_REPLACE, _BYTES, _FUSE, _STRIP]):
        pieces = Pieces(_sentencepiece(tokens), byte_runs=True, strips_space=_STRIP in steps)
    else:
        raise NoPieces(f"the decoder is of another kind ({' + '.join(step['type'] for step in steps) or 'none'})")
    if not all(_agrees(tokenizer, pieces, ids, special) for ids in _samples(pieces)):
        raise NoPieces("its table does not give what the tokenizer decodes")
    return pieces


def special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    """Return the names of the tokens that add nothing to a text, by id."""
    return {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def decode_without(tokenizer: tokenizers.Tokenizer, skipped: Collection[int], ids: Iterable[int]) -> str:
    """Return the text of ids, without those in ``skipped``.

    The library would skip special tokens by their text. It does not find those that tokenizer.json calls normalized, as
    old files of Llama do: their text in the vocabulary is ``▁<s>``, so "<s>" would stand in answers.
    """
    text: str = tokenizer.decode([i for i in ids if i not in skipped], skip_special_tokens=False)
    return text


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a decoder in order, as in tokenizer.json."""
    if decoder is None:
        return []
    described: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    return steps


def _byte_level(tokens: Sequence[str | None]) -> list[str | bytes | None]:
    """Return the table of byte-level tokens. As in the library, a token with a character that is no byte is its own
    text."""
    alphabet = _byte_characters()
    allowed = frozenset(map(chr, alphabet))
    table: list[str | bytes | None] = []
    for token in tokens:
        if not token:
            table.append(None)
        elif not allowed.issuperset(token):
            table.append(token)
        else:
            data = token.translate(alphabet).encode("latin-1")
            try:
                table.append(data.decode())
            except UnicodeDecodeError:
                table.append(data)
    return table


def _byte_characters() -> dict[int, int]:
    """Return the byte of each of byte-level's printable characters (GPT-2's table), for str.translate."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


def _sentencepiece(tokens: Sequence[str | None]) -> list[str | bytes | None]:
    fallback = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return [None if token is None else fallback.get(token) or token.replace(_SPACE, " ") for token in tokens]


def _samples(pieces: Pieces) -> Iterator[list[int]]:
    """Yield sequences of ids that together hold the whole vocabulary, in random order, and characters written in bytes.

    A byte of a fallback stands alone between texts. In a run of such bytes a stream's text may differ from the text
    decoded at once, because a stream cannot take back text that it delivered before the run proved broken.
    """
    order = random.Random(0)
    ids = list(range(len(pieces.table)))
    order.shuffle(ids)
    texts = [i for i in ids if isinstance(pieces.table[i], str)] if pieces.byte_runs else ids
    between = [[i] for i in ids if not isinstance(pieces.table[i], str)] if pieces.byte_runs else []
    by_byte = {piece: i for i, piece in enumerate(pieces.table) if isinstance(piece, bytes)}
    if pieces.byte_runs and len(by_byte) == 256:
        between += [[by_byte[bytes([byte])] for byte in character.encode()] for character in "éさ🦊\n\ufffd"]
    for first in range(0, max(len(texts), _CHECKED_TOGETHER * len(between)), _CHECKED_TOGETHER):
        if chunk := texts[first : first + _CHECKED_TOGETHER] or texts[:2]:
            yield [chunk[0], *(between.pop() if between else ()), *chunk[1:]]


def _agrees(tokenizer: tokenizers.Tokenizer, pieces: Pieces, ids: list[int], special: Collection[int]) -> bool:
    if pieces.byte_runs or pieces.strips_space:
        stream = PieceDetokenizer(pieces)
        text = "".join(map(stream.push, ids)) + stream.flush()
    else:  # a stream gives the same, in four times the time
        parts = [pieces.table[i] or b"" for i in ids]
        text = b"".join(p.encode() if isinstance(p, str) else p for p in parts).decode(errors="replace")
    return text == decode_without(tokenizer, special, ids)
