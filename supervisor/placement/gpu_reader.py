"""Read the GPUs from NVML in a process of its own (``nvml_child``), which is asked over a socket.

The driver may hang, and the supervisor has one thread. So a reading waits for ``TIMEOUT_S`` at most. After a reading
that waited in vain, no reading waits until the driver answers quickly again; ``gpus.CircuitBreaker`` decides that.
``read_ahead`` never waits: it asks, and a later call returns the answer. ``gpus`` reads the answers.
"""

import logging
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from protocol.process.birth import helper_environment
from protocol.process.helper_process import HelperProcess
from supervisor.placement.gpus import (
    MAX_ANSWER,
    TIMEOUT_S,
    BreakerState,
    CircuitBreaker,
    FixedFacts,
    Gpu,
    GpuReading,
    GpusAbsent,
    GpusLate,
    GpusUnknown,
    encode_question,
    read_answer,
    read_greeting,
)
from supervisor.ports.sockets import Restarts
from supervisor.workers.environment import directory_of, directory_of_titles

START_S = 2.0
"""Seconds that the first reading waits until the driver is open. Opening takes seconds if nothing keeps the driver open
(no persistence mode). The supervisor waits in this way only before it serves clients. Models that are to be placed wait
longer, and do not hold up the loop."""
ONCE_S = 30.0
"""Seconds that a command waits until the driver is open, and for its answer. Nothing else waits meanwhile."""
LEAVE_S = 0.2
"""Seconds to wait for the end of a process that was killed."""
_Answer = TypeVar("_Answer")
_PROGRAM = Path(__file__).with_name("nvml_child.py")
_ROOT = str(_PROGRAM.parents[2])
"""The directory that ``protocol`` is imported from."""


class GpuReader:
    """Reads the GPUs of this machine. Starts the process at once, and waits for it at the first reading.

    Use it from the main thread only: the process lives as long as the thread that started it.

    timeout_s  seconds that a reading waits for its answer
    start_s    seconds that the first reading waits until the driver is open
    """

    def __init__(self, log: logging.Logger, timeout_s: float = TIMEOUT_S, start_s: float = START_S) -> None:
        self._log = log
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._breaker = CircuitBreaker(timeout_s)
        self._restarts = Restarts()
        self._child: HelperProcess | None = None
        self._fixed: tuple[FixedFacts, ...] | None = None
        """The facts about the GPUs that never change; None until the process has opened the driver."""
        self._greeted = False
        self._refusal: str | None = None
        """The reason why a later process could not open the driver, although an earlier one could."""
        self._number = 0
        self._only: Collection[int] | None = None
        self._is_ahead = False
        """True if ``read_ahead`` sent the last question, and no reading waits for its answer."""
        self._asked_at = 0.0
        self._where = directory_of("pynvml")
        if self._where is not None:
            self._start(self._where)

    def read(self, only: Collection[int] | None = None) -> list[Gpu]:
        """Return all GPUs as they are now, or those with the indices ``only``. Raises GpusUnknown."""
        return self._with_child(lambda child: self._ask(child, only))

    def read_ahead(self) -> tuple[float, list[Gpu]] | None:
        """Ask for all GPUs without waiting. Raises GpusUnknown.

        Return (time, GPUs) if an answer has come since the last call, else None. The time is that of its question, in
        monotonic seconds.
        """
        return self._with_child(self._ask_ahead)

    def _with_child(self, ask: Callable[[HelperProcess], _Answer]) -> _Answer:
        """Ask the process. If it has ended, or sent an impossible answer, start it again. Raises GpusUnknown."""
        if self._where is None:
            raise GpusAbsent("the package nvidia-ml-py is not installed")
        if self._child is None:
            self._start_again(self._where)
        if self._child is None:
            raise GpusUnknown(self._refusal) if self._refusal else GpusLate("the process that asks it is gone")
        try:
            self._open(self._child)
            return ask(self._child)
        except EOFError:
            self._log.warning("the process that asks NVML ended (%s): it is started again", self.close())
            self._start_again(self._where)
            raise GpusLate("the process that asks it ended") from None
        except ValueError as e:
            self.close()
            self._log.error("the process that asks NVML said what cannot be (%s): killed, and started again", e)
            self._start_again(self._where)
            raise GpusLate("the process that asks it said what cannot be") from None

    def close(self) -> str:
        """Kill the process. Return a text that says how it ended. If it hangs in the driver, it is waited for
        ``LEAVE_S`` only."""
        self._breaker.forget()
        child, self._child, self._fixed = self._child, None, None
        if child is None:
            return ""
        child.kill()
        return child.how if child.wait(LEAVE_S) else "it does not die"  # before the driver lets it go

    def _start_again(self, where: str) -> None:
        """Start a new process if enough time has passed since the last start."""
        if self._restarts.next(time.monotonic()):
            self._start(where)

    def _start(self, where: str) -> None:
        try:
            command = [sys.executable, "-I", "-S", str(_PROGRAM), where, directory_of_titles(), _ROOT]
            self._child = HelperProcess(command, helper_environment(), most=MAX_ANSWER)
        except OSError as e:
            self._log.error("the process that asks NVML cannot be started: %s; trying again", e.strerror or e)

    def _open(self, child: HelperProcess) -> None:
        """Read the greeting of the process if that has not been done. Raises GpusUnknown, EOFError, BadAnswer."""
        if self._fixed is not None:
            return
        wait_s, self._start_s = self._start_s, 0.0
        if (frame := child.receive(wait_s)) is None:
            raise GpusUnknown(self._refusal) if self._refusal else GpusLate("the driver is still being opened")
        greeting = read_greeting(frame)
        self._refusal = greeting.absent
        if greeting.absent is not None:
            self.close()
            raise GpusUnknown(greeting.absent) if self._greeted else GpusAbsent(greeting.absent)
        self._fixed, self._greeted = greeting.gpus, True

    def _ask(self, child: HelperProcess, only: Collection[int] | None) -> list[Gpu]:
        late = GpusLate(f"the driver has not answered within {self._timeout_s:g} s")
        # Wait for the answer to a question of `_ask_ahead`, but ask again: that answer may be older than this call.
        if self._breaker.is_out and self._hear(child, self._timeout_s if self._is_ahead else 0.0) is None:
            if self._is_ahead:
                self._is_ahead = False
                self._breaker.gave_up()
            raise late
        asking = self._breaker.next(time.monotonic())
        if asking is BreakerState.OPEN:
            raise late
        self._send(child, asking, only)
        if asking is BreakerState.HALF_OPEN:
            raise late
        answer = self._hear(child, self._timeout_s)
        if answer is None:
            self._breaker.gave_up()
            raise late
        if answer.error is not None:
            raise GpusUnknown(answer.error)
        return answer.gpus

    def _ask_ahead(self, child: HelperProcess) -> tuple[float, list[Gpu]] | None:
        if self._breaker.is_out:
            answer, was_ahead = self._hear(child, 0.0), self._is_ahead
            if answer is None or not was_ahead:
                return None
            if answer.error is not None:
                raise GpusUnknown(answer.error)
            return self._asked_at, answer.gpus
        asking = self._breaker.next(time.monotonic())
        if asking is not BreakerState.OPEN:
            self._send(child, asking, None)
            self._is_ahead = asking is BreakerState.CLOSED
        return None

    def _send(self, child: HelperProcess, asking: BreakerState, only: Collection[int] | None) -> None:
        self._number += 1
        self._only, self._is_ahead, self._asked_at = only, False, time.monotonic()
        child.send(encode_question(self._number, only))
        self._breaker.asked(asking)

    def _hear(self, child: HelperProcess, within_s: float) -> GpuReading | None:
        """Return the next answer; None if none comes within ``within_s`` seconds.

        An answer that comes too late is of use, too: it shows how fast the driver is."""
        frame = child.receive(within_s)
        if frame is None:
            return None
        assert self._fixed is not None
        answer = read_answer(frame, self._number, self._only, self._fixed)
        self._breaker.answered(answer.took_s, time.monotonic())
        return answer


def read_once() -> list[Gpu]:
    """Return all GPUs, for a command, which can wait. Raises GpusUnknown."""
    quiet = logging.Logger(__name__)  # its lines go nowhere, because the exception has the message
    quiet.addHandler(logging.NullHandler())
    reader = GpuReader(quiet, timeout_s=ONCE_S, start_s=ONCE_S)
    try:
        return reader.read()
    finally:
        reader.close()
