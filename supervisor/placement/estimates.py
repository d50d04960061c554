"""Ask whether models can be loaded, and how much GPU memory their workers will need.

A separate process (``ESTIMATING``) reads the models' directories. The supervisor starts one process for each question,
and kills a process that takes too long. The process also dies with the supervisor.
"""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from protocol.process.asked_process import start_asked
from protocol.process.helper_environment import helper_environment
from protocol.process.masking import masked_values
from protocol.process.worker_spec import EngineSpec
from supervisor.placement.gpu_shares import Needs
from supervisor.timers import Timer, Timers
from supervisor.worker_modules import ESTIMATING

ESTIMATE_S = 20.0
"""Seconds that one answer may take. Reading the headers of a 70B model takes some milliseconds, from a cold disk a
second."""
CHECK_S = 0.05
"""Seconds between two looks of a waiting command for new answers."""
MAX_ANSWER = 1 << 20
ESTIMATED = frozenset({"exllamav2"})
"""Engines whose memory the estimating process can estimate."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one model.

    sampling   the model's sampling defaults
    forced     the model's forced values of options
    counts     numbers of GPUs for which the needs are wanted, the likeliest first
    installed  whether it is a fault that the engine's packages are not installed on this machine
    template   whether the chat template is to be tried
    """

    spec: EngineSpec
    sampling: Mapping[str, Any] = field(default_factory=dict)
    forced: Mapping[str, Any] = field(default_factory=dict)
    counts: Sequence[int] = (1,)
    installed: bool = False
    template: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason why a model cannot be loaded.

    key      the key of the model in models.yaml that has to change
    machine  whether only this machine lacks something, so that the model may load on another one
    """

    key: str
    message: str
    machine: bool = False


@dataclass(frozen=True, slots=True)
class Estimated:
    """An answer. It has exactly one of ``needs``, ``unknown`` and ``faults``.

    needs      the memory that the model needs, by number of GPUs
    unknown    why the memory cannot be estimated
    faults     why the model cannot be loaded
    retry      with ``faults``: whether another try may help
    away       with ``faults``: whether the model's files cannot be read now, and may be there later
    unchecked  the parts of the model that cannot be checked here, because a package is not installed, with the remedy
    template   the file of the directory that holds the chat template; "" without one, None if that is not known
    understood  how the model calls tools, and what its chat template makes of conversations, for people; None if it was
                not asked for, or there is no chat template
    sleep_bytes  host memory that the model takes while it sleeps; 0 if it cannot sleep, None if that is not known
    sampling   what the model's generation_config.json recommends, as keys of ``sampling``
    """

    needs: Mapping[int, Needs] | None = None
    unknown: str | None = None
    faults: tuple[Fault, ...] = ()
    retry: bool = False
    away: bool = False
    unchecked: str | None = None
    sleep_bytes: int | None = None
    template: str | None = None
    understood: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Return the reason of an ``ExitReport`` about the faults."""
        return "away" if self.away else "unreadable" if self.retry else "config"

    @property
    def error(self) -> str | None:
        """Return the first fault's message, in the words that a worker would use. None without a fault."""
        return self.faults[0].message if self.faults else None


def _not_read(message: str, *, away: bool = False) -> Estimated:
    return Estimated(faults=(Fault("model_dir", message),), retry=True, away=away)


_LATE = _not_read(f"its files could not be read within {ESTIMATE_S:.0f} s: is its file system there?", away=True)


def _lost(code: int) -> Estimated:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return _not_read(f"the process that reads its files ended ({how}) without an answer")


@dataclass
class _Running:
    process: "subprocess.Popen[bytes]"
    pidfd: int
    answer: int
    done: Callable[[Estimated], None] | None
    timer: Timer | None = None


class Estimator:
    """The questions that have no answer yet. Runs on the supervisor's one thread.

    ``descriptor`` is readable while ``ended`` has an answer to take in.
    """

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._epoll = select.epoll()
        self._running: dict[str, _Running] = {}
        self._by_pidfd: dict[int, _Running] = {}

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def ask(self, worker: str, question: Question, done: Callable[[Estimated], None]) -> None:
        """Start a process that answers a question, and call ``done`` later, once, with the answer.

        Raises OSError if the system has no process or descriptor left.
        """
        self.forget(worker)
        process, answer = start([question])
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            os.close(answer)
            raise
        running = _Running(process, pidfd, answer, done)
        self._running[worker] = self._by_pidfd[pidfd] = running
        self._epoll.register(pidfd, select.EPOLLIN)
        running.timer = self._timers.at(time.monotonic() + ESTIMATE_S, lambda: self._too_late(running))

    def forget(self, worker: str) -> bool:
        """Cancel a worker's question. Return whether there was one without an answer."""
        running = self._running.pop(worker, None)
        if running is None or running.done is None:
            return False
        running.done = None
        running.process.kill()
        return True

    def ended(self) -> None:
        """Take in the answers of the processes that have ended."""
        for pidfd, _ in self._epoll.poll(0):
            running = self._by_pidfd.pop(pidfd)
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            code = running.process.wait()
            self._tell(running, (answers(running.answer) or [_lost(code)])[0])

    def _too_late(self, running: _Running) -> None:
        running.process.kill()  # on a dead network file system that may fail, too, so its end is not awaited
        self._tell(running, _LATE)

    def _tell(self, running: _Running, estimated: Estimated) -> None:
        if running.timer is not None:
            running.timer.cancel()
        done, running.done = running.done, None
        for worker in [worker for worker, r in self._running.items() if r is running]:
            del self._running[worker]
        if done is not None:
            done(estimated)


def ask_now(questions: Sequence[Question]) -> list[Estimated]:
    """Return the answers, in the order of the questions, for a command that waits. Raises OSError."""
    found: list[Estimated] = []
    while len(found) < len(questions):  # if one question ends the process, another process gets the rest
        process, answer = start(questions[len(found) :])
        lost = _wait(process, answer)
        found += answers(answer)[: len(questions) - len(found)]
        if len(found) < len(questions):
            found.append(lost)
    return found


def _wait(process: "subprocess.Popen[bytes]", answer: int) -> Estimated:
    """Wait until the process has ended. It is killed when the next answer takes too long.

    Returns the answer to the first question that the process has left unanswered.
    """
    size, deadline = 0, time.monotonic() + ESTIMATE_S
    while True:
        try:
            return _lost(process.wait(CHECK_S))
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if (grown := os.fstat(answer).st_size) > size:
            size, deadline = grown, now + ESTIMATE_S
        elif now > deadline:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            return _LATE


def start(questions: Sequence[Question]) -> "tuple[subprocess.Popen[bytes], int]":
    """Start a process that answers questions. Return it, and the descriptor that has its answers when it has ended.

    Call this on the main thread only, since the process lives as long as the thread that started it. Raises OSError.
    """
    asked = [asdict(question) for question in questions]
    # the module is found beside this package, whatever the current directory is
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    return start_asked([*ESTIMATING, str(os.getpid())], asked, helper_environment(PYTHONPATH=path))


def answers(descriptor: int) -> list[Estimated]:
    """Return the answers that a process has left, and close the descriptor."""
    with open(descriptor, "rb") as f:
        f.seek(0)
        return [_read(line) for line in f.read(MAX_ANSWER).split(b"\n")[:-1]]  # a last line without its end is cut off


def _read(line: bytes) -> Estimated:
    reply: dict[str, Any] = masked_values(json.loads(line))
    always: dict[str, Any] = {key: reply.get(key) for key in ("unchecked", "sleep_bytes", "template", "understood")}
    always["sampling"] = reply.get("sampling", {})
    if "needs" in reply:
        return Estimated(needs={int(count): Needs(**parts) for count, parts in reply["needs"].items()}, **always)
    faults, away = tuple(Fault(**fault) for fault in reply.get("faults", ())), bool(reply.get("away"))
    return Estimated(unknown=reply.get("unknown"), faults=faults, retry=away, away=away, **always)
