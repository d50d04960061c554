"""The ledger of usage in the supervisor: its table, and the process that writes it to the disk (``usage.writer``).

The loop never waits for the disk. It adds to counters in memory, and questions are answered by the writer. If the
writer cannot use its file, or dies, the counts stay in memory until it can. No request is refused for that.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgpack

from protocol.codec import pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.process.helper_process import HelperProcess
from protocol.values import pack
from protocol.verbs import SEES_ALL
from supervisor.helper import Helper, HelperWatch, writer_environment
from supervisor.keys.rights import Identity
from supervisor.logs.events import EventKind, noted
from supervisor.ports.sockets import Restarts
from supervisor.requests.counters import FROM_WRITER, CounterTable, Trouble, UsageQuestion, make_table
from supervisor.requests.request import Asker, EffectQueue
from supervisor.requests.usage_ledger import BelievedTime, UsageLedger

_WRITER: Final = (sys.executable, "-P", "-m", "supervisor.usage.writer")
MOST_ASKED: Final = 64
"""Most questions that may wait for the writer."""
CHECK_S: Final = 1.0
"""Seconds between two calls of ``check``."""
ANSWER_S: Final = 10.0
"""Seconds that a question waits for its answer."""
AGAIN_S: Final = 5.0
"""Least seconds between two starts of the writer."""
LEAVE_S: Final = 5.0
"""Seconds that a supervisor that ends waits for the last write."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A question to the writer. ``asker``: the client that has asked; None for the supervisor itself."""

    asker: Asker | None
    due: float


class UsageKeeper:
    """The counters of this supervisor's life, and the writer's process. Use it on the loop's thread only.

    file    the SQLite file
    days    days that are kept
    ledger  gives the scheduler its counters
    """

    def __init__(self, file: Path, days: int, effects: EffectQueue, log: logging.Logger, watch: HelperWatch) -> None:
        self.file = file
        self._days = days
        self._effects = effects
        self._log = log
        self._session = os.urandom(8).hex()
        self._table = make_table()
        wall = time.time()
        self._clock = BelievedTime(wall, time.clock_gettime(time.CLOCK_BOOTTIME))
        self.ledger = UsageLedger(CounterTable(self._table), wall)
        self._numbers = count(1)
        self._questions: dict[int, _Question] = {}
        self._helper = Helper(watch, self._start, self._take, self._ended, Restarts(AGAIN_S, AGAIN_S))
        self._told_crowded = False
        self._tell_last_days: Callable[[dict[str, str]], None] | None = None
        self.trouble: str | None = None
        """Why the counts are not written to the disk now; None if they are."""

    def check(self, used: Collection[int]) -> None:
        """Start the writer if there is none, and give up on questions that it does not answer. Call this each second.

        used  the places of rows in which unfinished requests count
        """
        now = time.monotonic()
        self.ledger.advance(self._clock.at(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)), used)
        if self.ledger.crowded_out and not self._told_crowded:
            self._told_crowded = True
            self._log.warning("usage: too many keys and models on one day: further ones are counted together")
        try:
            self._helper.check(now)
        except OSError as e:
            self._note(f"the usage writer cannot be started: {e.strerror or e}; trying again")
        if self._tell_last_days is not None and all(question.asker for question in self._questions.values()):
            with suppress(WireError):  # it is asked again
                self._ask(None, None)
        late = f"the usage writer has not answered within {ANSWER_S:g} s: the disk of {self.file} may be slow"
        self._fail([number for number, question in self._questions.items() if now >= question.due], late)

    def ask(self, params: dict[str, str], caller: Identity, asker: Asker) -> None:
        """Have the writer answer a question about the usage. Raises WireError if it may not be asked.

        params  the checked parameters of the verb ``usage``
        caller  who asks: a key without the rights status and admin sees its own usage only
        """
        self._ask(_question(params, caller), asker)

    def find_last_days(self, tell: Callable[[dict[str, str]], None]) -> None:
        """Have the writer find the last day of each key's usage, and call ``tell`` once with the days by key id."""
        self._tell_last_days = tell

    def _ask(self, question: dict[str, Any] | None, asker: Asker | None) -> None:
        if (process := self._helper.process) is None or len(self._questions) >= MOST_ASKED:
            why = "no usage writer runs" if process is None else f"{MOST_ASKED} questions about usage wait"
            raise WireError(ErrorCode.OVERLOADED, f"{why}: try later", retry_after_ms=1000)
        if process.unsent:  # the writer waits for the disk, and its earlier questions fill the socket
            raise WireError(ErrorCode.OVERLOADED, "the usage writer is busy: try later", retry_after_ms=1000)
        number = next(self._numbers)
        self._questions[number] = _Question(asker, time.monotonic() + ANSWER_S)
        process.send(pack(UsageQuestion(number, question)))

    def _take(self, record: bytes) -> None:
        message = FROM_WRITER.read(record)
        if isinstance(message, Trouble):
            self._note(message.why)
        elif (question := self._questions.pop(message.number, None)) is not None:
            self._answer(question, message.body)

    def describe(self) -> dict[str, Any]:
        """Return the ledger as ``status`` shows it."""
        return {
            "file": str(self.file),
            "days": self._days,
            "trouble": self.trouble,
            "crowded_out": self.ledger.crowded_out,
        }

    def close(self) -> None:
        """Have the writer write the last counts and leave. Log what it could not write within ``LEAVE_S``."""
        process = self._helper.part()
        if process is not None and not process.finish(LEAVE_S):
            self._log.error("usage: the writer has not written the last counts within %g s", LEAVE_S)
        requests, tokens = self.ledger.unwritten()
        if requests or tokens:
            self._log.error("usage: %d requests and %d tokens are not in %s", requests, tokens, self.file)
        os.close(self._table)

    def _start(self) -> HelperProcess:
        arguments = (str(self.file), self._session, str(self._days), str(self._table))
        return HelperProcess([*_WRITER, *arguments], writer_environment(), passed=[self._table])

    def _ended(self, process: HelperProcess) -> None:
        """Take note that the writer has ended. ``check`` starts another writer with the same counters."""
        self._log.warning("usage: the writer, process %d, ended with %s", process.pid, process.how)
        self._note("the usage writer has ended: another one starts")
        self._fail(list(self._questions), "the usage writer ended before it could answer: try again")

    def _note(self, trouble: str | None) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if trouble is None:
            self._log.info("usage: the counts are written to %s again", self.file)
        else:
            self._log.error("usage: %s", trouble, extra=noted(EventKind.SUPERVISOR))

    def _fail(self, numbers: Collection[int], message: str) -> None:
        body = pack_body({"error": WireError(ErrorCode.HELPER_FAILED, message).to_wire()})
        for number in numbers:
            self._answer(self._questions.pop(number), body)

    def _answer(self, question: _Question, body: bytes) -> None:
        if question.asker is not None:
            self._effects.append(question.asker.reply(body))
        elif self._tell_last_days is not None and (days := msgpack.unpackb(body).get("result")) is not None:
            self._tell_last_days(days)
            self._tell_last_days = None


def _question(params: dict[str, str], caller: Identity) -> dict[str, Any]:
    """Return the writer's question for the parameters of the verb. Raises WireError."""
    key, since = params.get("key"), params.get("since")
    if since is not None and not _is_day(since):
        raise RequestError(f"since is {since[:32]!r}: must be a day such as 2026-01-31", field="since")
    sees_all = bool(caller.rights & SEES_ALL)
    if not sees_all and key not in (None, caller.name):
        message = f"key {caller.name!r} sees its own usage only: leave out key, or use a key with the right status"
        raise WireError(ErrorCode.FORBIDDEN, message, field="key")
    return {
        "since": since,
        "key_id": None if sees_all else caller.key_id,
        "key": key,
        "model": params.get("model"),
        "models": None if caller.models is None or not sees_all else list(caller.models),
    }


def _is_day(text: str) -> bool:
    from datetime import date

    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
