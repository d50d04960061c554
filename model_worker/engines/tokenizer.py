"""The model's own tokenizer.json and chat template, for every engine.

tokenizer.json is read as it is. The transformers library would rebuild some tokenizers from their vocabulary, and would
then count other tokens than the engine computes. This module does not import torch.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import jinja2
import tokenizers

from model_worker.engine import PLAIN, ChatTemplate, Layout, LoadError
from model_worker.engines.model_dir import MOST_IDS, ModelDir
from model_worker.engines.template_files import find_template
from model_worker.engines.token_pieces import NoPieces, decode_without, read_pieces, special_tokens
from model_worker.engines.tokenizer_growth import check_growth
from model_worker.engines.vetting import TEMPLATE_BYTES, is_panic
from model_worker.stop_strings import ContentStops
from model_worker.template_child import environment
from model_worker.text import Decode, Pieces, TextStream
from protocol.errors import RequestError


class Tokenizer:
    """Converts text to ids and back. Raises LoadError for a tokenizer.json or a chat template that cannot be read.

    vocab_size     one more than the highest id that has a text; models may have more rows, for alignment
    eos_ids        every id that ends an answer
    chat_template  the model's chat template, None if it has none
    """

    def __init__(self, directory: ModelDir) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(directory.read("tokenizer.json"))
        except LoadError:
            raise
        except Exception as e:  # the library raises bare Exception
            raise LoadError(f"{directory.tokenizer_path} cannot be read: {e}") from None
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
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeEncodeError):  # a lone surrogate is a str, but no text
            raise RequestError(f"{field} is not valid Unicode text", field=field) from None
        except BaseException as e:
            # The library raises bare Exception, and panics where a pattern takes too long. Its message may quote the
            # text.
            if type(e) is not Exception and not is_panic(e):
                raise
            message = f"the model's tokenizer fails on this text ({type(e).__name__})"
            raise RequestError(f"{field}: {message}", field=field) from None
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
