"""The parts of an answer that a program gets, and the client's state of a request and of a call."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from protocol.errors import ErrorCode, FrameError, WireError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer with its log-probability.

    token_id  the id of the token
    logprob   natural logarithm of its probability by the model alone, before any sampling parameter
    bytes     the bytes that it adds to the text: UTF-8, of which the last character may be incomplete
    top       the likeliest tokens at this place, best first, if the request asked for top_logprobs
    """

    token_id: int
    logprob: float
    bytes: bytes
    top: tuple["TokenLogprob", ...] = ()

    @property
    def text(self) -> str:
        """The bytes as text. An incomplete character is U+FFFD."""
        return self.bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some neighbouring tokens of a prompt. They stay packed as they came, since a prompt may have
    a million of them: ``tokens`` unpacks them.

    first     the number of the first token in the prompt, counted from 0
    top       the number of likeliest tokens at each place
    before    the token before the first one, and the bytes that it adds to the text
    ids       for each token its id, then those of the ``top`` likeliest tokens at its place, best first
    logprobs  the log-probabilities of ``ids``
    known     the bytes that each id adds to the text
    """

    first: int
    top: int
    before: tuple[int, bytes]
    ids: Sequence[int]
    logprobs: Sequence[float]
    known: Mapping[int, bytes]

    def __len__(self) -> int:
        return len(self.ids) // (1 + self.top)

    def tokens(self) -> tuple[TokenLogprob, ...]:
        """Return the tokens with their log-probabilities."""
        width, known = 1 + self.top, self.known
        entries = [
            TokenLogprob(token_id, logprob, known[token_id])
            for token_id, logprob in zip(self.ids, self.logprobs, strict=True)
        ]
        return tuple(
            TokenLogprob(own.token_id, own.logprob, own.bytes, tuple(entries[at + 1 : at + width]))
            for at in range(0, len(entries), width)
            for own in (entries[at],)
        )


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of some neighbouring texts of a request, packed as they came.

    first  the number of the first text, counted from 0
    size   the numbers of each vector; 1 for scores of documents
    data   floats of 32 bits, little endian
    maker  a mark of what has made them
    """

    first: int
    size: int
    data: bytes
    maker: bytes = b""


@dataclass(frozen=True, slots=True)
class Delta:
    """A new piece of an answer. Text and token ids may arrive apart: either may be empty.

    text       the new text
    token_ids  the ids of the new tokens
    logprobs   one for each token id, if the request asked for them
    prompt     log-probabilities of the prompt's next tokens, if the request asked for prompt_logprobs. Such a delta
               has no text and no token ids, and comes before the answer
    vectors    the next vectors or scores, for a request of ``embed`` or ``rerank``
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt: PromptLogprobs | None = None
    vectors: Vectors | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a request that has no token yet.

    phase           "loading" (the model), "queued", "compiling" (the constraint of the request) or "prefill"
    queue_position  number of requests before it in the queue, 0 is next; None unless queued
    done, total     prefill: tokens of the prompt that are computed, and all its tokens. loading: the progress of the
                    part, in a unit that the engine chooses. None while queued and compiling
    part            part of the load: "loading", "warmup", or another name that the engine gives; before that,
                    "copying model", while another machine copies its directories. None unless loading
    unit            loading: the unit of done and total, such as "bytes"; None if it is not known
    per_s           loading: bytes in a second while directories are copied; None at other times
    waits_for       queued: the busy models that are in the way of the model, such as "llama to finish 2 requests"; None
                    if none is
    """

    phase: str
    queue_position: int | None = None
    done: int | None = None
    total: int | None = None
    part: str | None = None
    unit: str | None = None
    per_s: int | None = None
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    text           the text
    token_ids      the ids of all tokens
    finish_reason  "stop" (an end token or a stop string), "length" (max_tokens or the context), "loop" (it
                   repeats itself), "cancelled", or "banned_strings" (no way around them was found)
    usage          counts: ``prompt_tokens`` and ``completion_tokens``; where they apply, ``cached_tokens`` (tokens of
                   the prompt that were in the cache), ``draft_accepted`` and ``draft_rejected`` (speculated tokens),
                   and ``resumes`` (the number of times that the answer was resumed in another worker)
    timings        ``queue_ms`` (from acceptance to the start), ``prefill_ms`` (to the first token), ``decode_ms`` (to
                   the end) and ``tokens_per_s`` (while decoding). Times that were not measured are missing
    logprobs       one for each token id, if the request asked for them
    stop_string    the stop string that ended the answer; None if none has
    prompt         log-probabilities of the prompt's tokens, as they came: ``prompt_logprobs`` unpacks them
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: dict[str, Any]
    timings: dict[str, Any]
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_string: str | None = None
    prompt: tuple[PromptLogprobs, ...] = ()

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the prompt's tokens, as ``Stream.prompt_logprobs``."""
        return tuple(token for piece in self.prompt for token in piece.tokens())


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of texts, or the scores of documents, in the order of the request. Its length is their number.

    size   the numbers of each vector; 1 for scores
    data   all numbers: floats of 32 bits, little endian. ``numpy.frombuffer(data, "<f4").reshape(-1, size)`` is the
           matrix
    usage  ``prompt_tokens``, and where they apply other counts, as ``Completion.usage``
    """

    size: int
    data: bytes
    usage: dict[str, Any]

    def __len__(self) -> int:
        return len(self.data) // (4 * self.size)

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        """The vectors as numbers. They are unpacked at each call."""
        return list(Struct(f"<{self.size}f").iter_unpack(self.data))

    @property
    def scores(self) -> tuple[float, ...]:
        """All numbers in a row: for ``rerank``, the score of each document."""
        return Struct(f"<{len(self.data) // 4}f").unpack(self.data)

    @classmethod
    def of(cls, pieces: Sequence[Vectors], usage: dict[str, Any]) -> "Embeddings":
        """Return the vectors of all events of a request.

        Raises WORKER_DIED if they do not belong together: another worker went on with another model, after a reload.
        """
        if len({(piece.size, piece.maker) for piece in pieces}) > 1:
            message = "the worker ended, and another one went on with a model that was changed: send the request again"
            raise WireError(ErrorCode.WORKER_DIED, message)
        found = cls(pieces[0].size if pieces else 1, b"".join(piece.data for piece in pieces), usage)
        if pieces and (pieces[0].first or pieces[-1].first != len(found) - len(pieces[-1].data) // (4 * found.size)):
            raise WireError(ErrorCode.INTERNAL, "the supervisor broke the protocol: vectors are missing")
        return found


@dataclass(slots=True)
class StreamState:
    """The state of one request, from GENERATE until its reader has taken the last delta.

    deltas    deltas that have arrived and were not taken yet
    report    the newest report, if it was not taken yet
    owed      number of events taken since the last CREDIT
    ended     True if nothing more will arrive
    error     the error that ended the request; set to None when it is raised, so that it is raised once
    """

    id: int
    next_seq: int = 0
    owed: int = 0
    arrivals: int = 0
    deltas: deque[Delta] = field(default_factory=deque)
    accepted: dict[str, Any] | None = None
    report: Progress | None = None
    cancel_sent: bool = False
    abandoned: bool = False
    ended: bool = False
    error: WireError | None = None
    finish_reason: str | None = None
    stop_string: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: list[PromptLogprobs] = field(default_factory=list)
    vectors: list[Vectors] = field(default_factory=list)
    format: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    left_out: tuple[str, ...] = ()
    forced: dict[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class CallState:
    """The state of one CALL, and its reply."""

    id: int
    ended: bool = False
    error: WireError | None = None
    result: dict[str, Any] = field(default_factory=dict)


Touched = StreamState | CallState


def read_logprobs(token_ids: tuple[int, ...], entries: Any) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of an event from the wire. Raises FrameError if they have another shape."""
    try:
        if len(entries) != len(token_ids):
            raise ValueError
        return tuple(
            TokenLogprob(*_checked(token_id, logprob, data), tuple(TokenLogprob(*_checked(*other)) for other in top))
            for token_id, (logprob, data, top) in zip(token_ids, entries, strict=True)
        )
    except (TypeError, ValueError):
        raise FrameError(ErrorCode.BAD_FRAME, "its logprobs have the wrong shape") from None


def read_prompt_logprobs(given: Any) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens from the wire. Raises FrameError for another shape."""
    try:
        first, top, before = given["first"], given["top"], given["before"]
        (ids, logprobs, known), spelled = (_checked_bin(given[n]) for n in ("ids", "logprobs", "known")), given["bytes"]
        if not (type(first) is type(top) is type(before) is int and first > 0 <= top and type(spelled) is list):
            raise ValueError
        if any(type(each) is not bytes for each in spelled):
            raise ValueError
        names = dict(zip(known.cast("I"), spelled, strict=True))
        piece = PromptLogprobs(first, top, (before, names[before]), ids.cast("I"), logprobs.cast("f"), names)
        if len(piece.ids) != len(piece.logprobs) or len(piece.ids) % (1 + top) or not names.keys() >= set(piece.ids):
            raise ValueError
        return piece
    except (TypeError, ValueError, LookupError):
        raise FrameError(ErrorCode.BAD_FRAME, "its prompt_logprobs have the wrong shape") from None


def read_vectors(given: Any) -> Vectors:
    """Return the ``vectors`` of an event. Raises FrameError if they have another shape."""
    names = ("first", "size", "data", "maker")
    values: list[Any] = [given.get(name) for name in names] if type(given) is dict else [None] * 4
    first, size, data, maker = values
    numbers = type(first) is type(size) is int and first >= 0 < size
    if not (numbers and type(data) is type(maker) is bytes and len(data) % (4 * size) == 0):
        raise FrameError(ErrorCode.BAD_FRAME, "its vectors have the wrong shape")
    return Vectors(first, size, data, maker)


def _checked_bin(data: Any) -> memoryview:
    if type(data) is not bytes:
        raise ValueError
    return memoryview(data)  # a cast refuses a length that is no multiple of four


def read_format(given: Any) -> dict[str, Any]:
    """Return the ``format`` of an answer. Raises FrameError if it has another shape."""
    markers = given.get("reasoning") if type(given) is dict else None
    known = markers is None or (type(markers) is list and len(markers) == 2 and all(type(m) is str for m in markers))
    if type(given) is not dict or not known or type(given.get("tools")) not in (str, type(None)):
        raise FrameError(ErrorCode.BAD_FRAME, "its format has the wrong shape")
    return given


def _checked(token_id: Any, logprob: Any, data: Any) -> tuple[int, float, bytes]:
    if type(token_id) is not int or type(logprob) is not float or type(data) is not bytes:
        raise ValueError
    return token_id, logprob, data


_REPORTS: dict[str, dict[str, type]] = {
    "loading": {"part": str, "done": int, "total": int},
    "queued": {"queue_position": int},
    "compiling": {},
    "prefill": {"done": int, "total": int},
}
_MAY_REPORT: dict[str, type] = {"unit": str, "per_s": int, "waits_for": str}
"""Keys of REPORT that may be missing."""


def read_report(fields: dict[str, Any]) -> Progress | None:
    """Return the content of a REPORT. None if its phase is unknown here, or if a value has the wrong type."""
    expected = _REPORTS.get(str(fields.get("phase")))
    if expected is None or any(type(fields.get(name)) is not kind for name, kind in expected.items()):
        return None
    more = {name for name, kind in _MAY_REPORT.items() if type(fields.get(name)) is kind}
    return Progress(str(fields["phase"]), **{name: fields[name] for name in expected.keys() | more})


def token_ids_in(result: dict[str, Any]) -> tuple[int, ...]:
    """Return the token ids in the reply to ``tokenize``. Raises INTERNAL for a reply of another shape."""
    packed = result.get("token_ids")
    if type(packed) is not bytes or len(packed) % 4:
        raise WireError(ErrorCode.INTERNAL, "the reply to tokenize holds no token ids")
    return Struct(f"<{len(packed) // 4}I").unpack(packed)


def text_in(result: dict[str, Any]) -> str:
    """Return the text in the reply to ``detokenize``. Raises INTERNAL for a reply of another shape."""
    text = result.get("text")
    if type(text) is not str:
        raise WireError(ErrorCode.INTERNAL, "the reply to detokenize holds no text")
    return text
