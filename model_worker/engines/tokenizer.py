"""The model's own tokenizer.json and chat template, for every engine.

tokenizer.json is read as it is. The transformers library would rebuild some tokenizers from their vocabulary, and would
then count other tokens than the engine computes. This module does not import torch.
"""

import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from model_worker.engine import PLAIN, ChatTemplate, Layout, LoadError
from model_worker.engines.model_dir import MOST_IDS, ModelDir, find_template
from model_worker.engines.vetting import TEMPLATE_BYTES, is_panic
from model_worker.template_child import environment
from model_worker.text import ContentStops, Decode, PieceDetokenizer, Pieces, TextStream
from protocol.errors import RequestError

# The text of each token, for tokenizers that decode by joining texts. Read once, when a model is loaded.
#
# Byte-level BPE (GPT-2, Llama 3, Qwen): a token is bytes, each written as one printable character. Sentencepiece
# (Llama 2, Mistral, Gemma): a token is text with "▁" for a space, or one byte of a character that has no token. To
# check the table, the whole vocabulary is decoded both with the table and by the tokenizer, and the results are
# compared.


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


# Limit how much longer a tokenizer makes a text: a few bytes of tokenizer.json can ask for terabytes.


MOST_GROWTH = 64
"""The largest growth factor of all steps together. Real tokenizers write a space as a character of three bytes, or a
quotation mark as two characters."""
MOST_ADDED = 1024
"""The most characters that a tokenizer may put before a text or a word."""


def check_growth(tokenizer: tokenizers.Tokenizer, file: Path) -> None:
    """Raise LoadError for a tokenizer whose steps would make a text, or an answer, much longer than it is."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        step: Any = getattr(tokenizer, part)
        steps = list(_nested_steps(json.loads(step.__getstate__()))) if step is not None else []
        growth = math.prod(map(_growth, steps))
        added = max((len(str(s.get(key) or "")) for s in steps for key in ("prepend", "replacement")), default=0)
        if growth > MOST_GROWTH or added > MOST_ADDED:
            what = f"{growth:.3g} times as long" if growth > MOST_GROWTH else f"longer by {added} characters"
            raise LoadError(f"{file}: its {part} makes a text {what}, which no model's does: it is not to be trusted")


def _nested_steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yield each step of a sequence, including the steps of nested sequences."""
    if isinstance(step, dict):
        inner = [each for key in ("normalizers", "pretokenizers", "decoders") for each in step.get(key) or ()]
        if not inner:
            yield step
        for each in inner:
            yield from _nested_steps(each)


def _growth(step: dict[str, Any]) -> float:
    """Return the growth factor of a Replace step. Its regular expression may match a single character, or none."""
    if step.get("type") != "Replace":
        return 1.0
    replaced = (step.get("pattern") or {}).get("String")
    return max(1.0, len(step.get("content") or "") / max(1, len(replaced or "")))


def read_library(directory: ModelDir) -> tokenizers.Tokenizer:
    """Return the library's own tokenizer of a directory. Raises LoadError for a tokenizer.json that cannot be read."""
    try:
        return tokenizers.Tokenizer.from_buffer(directory.read("tokenizer.json"))
    except LoadError:
        raise
    except Exception as e:  # the library raises bare Exception
        raise LoadError(f"{directory.tokenizer_path} cannot be read: {e}") from None


def guarded(encode: Callable[[], Any], place: str, field: str) -> Any:
    """Return what the tokenizers library makes of a text. Raises RequestError for a text on which it fails.

    place  where the text stands, for people: the field, or ``texts[3]``
    """
    try:
        return encode()
    except (TypeError, UnicodeEncodeError):  # a lone surrogate is a str, but no text
        raise RequestError(f"{place} is not valid Unicode text", field=field) from None
    except BaseException as e:
        # The library raises bare Exception, and panics where a pattern takes too long. Its message may quote the text.
        if type(e) is not Exception and not is_panic(e):
            raise
        message = f"{place}: the model's tokenizer fails on this text ({type(e).__name__})"
        raise RequestError(message, field=field) from None


class Tokenizer:
    """Converts text to ids and back. Raises LoadError for a tokenizer.json or a chat template that cannot be read.

    vocab_size     one more than the highest id that has a text; models may have more rows, for alignment
    eos_ids        every id that ends an answer
    chat_template  the model's chat template, None if it has none
    """

    def __init__(self, directory: ModelDir) -> None:
        self._tokenizer = read_library(directory)
        check_growth(self._tokenizer, directory.tokenizer_path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size > MOST_IDS:
            raise LoadError(
                f"{directory.tokenizer_path} has a token with the id {self.vocab_size - 1}: ids end at {MOST_IDS - 1}"
            )
        config = directory.tokenizer_config
        self._add_bos = config.get("add_bos_token")
        self._special = directory.special_tokens
        self._bos_id = self.token_id(self._special.get("bos_token", ""))
        self.eos_ids = directory.eos_ids(self.token_id)
        self._special_names = special_tokens(self._tokenizer)
        self._sources: dict[frozenset[int], Pieces | Decode] = {}
        """How ids become text, by the special tokens that are part of it."""
        self.chat_template = _chat_template(directory, self._special)

    @cached_property
    def pieces(self) -> Pieces | None:
        """Return the bytes that each token id adds to a text; None for a tokenizer whose tokens do not add fixed bytes.

        The bytes are read at the first use, because that takes a second for a large vocabulary. Engines use them while
        they load. A check of the directory does not need them.
        """
        try:
            return read_pieces(self._tokenizer, self.vocab_size)
        except NoPieces as e:
            print(f"text: ids are decoded in a window at every token: {e}", flush=True)
            return None

    @property
    def library(self) -> tokenizers.Tokenizer:
        """Return the library's own object, for what reads the same vocabulary."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text, or None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with BOS if the tokenizer's configuration asks for it.

        Raises RequestError (field "prompt") for text that is not valid Unicode.
        """
        ids = self._encode(text, "prompt", special=self._add_bos is not False)
        if self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation. No BOS is added, because the chat template writes it itself.

        The name of a special token becomes that token, even if the name comes from a message. Raises RequestError
        (field "messages").
        """
        return self._encode(text, "messages", special=False)

    def _encode(self, text: str, field: str, *, special: bool) -> list[int]:
        encoded = guarded(lambda: self._tokenizer.encode(text, add_special_tokens=special), field, field)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens; incomplete UTF-8 becomes U+FFFD. Unknown ids have no text."""
        return decode_without(self._tokenizer, self._special_names, token_ids)

    def decode_given(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids. Raises RequestError (field "token_ids") for ids beyond the vocabulary."""
        if token_ids and (most := max(token_ids)) >= self.vocab_size:
            raise RequestError(f"token id {most} is not in the vocabulary of {self.vocab_size}", field="token_ids")
        return self.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text (perhaps an incomplete character); for a special token its
        name."""
        piece = self.pieces.table[token_id] if self.pieces and 0 <= token_id < len(self.pieces.table) else None
        if piece is None:
            piece = self._special_names.get(token_id) or self._tokenizer.id_to_token(token_id) or ""
        return piece if isinstance(piece, bytes) else piece.encode(errors="surrogatepass")

    def stream(self, context: Sequence[int], stops: Iterable[str] = (), layout: Layout = PLAIN) -> TextStream:
        """Return a stream for the text of an answer behind the ids ``context``, up to the first of the stop strings."""
        matcher = None
        if layout.stops and (layout.reasoning or layout.calls):
            matcher = ContentStops(layout.reasoning, layout.place == "inside", layout.calls, layout.opening)
        return TextStream(self._source(layout.visible), context, stops, matcher)

    def _source(self, visible: frozenset[str]) -> Pieces | Decode:
        """Return how ids become text if these markers are part of it. Special tokens with other names have no text."""
        shown = self.special_ids(visible)
        if not shown:
            return self.pieces or self.decode
        key = frozenset(shown)
        if key not in self._sources:
            self._sources[key] = self._showing(shown)
        return self._sources[key]

    def _showing(self, shown: dict[int, str]) -> Pieces | Decode:
        if self.pieces is not None:
            table = list(self.pieces.table)
            for token, text in shown.items():
                table[token] = text
            return replace(self.pieces, table=table)
        hidden = self._special_names.keys() - shown.keys()

        def decode(token_ids: Sequence[int]) -> str:
            return decode_without(self._tokenizer, hidden, token_ids)

        return decode

    def special_ids(self, texts: Collection[str]) -> dict[int, str]:
        """Return the special tokens with these names, by id. Such a token adds nothing to a text unless it is asked
        for."""
        named = {text: self.token_id(text) for text in texts}
        return {token: text for text, token in named.items() if token is not None and token in self._special_names}


def _chat_template(directory: ModelDir, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """Return the chat template, or None. Raises LoadError for one that cannot be parsed."""
    found = find_template(directory)
    if found is None:
        return None
    key = None if directory.chat_template is None else "chat_template"
    place = f"of {directory.path}" if key is None else found.file
    try:
        for text in (found.source, found.tool_source or ""):
            if len(text) > TEMPLATE_BYTES:
                raise ValueError(f"it has {len(text)} characters, at most {TEMPLATE_BYTES} are read")
            environment().parse(text)  # parse only: compiling a template may compute its constant expressions
    except RecursionError:
        raise LoadError(f"the chat template {place} cannot be read: it is nested too deeply", key=key) from None
    except (jinja2.TemplateError, ValueError) as e:  # ValueError: also for a number with very many digits
        raise LoadError(f"the chat template {place} cannot be read: {str(e)[:300]}", key=key) from None
    return ChatTemplate(found.source, special_tokens, found.tool_source)


# The text of each token of a model, in which markers are looked for.


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
