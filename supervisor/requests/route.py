"""Check the ``route`` of a GENERATE: the part of a request that the supervisor itself reads. Pure."""

import math
from dataclasses import dataclass
from typing import Any

from protocol.errors import RequestError
from supervisor.keys.rights import TOKEN_ID, TOKEN_ID_RULE
from supervisor.spelling import seconds_of, spelled, spelled_name

PRIORITIES = ("interactive", "normal", "batch")
MAX_MS = 86_400_000
"""One day. No client waits for longer."""
MAX_AFFINITY = 256
MOST_TRACE_IDS = 4
MAX_TRACE_ID = 128
MOST_NOTES = 32
MAX_NOTE = 256
MAX_STAY_S = 366 * 86_400
"""One year. For a longer time a client asks for ever, with a negative number."""


@dataclass(frozen=True, slots=True)
class Route:
    """The keys of ``route``, in GENERATE, as ``protocol.bodies.RouteKeys`` describes them. None is no limit."""

    resume: bool = True
    priority: str = "normal"
    queue_ms: int | None = None
    ttft_ms: int | None = None
    deadline_ms: int | None = None
    affinity: str | None = None
    progress: bool = False
    keep_alive: float | str | None = None
    ttl: int | None = None
    on_behalf_of: str | None = None
    trace_ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_EMPTY = Route()


def read_route(given: dict[str, Any]) -> Route:
    """Return the route that a client has given. Raises RequestError, which names the key, its value and the allowed
    values."""
    if not given:
        return _EMPTY
    for key, value in given.items():
        check = CHECKS.get(key) if isinstance(key, str) else None
        if check is None:
            message = (
                f"unknown routing key {spelled_name(key)}: known are {', '.join(CHECKS)}; all else stands in the body"
            )
            raise RequestError(message, field=f"route.{key[:64]}" if isinstance(key, str) else "route")
        allowed, rule = check
        if not allowed(value):
            raise RequestError(f"{key} is {spelled(value)}: must be {rule}", field=f"route.{key}")
    if "keep_alive" in given and "ttl" in given:
        raise RequestError("ttl says what keep_alive says: leave out one of them", field="route.ttl")
    given = given | {name: tuple(given[name]) for name in ("trace_ids", "notes") if name in given}
    return Route(**given)


def stay_of(given: dict[str, Any]) -> tuple[float, str] | None:
    """Return how long a client wants its model to stay loaded, and the key of the route that says so. None: unset.

    The time is in seconds without a request. Infinity means for ever. Raises RequestError as ``read_route`` does.
    """
    for key in ("keep_alive", "ttl"):
        if key in given:
            route = read_route(given)
            seconds = route.ttl if route.keep_alive is None else _seconds(route.keep_alive)
            return None if seconds is None else (float(seconds), key)
    return None


def _seconds(keep_alive: Any) -> float | None:
    """Return the seconds that a value of ``keep_alive`` means; None if it is not valid."""
    if type(keep_alive) is str:
        positive = keep_alive.removeprefix("-")
        seconds = 0 if positive == "0" else seconds_of(positive, several=True)
        keep_alive = -seconds if seconds is not None and positive != keep_alive else seconds
    if type(keep_alive) not in (int, float) or not keep_alive <= MAX_STAY_S:
        return None
    return math.inf if keep_alive < 0 else float(keep_alive)


def _is_stay(value: Any) -> bool:
    return _seconds(value) is not None


def _is_ttl(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_STAY_S


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_ms(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_MS


def _is_priority(value: Any) -> bool:
    return type(value) is str and value in PRIORITIES


def _is_affinity(value: Any) -> bool:
    return type(value) is str and 1 <= len(value) <= MAX_AFFINITY


def _is_token_id(value: Any) -> bool:
    return type(value) is str and TOKEN_ID.fullmatch(value) is not None


def _are_trace_ids(value: Any) -> bool:
    return _are_texts(value, MOST_TRACE_IDS, MAX_TRACE_ID)


def _are_notes(value: Any) -> bool:
    return _are_texts(value, MOST_NOTES, MAX_NOTE)


def _are_texts(value: Any, most: int, longest: int) -> bool:
    if type(value) is not list or not 1 <= len(value) <= most:
        return False
    return all(type(each) is str and 1 <= len(each) <= longest for each in value)


_BOOL = (_is_bool, "true or false")
_MS = (_is_ms, f"milliseconds, an integer from 1 to {MAX_MS}")
CHECKS = {
    "resume": _BOOL,
    "priority": (_is_priority, f"one of {', '.join(PRIORITIES)}"),
    "queue_ms": _MS,
    "ttft_ms": _MS,
    "deadline_ms": _MS,
    "affinity": (_is_affinity, f"a string of 1 to {MAX_AFFINITY} characters"),
    "progress": _BOOL,
    "keep_alive": (_is_stay, f"seconds up to {MAX_STAY_S}, or a duration such as 5m; 0: at once, negative: never"),
    "ttl": (_is_ttl, f"seconds, an integer from 1 to {MAX_STAY_S}"),
    "on_behalf_of": (_is_token_id, TOKEN_ID_RULE),
    "trace_ids": (_are_trace_ids, f"a list of 1 to {MOST_TRACE_IDS} strings of 1 to {MAX_TRACE_ID} characters each"),
    "notes": (_are_notes, f"a list of 1 to {MOST_NOTES} strings of 1 to {MAX_NOTE} characters each"),
}
"""For each key: a check of its value, and the allowed values in words."""
