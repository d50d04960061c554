"""A thread that does tasks, for one party after the other: a party with many tasks delays another's one by one task."""

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

T = TypeVar("T")
STACK = 16 << 20
"""Bytes of stack of the thread: a grammar may be deep."""


class Turns(Generic[T]):
    """Tasks in the order in which they are to be done. Pure.

    A party is a client connection, or a key with all its connections. Parties take turns. The tasks of one party are
    done in the order in which they came.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[T]] = {}
        self._last: int | None = None
        """Whose turn it was last."""

    def put(self, party: int, task: T) -> None:
        self._waiting.setdefault(party, deque()).append(task)

    def take(self, held: Collection[int] = ()) -> tuple[int, T] | None:
        """Take out the next task, and whose it is; None if there is none. Parties in ``held`` are left out."""
        if self._last in self._waiting:
            # Only now: parties that came while its task was being done go before it.
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

    do  does a task, given the party whose turn it is; never raises
    """

    def __init__(self, name: str, do: Callable[[int, T], None]) -> None:
        self._name, self._do = name, do
        self._turns: Turns[T] = Turns()
        self._changed = threading.Condition()
        self._held: frozenset[int] = frozenset()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        """Start the thread. The stack size is a setting of the process: no other thread may be started meanwhile."""
        before = threading.stack_size(STACK)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        threading.stack_size(before)

    def put(self, party: int, task: T) -> None:
        with self._changed:
            self._turns.put(party, task)
            self._changed.notify()

    def hold(self, parties: frozenset[int]) -> None:
        """Replace the set of parties whose tasks wait until they are held no more."""
        with self._changed:
            self._held = parties
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the task that it is doing. The others are forgotten."""
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
