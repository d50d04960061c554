"""Translate a constraint (a field of the request and its text) to llguidance's grammar, and its errors to sentences.

The worker uses this module, and so does the child that tries a grammar first (constraint_child).
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import llguidance

from protocol.answer_formats.grammar import grammar as calls_grammar
from protocol.answer_formats.rules import NotOffered
from protocol.answer_formats.schemas import changed, without_annotations
from protocol.errors import ErrorCode, RequestError

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=40_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=100_000,
    max_grammar_size=300_000,
    verbose_errors=False,
)
"""The library's own limits of one compilation, of one mask, and of an answer's memory (60 MB). Among masks that were
made to be slow, the slowest took 11 ms with a vocabulary of 128,000. A string with a maxLength takes 2 or 3 states for
each of its characters, so one of 40,000 characters ends the answer with an error."""

WHITESPACE_OPTION = "whitespace_flexible"
"""The library's name for white space between the parts of JSON, beside a schema as {"x-guidance": {NAME: true}}."""
_COMPACT = {WHITESPACE_OPTION: False}
"""JSON without white space between its parts. Small models that may write blanks write them until max_tokens is
reached."""
_FLEXIBLE = {"whitespace_pattern": r"(\r?\n)?[ \t]{0,40}"}
"""White space as pretty printers write it. The library's own default allows it without end."""

_PREFIX = '%llguidance { "no_forcing": true }\nstart: '
"""Text that must come next is drawn like any other, so the model chooses the tokens that spell it."""

_NOT_OFFERED = (
    (re.compile(r"Unimplemented keys: \[(.*?)\]"), "{} is not offered"),
    (re.compile(r"Unknown format: (\S+)"), 'format "{}" is not offered'),
    (re.compile(r"(oneOf) constraints are not supported"), "{} is offered only where no two of its schemas can match"),
    (re.compile(r"(look)-?around"), "{}-around (word boundaries and inner anchors are some) is not offered"),
    (re.compile(r"(backreferences) are not supported"), "{} are not offered"),
    (re.compile(r"(patternProperty) regexes"), "{} is offered only where no two patterns can match"),
    (re.compile(r"Resource '[^']*' is not (present)"), "a $ref to another document is not offered"),
)
_WHERE = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
TOO_COSTLY = re.compile(r"fuel|too large|too many|max is|limit|Unable to determine|panic|expensive", re.IGNORECASE)
_MATCHES_NOTHING = re.compile(r"Unsatisfiable|NoExtension|regex is empty", re.IGNORECASE)


class Vocabulary:
    """The vocabulary as llguidance needs it: the bytes of each token, and one more token behind them that ends every
    answer.

    With that token, one bit of the mask says whether the answer may end, whichever end tokens the model and the request
    have.

    pieces    bytes that each id adds to a text; b"" for an id that adds none
    textless  ids that have no text, whatever ``pieces`` says (those that end an answer)
    """

    def __init__(self, pieces: Sequence[bytes], textless: Collection[int] = ()) -> None:
        none = [i for i, piece in enumerate(pieces) if not piece or i in textless]
        self.tokens = list(pieces)
        for i in none:
            self.tokens[i] = b"<none %d>" % i
        self.tokens.append(b"<end>")
        self.eos_token_id = len(pieces)
        self.bos_token_id = None
        self.special_token_ids = [*none, self.eos_token_id]
        self.is_tokenizer_wrapper = True

    def __call__(self, text: bytes | str) -> list[int]:
        """Return no tokens: the library would use them to force text, which ``_PREFIX`` forbids."""
        return []

    def tokenizer(self) -> llguidance.LLTokenizer:
        """Return the library's tokenizer. This takes 80 ms for 32,000 tokens, 300 ms for 128,000."""
        wrapper: Any = self
        return llguidance.LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=[self.eos_token_id])


def grammar(kind: str, text: str) -> str:
    """Return the grammar of a GenerateRequest.constraint. Raises RequestError for text that the library would
    misread."""
    if kind != "tools":
        return _PREFIX + _expression(kind, text)
    given = json.loads(text)
    shape = given.get("text")
    try:
        return calls_grammar(
            given["format"],
            given["tools"],
            required=given["required"],
            parallel=given["parallel"],
            text=None if shape is None else _expression(*shape),
        )
    except NotOffered as e:
        raise RequestError(str(e), field=kind, code=ErrorCode.UNSUPPORTED) from None


def _expression(kind: str, text: str) -> str:
    """Return the expression of a whole answer in the library's language: of JSON, or a regular expression."""
    if kind == "json_schema":
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise RequestError("json_schema: must be a map", field=kind)
        given = schema.get("x-guidance", {})
        if not isinstance(given, dict) or not all(
            key == WHITESPACE_OPTION and type(given[key]) is bool for key in given
        ):
            raise RequestError(
                f"json_schema: x-guidance is not offered, except for {WHITESPACE_OPTION}, which is true or false",
                field=kind,
                code=ErrorCode.UNSUPPORTED,
            )
        white_space = _FLEXIBLE if given.get(WHITESPACE_OPTION) else _COMPACT
        schema = changed(schema, without_annotations)
        schema["x-guidance"] = {**white_space, "lenient": False, "coerce_one_of": False}
        return f"%json {json.dumps(schema, ensure_ascii=False)}"
    if kind == "choice":
        text = "|".join("".join(map(_literal, choice)) for choice in json.loads(text))
    elif (len(text) - len(text.rstrip("\\"))) % 2:  # the library would lose such a backslash
        raise RequestError("regex: incomplete escape sequence: it ends with a backslash", field=kind)
    elif "\n" in text and re.search(r"\(\?[a-zA-Z]*x", text):
        # The end of a line would become an escape in the grammar, and an escape ends no comment.
        raise RequestError("regex: (?x) over several lines is not offered", field=kind, code=ErrorCode.UNSUPPORTED)
    return f"/{llguidance.regex_to_lark(text, 'd')}/"


def _literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"


def shape_of(text: str) -> tuple[str, str] | None:
    """Return the constraint of an answer without calls, of a constraint of calls; None if it may be any text."""
    shape = json.loads(text).get("text")
    return None if shape is None else (shape[0], shape[1])


def tools_alone(text: str) -> Iterator[tuple[str, str]]:
    """Return (name, constraint of calls of this tool only) for each tool of a constraint of calls."""
    given = json.loads(text)
    given.pop("text", None)
    for tool in given["tools"]:
        yield tool["name"], json.dumps({**given, "tools": [tool]}, ensure_ascii=False)


def may_be_loose(text: str) -> frozenset[str]:
    """Return the names of the tools of a constraint of calls whose schemas need not be enforced."""
    given = json.loads(text)
    return frozenset(tool["name"] for tool in given["tools"] if not (given["required"] or tool["strict"]))


def loosened(text: str, names: Collection[str]) -> str:
    """Return a constraint of calls in which the arguments of these tools are any JSON object."""
    if not names:
        return text
    given = json.loads(text)
    for tool in given["tools"]:
        if tool["name"] in names:
            tool["parameters"] = {"type": "object", "additionalProperties": True}
    return json.dumps(given, ensure_ascii=False)


def refusal(kind: str, message: str, tool: str | None = None) -> RequestError:
    """Return the client's error for a message of the library, which may quote the constraint over pages.

    tool  name of the tool whose schema cannot be compiled
    """
    error = _refusal(kind, message)
    if tool is not None:
        error = RequestError(
            f"{kind}: {tool[:64]}: {error.message.removeprefix(f'{kind}: ')}", field=kind, code=error.code
        )
    return error


def _refusal(kind: str, message: str) -> RequestError:
    for pattern, sentence in _NOT_OFFERED:
        if match := pattern.search(message):
            names = match[1].replace('"', "")[:100]
            return RequestError(f"{kind}: {sentence.format(names)}", field=kind, code=ErrorCode.UNSUPPORTED)
    if _MATCHES_NOTHING.search(message):
        return RequestError(f"{kind}: nothing can match it", field=kind)
    if match := re.search(r"^error: (.*)$", message, re.MULTILINE):  # the regex crate's reason, behind its quotes
        return RequestError(f"{kind}: {match[1][:100]}", field=kind)
    if TOO_COSTLY.search(message):
        return RequestError(f"{kind}: too large, or too costly, to be compiled", field=kind)
    reason = _WHERE.sub("", message.partition("\n")[0])
    reason = re.split(r", got | /|\"", reason)[0]
    return RequestError(f"{kind}: {reason[:100] or 'it cannot be compiled'}", field=kind)
