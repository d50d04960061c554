"""A thread that does tasks of several parties in turns. A party with many tasks delays another party by one task
only."""

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

T = TypeVar("T")
STACK = 16 << 20
"""Bytes of stack of the thread, because a grammar may be nested deeply."""


class Turns(Generic[T]):
    """The order in which tasks are done. This class has no thread and no lock.

    A party is a client connection, or a key with all its connections. Parties take turns. The tasks of one party are
    done in the order in which they came.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[T]] = {}
        self._last: int | None = None
        """The party that had the last turn."""

    def put(self, party: int, task: T) -> None:
        self._waiting.setdefault(party, deque()).append(task)

    def take(self, held: Collection[int] = ()) -> tuple[int, T] | None:
        """Take out the next task, with its party; return None if there is none. Parties in ``held`` are skipped."""
        if self._last in self._waiting:
            # The last party moves to the end only now. So parties that came while its task was being done go before it.
            self._waiting[self._last] = self._waiting.pop(self._last)
        party = next((party for party in self._waiting if party not in held), None)
        if party is None:
            return None
        self._last = party
        task = self._waiting[party].popleft()
        if not self._waiting[party]:
            del self._waiting[party]
        return party, task


class TurnsThread(Generic[T]):
    """Does tasks in a thread.

    do  does a task, given the party whose turn it is; it must not raise
    """

    def __init__(self, name: str, do: Callable[[int, T], None]) -> None:
        self._name, self._do = name, do
        self._turns: Turns[T] = Turns()
        self._changed = threading.Condition()
        self._held: frozenset[int] = frozenset()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        """Start the thread. No other thread may be started meanwhile, because the stack size is a setting of the
        process."""
        before = threading.stack_size(STACK)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        threading.stack_size(before)

    def put(self, party: int, task: T) -> None:
        with self._changed:
            self._turns.put(party, task)
            self._changed.notify()

    def hold(self, parties: frozenset[int]) -> None:
        """Replace the set of held parties. Their tasks wait until the parties are no longer held."""
        with self._changed:
            self._held = parties
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its present task, and forget the other tasks."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            self._do(*turn)

    def _next(self) -> tuple[int, T] | None:
        with self._changed:
            while not self._closing:
                if (turn := self._turns.take(self._held)) is not None:
                    return turn
                self._changed.wait()
        return None
