"""Decide what a client may do. ``protocol.verbs`` has the rights that each verb takes. Pure.

A client over ipc belongs to the supervisor's own user (see ``supervisor.ports.zap``) and may do everything.

A connection may send a request or a call for an HTTP key (``on_behalf_of``), if the connection has the right
``gateway``. Then the HTTP key's rights, models and limits apply, and not those of the connection.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Generic, Protocol, TypeVar

from protocol.errors import ErrorCode, RequestError, WireError
from protocol.limits import GATEWAY_NAME, SUPERVISOR_NAME
from protocol.messages import ASKING, Call, Cancel, Credit, Hello, Message, Ping, Pong
from protocol.verbs import ADMIN, ANY, INFER, SEES_ALL, VERBS, ModelScope, Right

TOKEN_ID: Final = re.compile(r"[0-9a-f]{64}")
"""The form of the id of an HTTP key: SHA-256 of its token, in hex. A public key in Z85 never has this form."""
_TOKEN_ID_LENGTH: Final = 64
"""A public key in Z85 has 40 characters."""
TOKEN_ID_RULE: Final = "the id of an HTTP key: the SHA-256 of its token, as 64 digits of lower-case hex"
_STREAMS = frozenset({Right.INFER, Right.GATEWAY})
"""Rights to steer requests. A connection can name its own requests only, and a gateway's may be those of other keys."""
_OF_KIND = {
    Hello.kind: ANY,
    Ping.kind: ANY,
    Pong.kind: ANY,
    **dict.fromkeys(ASKING, INFER),
    Cancel.kind: _STREAMS,
    Credit.kind: _STREAMS,
}
"""Kind of any other message → the rights, one of which is enough."""
Nearest = Callable[[str, Callable[[str], bool]], str | None]


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a connection, or the key for which a connection asks.

    name               the name of its key; None for the supervisor's own user
    key_id             the public key in Z85, or the SHA-256 of an HTTP key's token; "" for the supervisor's own user
    max_in_flight      how many requests of all its connections may be unfinished; None: no limit
    tokens_per_minute  tokens of prompts and answers; None: no limit
    models             patterns of the models that it may use (``qwen*``); None: all models
    expires            when the key ends, in seconds since 1970; None: never
    keep_alive_s       the longest time in seconds for which its requests may keep an idle model loaded; None: they may
                       set no time. The right admin has no limit
    requests_per_minute  accepted requests; None: no limit
    tokens_per_day     tokens of prompts and answers; None: no limit
    created            when the key was made, in ISO 8601
    """

    name: str | None
    key_id: str = ""
    rights: frozenset[Right] = ANY
    max_in_flight: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] | None = None
    expires: float | None = None
    keep_alive_s: int | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    created: str = field(default="", compare=False)

    @property
    def counts_tokens(self) -> bool:
        """Whether the key has a limit of tokens."""
        return self.tokens_per_minute is not None or self.tokens_per_day is not None

    @property
    def is_limited(self) -> bool:
        """Whether requests of the key are counted against a limit."""
        return self.counts_tokens or self.max_in_flight is not None or self.requests_per_minute is not None

    @property
    def is_http(self) -> bool:
        """Whether this is the key of an HTTP client, which cannot connect itself."""
        return len(self.key_id) == _TOKEN_ID_LENGTH

    def may_use(self, model: str) -> bool:
        """Return whether the key may use a model and may know of it."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)


NOBODY = Identity(None, "", frozenset())
"""The owner of a connection that has not been admitted yet. NOBODY has no rights."""
OWNER = Identity(None)


def check_right(identity: Identity, message: Message) -> None:
    """Raise WireError (FORBIDDEN), which names the missing right, unless this identity may send this message."""
    if isinstance(message, Call):
        verb = VERBS.get(message.verb)
        what, enough = f"verb {message.verb!r}", ADMIN if verb is None else verb.rights
    else:
        what, enough = message.kind.name, _OF_KIND.get(message.kind, ADMIN)
    if not identity.rights & enough:
        raise _forbidden(identity, what, enough)


def check_model(identity: Identity, model: str, nearest: Nearest) -> None:
    """Raise WireError (FORBIDDEN) unless this identity may use this model. Whether the model exists does not matter.

    nearest  finds the name that was probably meant, see ``ModelNames.nearest``
    """
    if not identity.may_use(model):
        may, meant = ", ".join(identity.models or ()), nearest(model, identity.may_use)
        hint = "" if meant is None else f"; did you mean {meant!r}?"
        message = f"key {identity.name!r} may not use model {model[:64]!r}: it may use {may}{hint}"
        raise WireError(ErrorCode.FORBIDDEN, message, field="model")


def check_stay(identity: Identity, seconds: float, field: str) -> None:
    """Raise WireError (FORBIDDEN) unless the requests of this identity may keep a model loaded for this time.

    seconds  the time without a request; infinity for ever
    field    the key of the route that says so
    """
    if Right.ADMIN in identity.rights or (identity.keep_alive_s is not None and seconds <= identity.keep_alive_s):
        return
    most = identity.keep_alive_s
    message = f"key {identity.name!r} may not set {field}" if most is None else f"{field} is more than {most} s"
    may = "" if most is None else f", the most that key {identity.name!r} may ask for"
    remedy = f"leave {field} out, or make a key with `modelctl keys new NAME --keep-alive TIME`"
    raise WireError(ErrorCode.FORBIDDEN, f"{message}{may}: {remedy}", field=f"route.{field}")


def check_models_of_call(identity: Identity, verb: str, params: Mapping[str, Any], nearest: Nearest) -> None:
    """Raise WireError (FORBIDDEN) if a call concerns a model that this identity may not use, see ``check_model``."""
    if identity.models is None:
        return
    model = params.get("model")
    is_of_all = verb in VERBS and VERBS[verb].scope is ModelScope.ALL and model in (None, SUPERVISOR_NAME, GATEWAY_NAME)
    if isinstance(model, str) and not is_of_all:
        check_model(identity, model.partition(":")[0], nearest)  # "letters:2" is a worker of the model "letters"
    elif is_of_all:
        message = f"{verb!r} concerns all models, and key {identity.name!r} may use {', '.join(identity.models)} only"
        raise WireError(ErrorCode.FORBIDDEN, message, field="model")


def check_on_behalf_of(identity: Identity, key_id: object, field: str) -> str:
    """Return the id of the key for which a connection asks. ``field`` is the place of the id in the message.

    Raises WireError (FORBIDDEN) if the connection may not ask for other keys; RequestError if the id has a wrong form.
    """
    if Right.GATEWAY not in identity.rights:
        raise _forbidden(identity, "on_behalf_of", frozenset({Right.GATEWAY}), field)
    if not isinstance(key_id, str) or not TOKEN_ID.fullmatch(key_id):
        raise RequestError(f"on_behalf_of must be {TOKEN_ID_RULE}", field=field)
    return key_id


def _forbidden(identity: Identity, what: str, enough: frozenset[Right], field: str | None = None) -> WireError:
    needed = " or ".join(right for right in Right if right in enough)
    has = ", ".join(right for right in Right if right in identity.rights)
    text = f"{what} takes the right {needed}, and key {identity.name!r} has {has or 'none'}"
    kind = " --http" if identity.is_http else ""
    remedy = f"ask for another key (`modelctl keys new NAME{kind} --rights {needed.partition(' ')[0]}`)"
    return WireError(ErrorCode.FORBIDDEN, f"{text}: {remedy}", field=field)


def may_see(identity: Identity, owner: Identity) -> bool:
    """Return whether an identity may see a request of ``owner``: every one with status or admin, else only its own."""
    return bool(identity.rights & SEES_ALL) or _is_same(identity, owner)


def may_cancel(identity: Identity, owner: Identity) -> bool:
    """Return whether an identity may cancel a request of ``owner``: every one with admin, else only its own."""
    return Right.ADMIN in identity.rights or _is_same(identity, owner)


def _is_same(identity: Identity, owner: Identity) -> bool:
    """Return whether both are one key. The entry of a key may have been changed since the request came."""
    return bool(identity.key_id) and identity.key_id == owner.key_id


# Limits of a key: requests at once, and tokens and requests in a time, as token buckets. Pure: times are arguments.
#
# A bucket holds the tokens of its period, a minute or a day, and fills evenly. So a key that has used the tokens of a
# day need not wait until midnight. The buckets live in the supervisor's memory, and are full when it starts.
#
# Each request takes the tokens of its prompt, estimated at four bytes each, as in the queue. Each token of an answer
# is taken when it comes. That may leave a debt, because nobody knows in advance how long an answer will be, and a
# running stream is not slowed. A new request is admitted while at least one token is left. So over time a key gets no
# more than its rate. In a short time it gets no more than one period's tokens plus the remaining answers of its
# running requests. When a worker has compiled a constraint for a request of the key, that takes tokens, too
# (``supervisor.requests.worker_events``).


BUSY_RETRY_MS = 1000
"""Milliseconds after which a client should try again if the key must wait for one of its requests to end. Nobody can
predict that end."""
MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0
RATES: Final = {
    "requests_per_minute": (MINUTE_S, "requests a minute"),
    "tokens_per_minute": (MINUTE_S, "tokens a minute"),
    "tokens_per_day": (DAY_S, "tokens a day"),
}
"""Field of ``Identity`` → the period in seconds, and the unit for people."""
OF_REQUESTS: Final = "requests_per_minute"


@dataclass(slots=True)
class TokenBucket:
    """A token bucket with ``left`` tokens at the time ``at``. A negative number is a debt.

    rate  tokens that it gets in ``period_s`` seconds, and holds at most
    """

    rate: int
    period_s: float
    left: float
    at: float

    def refill(self, now: float) -> None:
        self.left = min(float(self.rate), self.left + (now - self.at) * self.rate / self.period_s)
        self.at = now

    def wait_s(self) -> float:
        """Return the seconds until one token is left."""
        return max(0.0, (1 - self.left) * self.period_s / self.rate)


class Allowance:
    """The requests and tokens that one key may still use, over all its connections."""

    def __init__(self, identity: Identity, now: float) -> None:
        self.identity = identity
        self.refused = 0
        self._buckets: dict[str, TokenBucket] = {}
        self.adopt(identity, now)

    def adopt(self, identity: Identity, now: float) -> None:
        """Take over limits that may have changed. Tokens that were used stay used."""
        self.identity, before = identity, self._buckets
        self._buckets = {}
        for name, (period_s, _) in RATES.items():
            rate: int | None = getattr(identity, name)
            if rate is None:
                continue
            left = float(rate)
            if (old := before.get(name)) is not None:
                old.refill(now)
                left = min(left, old.left)
            self._buckets[name] = TokenBucket(rate, period_s, left, now)

    def check(self, in_flight: int, now: float) -> None:
        """Raise RATE_LIMITED if the key may not send another request now.

        in_flight  the key's unfinished requests
        """
        identity = self.identity
        if identity.max_in_flight is not None and in_flight >= identity.max_in_flight:
            self.refused += 1
            message = f"key {identity.name!r} has {in_flight} requests unfinished and may have {identity.max_in_flight}"
            raise WireError(
                ErrorCode.RATE_LIMITED, f"{message}: wait for one to end, or cancel one", retry_after_ms=BUSY_RETRY_MS
            )
        for bucket in self._buckets.values():
            bucket.refill(now)
        empty = {name: bucket.wait_s() for name, bucket in self._buckets.items() if bucket.left < 1}
        if empty:
            self.refused += 1
            name, wait = max(empty.items(), key=lambda item: item[1])
            used = f"{self._buckets[name].rate} {RATES[name][1]}"
            message = f"key {identity.name!r} has used its {used}: try again in {wait:.1f} s"
            raise WireError(ErrorCode.RATE_LIMITED, message, retry_after_ms=max(1, round(1000 * wait)))

    def charge(self, tokens: int, now: float) -> None:
        """Take tokens of a prompt that was accepted, or of an answer that has come."""
        for name, bucket in self._buckets.items():
            if name != OF_REQUESTS:
                bucket.refill(now)
                bucket.left -= tokens

    def count_request(self, now: float) -> None:
        """Take a request that was accepted."""
        if (bucket := self._buckets.get(OF_REQUESTS)) is not None:
            bucket.refill(now)
            bucket.left -= 1

    def left(self, name: str, now: float) -> int | None:
        """Return what is left of a rate, a key of ``RATES``, for people; None without this limit."""
        if (bucket := self._buckets.get(name)) is None:
            return None
        bucket.refill(now)
        return int(bucket.left)


# Follow the unfinished requests of one key, without being told of each token and each end. Pure.


CLEAR_AT = 64
"""The most requests that are kept before ended ones are removed for the first time. Later they are removed when the
number of kept requests has doubled, and is above CLEAR_AT."""


class Counted(Hashable, Protocol):
    """A request that counts the tokens of its answer."""

    @property
    def tokens(self) -> int: ...


Request = TypeVar("Request", bound=Counted)


class Unfinished(Generic[Request]):
    """The requests of one key that may be unfinished, and the tokens of their answers.

    holds  request → whether that request is unfinished

    Ended requests stay until the next check. The limit on kept requests is CLEAR_AT, or twice the number that remained
    after the last check if that is more.
    """

    def __init__(self, holds: Callable[[Request], bool]) -> None:
        self._holds = holds
        self._counted: dict[Request, int] = {}
        """For each request, the tokens that are part of ``_new_tokens`` or were taken already."""
        self._new_tokens = 0
        self._clear_at = CLEAR_AT

    def __len__(self) -> int:
        return len(self._counted)

    def add(self, request: Request) -> None:
        self._counted[request] = 0
        if len(self._counted) > self._clear_at:
            self._clear()

    def count(self, limit: int) -> int:
        """Return the number of unfinished requests. It is exact if it is ``limit`` or more, else it may be too high."""
        if len(self._counted) >= limit:
            self._clear()
        return len(self._counted)

    def take_tokens(self) -> int:
        """Return the tokens of all answers that have come since the last call, those of ended requests included."""
        self._clear()
        tokens, self._new_tokens = self._new_tokens, 0
        return tokens

    def _clear(self) -> None:
        kept = {}
        for request, counted in self._counted.items():
            tokens = request.tokens
            self._new_tokens += tokens - counted
            if self._holds(request):
                kept[request] = tokens
        self._counted = kept
        self._clear_at = max(CLEAR_AT, 2 * len(kept))
