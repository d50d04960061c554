"""Orders of CALL that change the list of keys. Each is carried out by a process of its own (``keys.change``).

The loop neither waits for the disk, nor for a command that holds the lock of the list. It loads no OpenSSL for the hash
of a token, either. The supervisor sees the changed list as it sees the changes of `modelctl keys`.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from protocol.codec import pack_reply
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.process.helper_process import HelperProcess
from supervisor.config import Config
from supervisor.event_history import EventKind, noted
from supervisor.helper import HelperWatch, writer_environment
from supervisor.keys.change import CHANGE_S
from supervisor.keys.records import KeysProblem, check_name
from supervisor.keys.rights import OWNER, Identity
from supervisor.keys.ring import KeyRing
from supervisor.keys.rules import FIELDS, as_refusal, check_models, read_fields
from supervisor.requests.effect_queue import EffectQueue
from supervisor.requests.pending_queries import Asker
from supervisor.timers import Timer, Timers

_CHANGING: Final = (sys.executable, "-P", "-m", "supervisor.keys.change")
DONE: Final = {"new_key": "made", "set_key": "changed", "revoke_key": "revoked"}
"""The verbs that change the list → the word for it in the log."""
MOST: Final = 8
"""Most changes that may be under way."""


@dataclass(slots=True)
class _Order:
    verb: str
    name: str
    caller: Identity
    asker: Asker
    notes: list[str]
    result: dict[str, Any] | None = None
    answered: bool = False
    timer: Timer | None = field(default=None, repr=False)


class KeyOrders:
    """The list of keys for verbs of CALL, and the changes that are under way. Use it on the loop's thread only."""

    def __init__(
        self, ring: KeyRing, timers: Timers, effects: EffectQueue, log: logging.Logger, watch: HelperWatch
    ) -> None:
        self._ring = ring
        self._timers = timers
        self._effects = effects
        self._log = log
        self._watch = watch
        self._running = 0
        """Processes that have not ended."""

    def listed(self, after: str, limit: int, caller: Identity) -> dict[str, Any]:
        """Return the keys whose names come after ``after``: the result of the verb ``keys``. Raises WireError."""
        try:
            keys, more = self._ring.listed(after, limit, caller)
        except KeysProblem as e:
            raise as_refusal(e) from None
        return {"keys": keys, "more": more}

    def begin(
        self, verb: str, name: str, given: Mapping[str, Any], caller: Identity, asker: Asker, config: Config
    ) -> None:
        """Begin an order. The asker hears of its end. Raises WireError if it cannot be carried out as it is.

        name   the name of the key
        given  the further parameters of the verb
        """
        fields = _fields(verb, name, given)
        notes: list[str] = []
        try:
            directory = self._ring.store.directory
            if fields.get("models") is not None:
                notes = check_models(fields["models"], config.models, config.names, config.file)
        except KeysProblem as e:
            raise as_refusal(e) from None
        if self._running >= MOST:
            message = f"{MOST} changes of the list of keys are under way: try later"
            raise WireError(ErrorCode.OVERLOADED, message, retry_after_ms=1000)
        order = {
            "directory": str(directory),
            "verb": verb,
            "caller": None if caller is OWNER else caller.key_id,
            "name": name,
            "fields": {key: sorted(value) if key == "rights" else value for key, value in fields.items()},
        }
        try:
            process = HelperProcess(_CHANGING, writer_environment())
        except OSError as e:
            raise WireError(ErrorCode.HELPER_FAILED, f"no process can be started: {e.strerror}; try later") from None
        process.send(json.dumps(order).encode())
        found = _Order(verb, name, caller, asker, notes)
        self._running += 1

        def take(_: HelperProcess, record: bytes) -> None:
            found.result = json.loads(record)

        self._watch.add(process, take, lambda _: self._ended(found))

        def too_late() -> None:
            process.kill()  # it may hang in the kernel, at its disk, so its end is not awaited
            self._answer(found)

        found.timer = self._timers.at(time.monotonic() + CHANGE_S + 1, too_late)

    def _ended(self, order: _Order) -> None:
        self._running -= 1
        self._answer(order)

    def _answer(self, order: _Order) -> None:
        """Answer an order once, with what its process has said."""
        if order.timer is not None:
            order.timer.cancel()
        if order.answered:
            return
        order.answered = True
        if (result := order.result) is None:
            message = f"the list of keys was not changed within {CHANGE_S} s: its disk or another command was too slow"
            result = {"error": WireError(ErrorCode.HELPER_FAILED, f"{message}; list the keys, and try again").to_wire()}
        if "error" not in result:
            by = "" if order.caller.name is None else f" by key {order.caller.name!r}"
            self._log.info("key %r is %s%s", order.name, DONE[order.verb], by, extra=noted(EventKind.KEYS))
            more = {} if order.verb == "revoke_key" else self._described(order)
            result = {"result": {**result, **more}}
        self._effects.add([order.asker.reply(pack_reply(result))])

    def _described(self, order: _Order) -> dict[str, Any]:
        """Return the key after a change; ``key`` is None if it was revoked meanwhile."""
        return {"key": self._ring.listed_as(order.name, order.caller), "notes": order.notes}


def _fields(verb: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rights and limits of a key as ``Identity`` has them. Raises WireError."""
    given = {key: value for key, value in given.items() if (key, value) != ("rights", None)}
    if verb == "set_key" and not given:
        raise RequestError(f"nothing to change: give one of {', '.join(FIELDS)}")
    if verb == "new_key":
        given.setdefault("rights", ["infer"])
    try:
        check_name(name)
        return read_fields(given, time.time())
    except KeysProblem as e:
        raise as_refusal(e) from None
