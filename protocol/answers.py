"""What a client holds of an answer while it comes, and what it hands out."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import WireError


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of an answer and the ids of its tokens. Either may be empty while the other is not."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    finish_reason  "stop", "length" or "cancelled" (protocol.messages.FinishReason)
    usage          {prompt_tokens, completion_tokens, ...}: counts of tokens
    timings        what the worker measured, in the unit that each name ends with
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: dict[str, Any]
    timings: dict[str, Any]


@dataclass(slots=True)
class StreamState:
    """One request, from GENERATE to the last thing its reader took.

    deltas    arrived, not yet taken
    owed      events taken since the last CREDIT
    ended     nothing more will arrive
    error     how it ended, if badly; cleared when it was raised, so that it is raised once
    """

    id: int
    next_seq: int = 0
    owed: int = 0
    arrivals: int = 0
    deltas: deque[Delta] = field(default_factory=deque)
    accepted: dict[str, Any] | None = None
    cancel_sent: bool = False
    abandoned: bool = False
    ended: bool = False
    error: WireError | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class CallState:
    """One CALL and its answer."""

    id: int
    ended: bool = False
    error: WireError | None = None
    result: dict[str, Any] = field(default_factory=dict)


Touched = StreamState | CallState
