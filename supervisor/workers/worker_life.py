"""The life of one worker: its desired state, its present state, and the transition that each event causes. Pure.

Orders (``start``, ``stop``, ...) set the desired state. The last order counts. Each order and each event returns a
``Transition`` with the actions that its caller has to carry out. ``lifecycle`` holds the table of transitions.

A worker whose process ends although nobody asked for that is started again after a pause. The restart limit counts such
ends in a sliding window, whatever the uptime: a model that crashes 1.5 s after each start must not be restarted for
ever. An end that a poisoned request has caused does not count, and neither does one because the model's files are away
with their file system. The limit ends in ``failed`` for this worker alone.
Models are independent, so the supervisor itself does not give up, unlike an OTP supervisor.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from supervisor.workers.lifecycle import (
    AT_REST,
    GOING_DOWN,
    TRANSITIONS,
    Event,
    IllegalTransition,
    LifecycleAction,
    WorkerState,
)

if TYPE_CHECKING:  # the configuration imports this module, also for commands that start nothing
    from supervisor.workers.exits import ExitReport


AWAY_S, AWAY_MAX_S = 5.0, 300.0
"""Least and greatest pause in seconds before a model whose files could not be read is tried again. It doubles."""


class Desired(StrEnum):
    """The state that the last order asked for. A worker that is on its way to another state gets there first."""

    UP = "up"
    """A process. It is started again when it ends."""
    DOWN = "down"
    """No process, until somebody starts the model."""
    ON_DEMAND = "on demand"
    """Asleep or without a process, until a request needs the worker."""


@dataclass(frozen=True)
class RestartPolicy:
    """When to start a worker again after its process ended unasked.

    limit      unexpected ends within the window that lead to ``failed``
    window_s   seconds
    initial_s  pause before the second try, doubled for each further one. The first try comes at once
    max_s      longest pause
    jitter     share by which a pause is lengthened at random, so that several models do not return in step
    """

    limit: int = 5
    window_s: float = 60.0
    initial_s: float = 0.5
    max_s: float = 30.0
    jitter: float = 0.2


class RestartHistory:
    """The recent unexpected ends of one worker."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._failures: deque[float] = deque()
        self._away = 0
        """How often in a row the model's files could not be read."""

    def failed(self, now: float, chance: float) -> float | None:
        """Record a failure. Return the seconds to wait before the next try, or None to give up.

        chance  a draw from [0, 1)
        """
        policy = self.policy
        while self._failures and now - self._failures[0] > policy.window_s:
            self._failures.popleft()
        self._failures.append(now)
        count = len(self._failures)
        if count >= policy.limit:
            return None
        if count == 1:
            return 0.0
        pause = min(policy.max_s, policy.initial_s * 2.0 ** (count - 2))
        return pause * (1.0 + policy.jitter * chance)

    def away(self, chance: float) -> float:
        """Record that the model's files could not be read. Return the seconds to wait before the next try.

        Such ends are no failures of the model. They never lead to giving up: a share may be away for days.
        """
        pause = AWAY_S * 2.0 ** min(self._away, 10)
        self._away += 1
        return min(AWAY_MAX_S, pause * (1.0 + self.policy.jitter * chance))

    def loaded(self) -> None:
        """Note that the model's files were read."""
        self._away = 0

    def forgive(self) -> None:
        """Forget all failures, because somebody has started or stopped the model."""
        self._failures.clear()
        self._away = 0

    @property
    def recent(self) -> int:
        """Return how many failures were in the window at the last one."""
        return len(self._failures)


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of a worker's story.

    at       monotonic time in seconds
    actions  what the caller has to carry out, in this order
    """

    at: float
    before: WorkerState
    event: Event
    after: WorkerState
    cause: str
    actions: tuple[LifecycleAction, ...]


class Ended(NamedTuple):
    """The transition that the end of a process causes. ``what_next`` describes the next try for the log; it is empty
    if the supervisor had asked for the end."""

    transition: Transition
    what_next: str


class WorkerLife:
    """The desired state, the present state and the recent story of one worker. Only its methods change them.

    worker  the worker's name, for error messages
    now     monotonic seconds: since when the worker is stopped
    """

    def __init__(self, worker: str, now: float, policy: RestartPolicy) -> None:
        self.worker = worker
        self.state = WorkerState.STOPPED
        self.since = now
        """Monotonic time in seconds since which the worker is in this state."""
        self.desired = Desired.DOWN
        self.unload_cause: str | None = None
        """The reason for which the worker was unloaded. None if another order came later."""
        self.let_go = False
        """Whether an order has unloaded the worker, and it has neither been ready nor stopped since."""
        self.impatient = False
        """Whether the last order that ended a process was to stop it as fast as possible."""
        self.pause_s = 0.0
        """Seconds of backoff after the last end of a process."""
        self.history = RestartHistory(policy)
        self.story: deque[Transition] = deque(maxlen=50)

    # --- orders -------------------------------------------------------------------------------------------------

    def start(self, now: float, cause: str) -> Transition:
        """Order the worker up. A worker that is on its way down is started again when it has stopped."""
        self._want(Desired.UP)
        return self.apply(Event.START, now, cause)

    def restart(self, now: float, cause: str) -> Transition:
        """Order a new process: the present one drains and stops, then the next one is started."""
        if self.state in (*AT_REST, WorkerState.BACKOFF):
            return self.start(now, cause)
        self._want(Desired.UP)
        self.impatient = False
        return self.apply(Event.STOP, now, cause)

    def stop(self, now: float, cause: str, *, at_once: bool = False) -> Transition | None:
        """Order the worker down. Return None if it is already being stopped as fast as possible.

        at_once  do not wait for the worker's requests
        """
        self._want(Desired.DOWN)
        if at_once and self.impatient and self.state is WorkerState.STOPPING:
            return None  # to begin the stop ladder anew would put SIGKILL off
        self.impatient = at_once
        return self.apply(Event.STOP_NOW if at_once else Event.STOP, now, cause)

    def unload(self, now: float, cause: str) -> Transition:
        """Order a ready worker down until a request needs it."""
        self._want(Desired.ON_DEMAND, cause)
        self.impatient = False
        return self.apply(Event.UNLOAD, now, cause)

    def let_go_of(self, now: float, cause: str) -> Transition | None:
        """Order the worker down until a request needs it, whatever it does now. Its requests finish first.

        Return None if it is unloaded already.
        """
        if self.state is WorkerState.UNLOADED:
            return None
        self._want(Desired.ON_DEMAND, cause)
        self.let_go, self.impatient = True, False
        at_rest = self.state in AT_REST
        return self.apply(Event.ON_DEMAND if at_rest else Event.STOP, now, cause)

    def sleep(self, now: float, cause: str) -> Transition:
        """Order a ready worker to sleep until a request needs it."""
        self._want(Desired.ON_DEMAND, cause)
        return self.apply(Event.SLEEP, now, cause)

    def no_room(self, now: float, cause: str) -> Transition:
        """Let a worker that was to wake sleep on, because there is no room. The next request tries again."""
        self._want(Desired.ON_DEMAND, cause)
        return self.apply(Event.NO_ROOM, now, cause)

    def rest(self, now: float, cause: str) -> Transition:
        """Let a request start this worker, which is stopped or has failed."""
        self._want(Desired.ON_DEMAND)
        return self.apply(Event.ON_DEMAND, now, cause)

    def _want(self, desired: Desired, unload_cause: str | None = None) -> None:
        self.desired, self.unload_cause = desired, unload_cause
        if desired is Desired.DOWN:
            self.let_go = False

    # --- events -------------------------------------------------------------------------------------------------

    def ended(self, report: "ExitReport", now: float, *, blames_request: bool, chance: float) -> Ended:
        """Apply the end of a process, or a start that failed. Return what the caller has to carry out.

        blames_request  whether one request surely caused the end. Such ends do not count towards the restart limit: if
                        they did, a few requests could take the model away from all clients
        chance          a draw from [0, 1), for the pause before the next try
        """
        if report.reason == "asked":
            return Ended(self.apply(Event.DIED, now, report.message), "")
        if self.state in (WorkerState.ASLEEP, WorkerState.FALLING_ASLEEP) and self.desired is Desired.ON_DEMAND:
            self.unload_cause = f"its process ended while it slept: {report.message}"
        pause, why = None, ""
        if report.retry and blames_request:
            pause, why = 0.0, ", a request is to blame"
        elif report.reason == "away":
            pause = self.history.away(chance)
        elif report.retry:
            pause = self.history.failed(now, chance)
        what_next = f"next try in {pause:.1f} s{why}" if pause is not None else "not tried again"
        if self.state in GOING_DOWN:
            what_next = "it was being stopped"
        elif pause is not None and self.state in (WorkerState.ASLEEP, WorkerState.FALLING_ASLEEP):
            what_next = "the next request starts it"
        self.pause_s = pause or 0.0
        event = Event.DIED if pause is not None else Event.DIED_FOR_GOOD
        return Ended(self.apply(event, now, report.message), what_next)

    def settle(self, now: float) -> Transition | None:
        """Go from ``stopped`` or ``asleep`` towards the desired state, once a process has ended or sleeps. Return None
        if there is nothing to do."""
        if self.state is WorkerState.ASLEEP and self.desired is Desired.UP:
            return self.apply(Event.START, now, "woken again")
        if self.state is not WorkerState.STOPPED or self.desired is Desired.DOWN:
            return None
        if self.desired is Desired.UP:
            return self.apply(Event.START, now, "started again")
        return self.apply(Event.ON_DEMAND, now, self.unload_cause or "lazy")

    def apply(self, event: Event, now: float, cause: str = "") -> Transition:
        """Move to the next state. Raise IllegalTransition, with the story, if the event cannot happen in this state."""
        row = TRANSITIONS.get((self.state, event))
        if row is None:
            message = "\n".join(f"  {s.at:.3f} {s.before} -> {s.after} on {s.event} ({s.cause})" for s in self.story)
            raise IllegalTransition(f"{self.worker}: {event} in state {self.state}; its story:\n{message}")
        before, (self.state, actions) = self.state, row
        if self.state is not before:
            self.since = now
        if event is Event.LOADED:
            self.history.loaded()
            self.let_go = False
        if LifecycleAction.FORGIVE in actions:
            self.history.forgive()
        if self.comes_again:  # new requests wait for the next process
            actions = tuple(LifecycleAction.HOLD_NEW if a is LifecycleAction.REFUSE_NEW else a for a in actions)
        transition = Transition(now, before, event, self.state, cause, actions)
        self.story.append(transition)
        return transition

    @property
    def comes_again(self) -> bool:
        """Return whether requests may wait for the worker, even while it is on its way down."""
        return self.desired is not Desired.DOWN and self.state is not WorkerState.FAILED
