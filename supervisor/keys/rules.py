"""The rules for changes of the list of keys, for the command `keys` and for the orders of CALL. Pure."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol

from protocol.errors import ErrorCode, RequestError, WireError
from protocol.names import nearest
from protocol.verbs import Right
from supervisor.keys.records import (
    LIMITS,
    MAX_LIFETIME_S,
    KeysProblem,
    check_limit,
    parse_expiry,
    parse_lifetime,
    parse_models,
    parse_rights,
)
from supervisor.keys.rights import TOKEN_ID, Identity

FIELDS: Final = ("rights", "models", "expires", *LIMITS)
"""What a key has besides its name, and what can be changed."""
_MOST_IN_LIST: Final = 256
"""Most rights or patterns of models that are looked at."""


class HasModel(Protocol):
    """What a name means."""

    @property
    def model(self) -> str: ...


class Names(Protocol):
    """All names of models, see ``supervisor.config.rules``."""

    def __iter__(self) -> Any: ...

    def find(self, name: str) -> HasModel: ...


def read_fields(given: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the rights and limits that are given, as ``Identity`` has them. Raises KeysProblem with the field's name.

    given  field → value. Rights and models are lists, or texts with commas. ``expires`` is a lifetime such as 30d, or
           the time at which a key ends, and ``keep_alive_s`` a number of seconds, or a text such as 2h. None takes a
           limit away
    now    seconds since 1970
    """
    values = {}
    for field, value in given.items():
        try:
            values[field] = _read_field(field, value, now)
        except KeysProblem as e:
            raise KeysProblem(str(e), field) from None
    return values


def _read_field(field: str, value: Any, now: float) -> Any:
    if field == "rights":
        return parse_rights(_with_commas(value, "rights must be a list that names at least one right"))
    if value is None:
        return None
    if field == "models":
        return parse_models(_with_commas(value, "models must be a list of names and patterns, or null for all models"))
    if field == "expires":
        return _expiry(value, now)
    if field == "keep_alive_s" and isinstance(value, str):
        value = parse_lifetime(value)
    return check_limit(field, value)


def _with_commas(value: Any, wrong: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > _MOST_IN_LIST or not all(isinstance(part, str) for part in value):
        raise KeysProblem(wrong)
    return ",".join(value)


def _expiry(value: Any, now: float) -> float | None:
    if not isinstance(value, str):
        raise KeysProblem("expires must be a text: a lifetime such as 30d, or a time such as 2026-01-31T12:00:00Z")
    if "T" not in value:
        return int(now) + parse_lifetime(value)
    end = parse_expiry(value)
    if end is None or not now < end <= now + MAX_LIFETIME_S:
        raise KeysProblem(f"expires is {value}: must be a time to come, in ten years at most")
    return end


def check_models(patterns: Iterable[str], models: Collection[str], names: Names, file: object) -> list[str]:
    """Return a sentence for each pattern that matches no model of models.yaml: it may have one later.

    models  the names of the models themselves
    names   all names of models
    file    the path of models.yaml, for the sentences

    Raises KeysProblem for other names of models: a key with an alias alone could do nothing.
    """
    sentences = []
    for pattern in patterns:
        if any(fnmatchcase(model, pattern) for model in models):
            continue
        meant = {names.find(name).model for name in names if fnmatchcase(name, pattern)}
        if meant:
            raise KeysProblem(
                f"{pattern!r} is another name of {', '.join(sorted(meant))}: a key names models, and may then use all "
                f"their names; name {','.join(sorted(meant))} instead",
                "models",
            )
        near = nearest(pattern, models)
        hint = "" if near is None else f" (did you mean {near!r}?)"
        sentences.append(f"{file} has no model {pattern!r}{hint}: until it has one, the key may use none by that name")
    return sentences


def check_order(
    caller_id: str, listed: Mapping[str, Identity], before: Identity | None, after: Identity | None, now: float
) -> None:
    """Raise WireError unless a key may order this change of the list.

    caller_id  the id of the key that orders
    listed     the keys on the list, by id
    before     the key as it is; None if it is new
    after      the key as it would be; None if it is revoked
    now        seconds since 1970

    An order may have waited while the caller's own key was changed, so its rights are looked at again.
    """
    caller = listed.get(caller_id)
    if caller is None or (caller.expires is not None and now >= caller.expires):
        message = "the key that ordered this was revoked, or has expired"
        # The field tells a gateway that a client's key has ended and not its own.
        raise WireError(
            ErrorCode.UNAUTHORIZED, message, field="on_behalf_of" if TOKEN_ID.fullmatch(caller_id) else None
        )
    if Right.ADMIN not in caller.rights or caller.models is not None:
        message = f"key {caller.name!r} may not change keys: that takes the right admin, for all models"
        raise WireError(ErrorCode.FORBIDDEN, message)
    if before is not None and before.key_id == caller_id:
        _check_stays_admin(caller, after)
    if after is not None:
        _check_gives_no_more(caller, before, after)


def _check_stays_admin(caller: Identity, after: Identity | None) -> None:
    """Raise WireError if a key would take the right admin away from itself. So the last key with it stays, too."""
    if after is None:
        lost, field = "revoking it", "name"
    elif Right.ADMIN not in after.rights:
        lost, field = "these rights", "rights"
    elif after.models is not None:
        lost, field = "a limit to some models", "models"
    elif after.expires is not None and after.expires != caller.expires:
        lost, field = "this end", "expires"
    else:
        return
    message = f"key {caller.name!r} gives this order, and {lost} would take the right admin away from it"
    remedy = "use another key with the right admin, or `modelctl keys` on the supervisor's machine"
    raise WireError(ErrorCode.FORBIDDEN, f"{message}: {remedy}", field=field)


def _check_gives_no_more(caller: Identity, before: Identity | None, after: Identity) -> None:
    """Raise WireError if a change gives a key a higher limit, or a later end, than the caller's own key has.

    A key keeps the limits that it has already. But a key that gets further rights or models must have no more than the
    caller: else a caller whose key ends soon could make an old key that never ends an administrator.
    """
    gains = before is None or not after.rights <= before.rights or _has_more_models(before, after)
    for field in ("expires", "max_in_flight", "requests_per_minute", "tokens_per_minute", "tokens_per_day"):
        own, given = getattr(caller, field), getattr(after, field)
        if own is None or (not gains and given == getattr(before, field)):
            continue
        if given is None or given > own:
            what = "ends" if field == "expires" else f"has a limit of {own} for {field}"
            message = f"key {caller.name!r} gives this order, and {what}: it can give no other key more; set {field}"
            raise WireError(ErrorCode.FORBIDDEN, message, field=field)


def _has_more_models(before: Identity, after: Identity) -> bool:
    """Return whether a change adds a pattern of models to those of a key, or takes its limit to some models away."""
    return before.models is not None and (after.models is None or not set(after.models) <= set(before.models))


def as_refusal(problem: KeysProblem) -> WireError:
    """Return the error of CALL for a problem: with a field it is the client's, else the supervisor's."""
    if problem.field is not None:
        return RequestError(str(problem), field=problem.field)
    return WireError(ErrorCode.HELPER_FAILED, str(problem))
