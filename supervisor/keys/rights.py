"""The rights of a key. This module alone decides what a client may do. Pure.

A client over ipc belongs to the supervisor's own user (see ``supervisor.ports.zap``) and may do everything.
"""

from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import ErrorCode, WireError
from protocol.messages import Call, Cancel, Credit, Generate, Hello, Message, Ping, Pong


class Right(StrEnum):
    """A right of a key. No right includes another one. But a key that may give orders may also see their results."""

    INFER = "infer"
    """Send requests, and ask a model's tokenizer."""
    STATUS = "status"
    """See the supervisor, its models and its GPUs."""
    ADMIN = "admin"
    """Start and stop models, reload, shut down."""


EVERYTHING = frozenset(Right)
_ANY = EVERYTHING
_INFER = frozenset({Right.INFER})
_ADMIN = frozenset({Right.ADMIN})
_SEES = frozenset({Right.STATUS, Right.ADMIN})

_OF_VERB = {
    "models": _ANY,
    "status": _SEES,
    "requests": _ANY,
    "events": _SEES,
    "tokenize": _INFER,
    "detokenize": _INFER,
    "start": _ADMIN,
    "stop": _ADMIN,
    "restart": _ADMIN,
    "reload": _ADMIN,
    "shutdown": _ADMIN,
    "cancel_request": frozenset({Right.INFER, Right.ADMIN}),
}
"""Verb of CALL → the rights, one of which is enough. Any other verb needs admin.

For ``requests`` and ``cancel_request``, ``may_see`` and ``may_cancel`` decide about each request."""
_OF_KIND = {
    Hello.kind: _ANY,
    Ping.kind: _ANY,
    Pong.kind: _ANY,
    Generate.kind: _INFER,
    Cancel.kind: _INFER,
    Credit.kind: _INFER,
}
"""Kind of any other message → the rights, one of which is enough."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a connection.

    name               the name of its key; None for the supervisor's own user
    public_key         the public key in Z85; "" for the supervisor's own user
    max_in_flight      how many requests of all its connections may be unfinished; None: no limit
    tokens_per_minute  tokens of prompts and answers; None: no limit
    """

    name: str | None
    public_key: str = ""
    rights: frozenset[Right] = EVERYTHING
    max_in_flight: int | None = None
    tokens_per_minute: int | None = None


NOBODY = Identity(None, "", frozenset())
"""The owner of a connection that has not been admitted yet. NOBODY has no rights."""
OWNER = Identity(None)


def check_right(identity: Identity, message: Message) -> None:
    """Raise WireError (FORBIDDEN), which names the missing right, unless this identity may send this message."""
    if isinstance(message, Call):
        what, enough = f"verb {message.verb!r}", _OF_VERB.get(message.verb, _ADMIN)
    else:
        what, enough = message.kind.name, _OF_KIND.get(message.kind, _ADMIN)
    if identity.rights & enough:
        return
    needed = " or ".join(right for right in Right if right in enough)
    has = ", ".join(right for right in Right if right in identity.rights)
    text = f"{what} takes the right {needed}, and key {identity.name!r} has {has or 'none'}"
    raise WireError(ErrorCode.FORBIDDEN, f"{text}: ask for another key (`modelctl keys new NAME --rights ...`)")


def may_see(identity: Identity, owner: Identity) -> bool:
    """Return whether an identity may see a request of ``owner``: every one with status or admin, else only its own."""
    return bool(identity.rights & _SEES) or _is_same(identity, owner)


def may_cancel(identity: Identity, owner: Identity) -> bool:
    """Return whether an identity may cancel a request of ``owner``: every one with admin, else only its own."""
    return Right.ADMIN in identity.rights or _is_same(identity, owner)


def _is_same(identity: Identity, owner: Identity) -> bool:
    """Return whether both are one key. The entry of a key may have been changed since the request came."""
    return bool(identity.public_key) and identity.public_key == owner.public_key
