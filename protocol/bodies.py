"""The maps that messages between clients and the supervisor carry: every key, with its type and its unit.

A class describes one map, and the text under a key is the only description of that key: docs/wire-protocol.md is
generated from both. ``Annotated[int, "ms"]`` states a unit. A class whose name is that of a message class and ends in
``Body`` describes the body of that message. ``APPEARS`` says where each error can appear.

Described elsewhere: what CALL takes and returns (``protocol.verbs``), the body of GENERATE (``protocol.request``) and
its route (docs/wire-protocol.md), and the maps between the supervisor and its workers (``protocol.messages``).
"""

from enum import StrEnum
from typing import Annotated, Any, Final, NotRequired, TypedDict

from protocol.errors import ErrorCode

Milliseconds = Annotated[int, "ms"]
MillisecondsFloat = Annotated[float, "ms"]
Seconds = Annotated[float, "s"]
Tokens = Annotated[int, "tokens"]
Bytes = Annotated[int, "bytes"]
Events = Annotated[int, "events"]


class HelloBody(TypedDict):
    """The supervisor ignores keys that it does not know."""

    library: NotRequired[str]
    """Name and version of the client, for people: `mylib/1.2`."""


class Model(TypedDict):
    """A model as clients see it. Of several workers, the one that is nearest to `ready` counts."""

    name: str
    """The name that GENERATE takes."""
    state: str
    """One of the states below."""
    context: Tokens | None
    """The longest prompt and answer together; null until a worker has loaded the model."""
    chat: bool | None
    """Whether the model has a chat template, so that requests may hold `messages`; null until a worker has loaded the
    model."""


class WelcomeBody(TypedDict):
    """What a client has to know of the supervisor."""

    server: str
    """Name and version of the supervisor, for people: `modelctl 0.1.0`."""
    session: str
    """A random text that the supervisor draws when it starts. It is the same for all its connections, so another value
    after a reconnect means another supervisor process."""
    window: Events
    """The credit with which each stream starts, and the most that one CREDIT grants."""
    max_frame: Bytes
    """The largest frame that the socket takes. libzmq ends the connection of a client that sends a larger one. The
    limits per kind are lower."""
    models: list[Model]
    """The models that are configured now, as the verb `models` returns them."""


class AcceptedBody(TypedDict):
    """Where the request waits."""

    model: str
    """The model's name."""
    queue_position: int
    """About how many requests will be started before this one; 0 is next."""


class ReportBody(TypedDict):
    """How far a request is. Ignore a `phase` that you do not know."""

    phase: str
    """`queued` (waits for a worker), `loading` (its model is being loaded), `compiling` (its constraint is being
    compiled) or `prefill` (its prompt is being computed)."""
    queue_position: NotRequired[int]
    """With `queued`: requests before this one; 0 is next."""
    part: NotRequired[str]
    """With `loading`: the part of the load as the engine names it, `loading` and `warmup`, say."""
    done: NotRequired[int]
    """With `loading` and `prefill`: how much is done. Tokens with `prefill`; a unit of the engine's own with
    `loading`."""
    total: NotRequired[int]
    """With `loading` and `prefill`: what `done` will be at the end of this part."""


class GoAwayBody(TypedDict):
    """Why the supervisor takes no new requests."""

    reason: str
    """For people."""


class Refused(TypedDict):
    """What could be read of a frame that was refused."""

    kind: NotRequired[int]
    """The second element of the frame. Missing if that is no kind of this version."""
    number: NotRequired[int]
    """The third element, where it is the number of a request or call. Missing otherwise."""


class Failure(TypedDict):
    """An error. It is the same map in ERROR, in REPLY and in the terminal event of a request."""

    code: int
    """The stable number, see the table of errors. Take a code that you do not know for `internal`."""
    name: str
    """The name that belongs to the code."""
    message: str
    """For people: what is wrong, and what to do. It holds no prompt, no answer and no key. Its wording may change."""
    retryable: bool
    """Whether the same request may succeed later."""
    field: NotRequired[str]
    """The key that is wrong: a key of the body, `route.` and a key of the route, or an element of the frame."""
    retry_after_ms: NotRequired[Milliseconds]
    """When a retry may help. Wait at least this long."""


class ErrorBody(Failure):
    """An error, and what it answers."""

    refused: NotRequired[Refused]
    """With request 0 only: which frame this is the answer to. Missing if the error is about the connection itself."""


class ReplyBody(TypedDict):
    """Exactly one of the two keys."""

    result: NotRequired[dict[str, Any]]
    """What the verb returns."""
    error: NotRequired[Failure]
    """Why the verb was refused."""


class Usage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: Tokens
    """Tokens of the prompt. 0 if the request ended before a worker had read it."""
    completion_tokens: Tokens
    """Tokens of the answer."""
    cached_tokens: NotRequired[Tokens]
    """Tokens of the prompt that the engine found computed. Missing if 0."""
    draft_accepted: NotRequired[Tokens]
    """Speculated tokens that were right. Both counts are missing if nothing was speculated."""
    draft_rejected: NotRequired[Tokens]
    """Speculated tokens that were wrong."""
    resumes: NotRequired[int]
    """How often the answer went on in another worker. Missing if 0."""


class Timings(TypedDict):
    """What was measured. Of an answer that went on in another worker, `prefill_ms`, `decode_ms` and `tokens_per_s` are
    those of the last worker. What was not measured is missing."""

    queue_ms: NotRequired[MillisecondsFloat]
    """From ACCEPTED to the first time that a worker was given the request."""
    prefill_ms: NotRequired[MillisecondsFloat]
    """From the start in the engine to the first token."""
    decode_ms: NotRequired[MillisecondsFloat]
    """From the first token to the end."""
    tokens_per_s: NotRequired[Annotated[float, "tokens/s"]]
    """While decoding, the first token not counted."""


class DeltaEvent(TypedDict):
    """The map of an event without a terminal flag."""

    text: str
    """New text, in whole characters. It may be empty while there are ids: text that may begin a stop string, or that is
    half a character, comes with a later event."""
    logprobs: NotRequired[list[list[Any]]]
    """If the request asked for `logprobs`: one entry `[logprob, bytes, top]` for each id of the event. `logprob`, a
    float, is the natural logarithm of the token's probability by the model alone, before penalties, bias and
    temperature. `bytes`, a bin, is what the token adds to the text: UTF-8, of which a character may be incomplete.
    `top`, an array, holds the likeliest tokens at this place, best first, each as `[id, logprob, bytes]`."""


class FinishedEvent(TypedDict):
    """The map of the event flagged FINISHED. The event may hold the last ids and the last text."""

    text: NotRequired[str]
    """The last text; append it."""
    logprobs: NotRequired[list[list[Any]]]
    """As in a delta."""
    finish_reason: str
    """Why the answer ended: see below."""
    usage: Usage
    """Counts of tokens."""
    timings: Timings
    """What was measured."""


class ErrorEvent(TypedDict):
    """The map of the event flagged ERROR."""

    error: Failure
    """Why the request ended."""
    delivered_tokens: NotRequired[Tokens]
    """Ids in all events of this request that were sent before."""


class Place(StrEnum):
    """Where an error can appear."""

    REQUEST = "ERROR of the request"
    """Instead of ACCEPTED: no request came to be."""
    FRAME = "ERROR of request 0, with `refused`"
    """The answer to a frame that is neither a CALL nor a GENERATE with a free number."""
    CONNECTION = "ERROR of request 0, without `refused`"
    """The connection is of no more use, and ends."""
    REPLY = "REPLY"
    """The answer to a CALL."""
    EVENT = "error event"
    """The end of a request that was accepted."""
    CLIENT = "never on the wire"
    """A client raises it by itself."""


APPEARS: Final[dict[ErrorCode, tuple[Place, ...]]] = {
    ErrorCode.BAD_FRAME: (Place.REQUEST, Place.FRAME, Place.REPLY),
    ErrorCode.BAD_VERSION: (Place.FRAME,),
    ErrorCode.INVALID_REQUEST: (Place.REQUEST, Place.FRAME, Place.REPLY, Place.EVENT),
    ErrorCode.UNSUPPORTED: (Place.REQUEST, Place.FRAME, Place.REPLY, Place.EVENT, Place.CONNECTION),
    ErrorCode.TOO_LARGE: (Place.REQUEST, Place.FRAME, Place.REPLY),
    ErrorCode.DUPLICATE_REQUEST: (Place.FRAME,),
    ErrorCode.CONTEXT_OVERFLOW: (Place.EVENT, Place.REPLY),
    ErrorCode.UNAUTHORIZED: (Place.EVENT, Place.CONNECTION, Place.CLIENT),
    ErrorCode.FORBIDDEN: (Place.REQUEST, Place.FRAME, Place.REPLY),
    ErrorCode.MODEL_NOT_FOUND: (Place.REQUEST, Place.REPLY),
    ErrorCode.MODEL_NOT_RUNNING: (Place.REQUEST, Place.REPLY, Place.EVENT),
    ErrorCode.MODEL_FAILED: (Place.REQUEST, Place.REPLY, Place.EVENT),
    ErrorCode.OVERLOADED: (Place.REQUEST, Place.REPLY),
    ErrorCode.RATE_LIMITED: (Place.REQUEST, Place.CONNECTION),
    ErrorCode.DRAINING: (Place.REQUEST, Place.REPLY, Place.EVENT),
    ErrorCode.DEADLINE_EXCEEDED: (Place.EVENT,),
    ErrorCode.QUEUE_TIMEOUT: (Place.EVENT,),
    ErrorCode.SLOW_CONSUMER: (Place.EVENT,),
    ErrorCode.WORKER_DIED: (Place.EVENT, Place.REPLY),
    ErrorCode.POISONED: (Place.REQUEST, Place.EVENT),
    ErrorCode.HELPER_FAILED: (Place.EVENT, Place.REPLY),
    ErrorCode.INTERNAL: (Place.EVENT, Place.REPLY, Place.CLIENT),
    ErrorCode.CONNECTION_LOST: (Place.CLIENT,),
}
"""The places in which each error can appear."""
