"""The helper processes beside the supervisor: watched through one descriptor, and started again when they end.

Each keeper of a helper says how it is started, what its records mean, and what its end means. The rest is here, in
``protocol.process.helper_process`` (the process and its link), and in ``supervisor.ports.sockets`` (the pauses).
"""

import os
import select
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from protocol.process.birth import helper_environment
from protocol.process.helper_process import HelperProcess
from supervisor.ports.sockets import Restarts
from supervisor.workers.orphans import MARK

AT_ONCE: Final = 64
"""Records of one helper that are read before other helpers have their turn."""
Child = TypeVar("Child", bound=HelperProcess)


class HelperWatch:
    """Helper processes that run. Use it on one thread only.

    descriptor  is readable when ``hear`` has something to do
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.descriptor = self._epoll.fileno()
        self._watched: dict[int, tuple[HelperProcess, Callable[[bytes], object], Callable[[], object]]] = {}
        """By each of the two descriptors of a process."""

    def add(self, process: Child, take: Callable[[Child, bytes], object], ended: Callable[[Child], object]) -> None:
        """Watch a process, until it has ended and was collected.

        take   called with each record
        ended  called when the process was collected, after its last record
        """
        watched = process, partial(take, process), partial(ended, process)
        for descriptor in (process.pidfd, process.descriptor):
            self._watched[descriptor] = watched
            self._epoll.register(descriptor, select.EPOLLIN)

        def on_waiting(waiting: bool) -> None:
            self._epoll.modify(process.descriptor, select.EPOLLIN | (select.EPOLLOUT if waiting else 0))

        process.on_waiting = on_waiting
        on_waiting(process.unsent > 0)

    def hear(self) -> None:
        """Hand on what the helpers say, send what waited for room, and collect those that have ended."""
        for descriptor, _ in self._epoll.poll(0):
            if (watched := self._watched.get(descriptor)) is None:
                continue  # it was collected in this call
            process, take, ended = watched
            is_over = descriptor == process.pidfd
            process.flush()
            try:
                heard = 0
                while (is_over or heard < AT_ONCE) and (record := process.receive()) is not None:
                    heard += 1
                    take(record)
            except (EOFError, ValueError):
                process.close()
                process.kill()  # it is ending, which this does not change, or it says what cannot be
            if is_over:
                process.wait()
                self._watched = {key: each for key, each in self._watched.items() if each is not watched}
                ended()


class Helper:
    """A helper process that there always is: when it has ended, another one is started after a pause.

    process  the process; None while there is none

    start     starts a process. Raises OSError
    take      called with each record
    ended     called with a process that has ended by itself, and was collected
    restarts  the pauses between starts
    """

    def __init__(
        self,
        watch: HelperWatch,
        start: Callable[[], HelperProcess],
        take: Callable[[bytes], object],
        ended: Callable[[HelperProcess], object],
        restarts: Restarts,
    ) -> None:
        self.process: HelperProcess | None = None
        self._watch = watch
        self._start, self._take, self._ended = start, take, ended
        self._restarts = restarts

    def check(self, now: float) -> None:
        """Start the process if there is none and the pause is over. Call this again and again. Raises OSError."""
        if self.process is None and self._restarts.next(now):
            self.process = self._start()
            self._watch.add(self.process, self._on_record, self._on_end)

    def send(self, record: bytes) -> None:
        """Send a record. It is lost if there is no process, or if the process ends before it reads the record."""
        if self.process is not None:
            self.process.send(record)

    def part(self) -> HelperProcess | None:
        """Have no process any more, and return the one that there was. ``check`` starts another one at once."""
        process, self.process = self.process, None
        self._restarts.forget()
        return process

    def end(self) -> None:
        """Kill the process and wait for its end."""
        if (process := self.part()) is not None:
            process.kill()
            process.wait()

    def _on_record(self, process: HelperProcess, record: bytes) -> None:
        if process is self.process:
            self._take(record)

    def _on_end(self, process: HelperProcess) -> None:
        if process is self.process:
            self.process = None
            self._ended(process)


def writer_environment() -> dict[str, str]:
    """Return the environment of a process that writes for the supervisor.

    The process finds this package whatever the current directory is.

    Its mark is not that by which the next supervisor finds and kills what a dead one has left. The writer ends by
    itself, and would otherwise be killed before it has written the last counts.
    """
    here = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    return helper_environment(**{"PYTHONPATH": path, MARK: "writer"})
