"""The life of one worker: its desired state, its present state, and the transition that each event causes. Pure.

Orders (``start``, ``stop``, ...) set the desired state. The last order counts. Each order and each event returns a
``Transition`` with the actions that its caller has to carry out. ``TRANSITIONS`` is the table of transitions.

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

from protocol.process.worker_spec import Reading, WorkerPhase

if TYPE_CHECKING:
    from supervisor.workers.exits import ExitReport


# The states of a worker and the table of transitions between them. Pure. ``WorkerLife`` applies the table.
#
# A pair of state and event that is not in the table is a bug, and raises IllegalTransition. A pair that a race can
# cause has a row of its own. Example: READY was on its way when an operator stopped the model.


class WorkerState(StrEnum):
    STOPPED = "stopped"
    """No process until somebody starts the model."""
    STARTING = "starting"
    """The process has been spawned and has not said HELLO yet."""
    LOADING = "loading"
    """The worker reads weights and warms up."""
    READY = "ready"
    """The worker is warmed up, and computes requests."""
    FALLING_ASLEEP = "falling_asleep"
    """The worker gives its GPU memory back. Its weights stay in host memory, and its process lives."""
    ASLEEP = "asleep"
    """The worker's process lives without GPU memory. The next request wakes it."""
    WAKING = "waking"
    """The worker waits for room on its GPU, or copies its weights back."""
    DRAINING = "draining"
    """The worker takes no new requests, and finishes the ones that it has."""
    STOPPING = "stopping"
    """The worker is being ended by the stop ladder: SHUTDOWN, SIGTERM, SIGKILL."""
    BACKOFF = "backoff"
    """The process ended although nobody asked for that. It is started again after a pause. Requests wait."""
    UNLOADED = "unloaded"
    """No process. The next request starts one."""
    FAILED = "failed"
    """The model cannot be loaded as configured, or the worker failed too often. An operator has to start it."""


AT_REST = (WorkerState.STOPPED, WorkerState.UNLOADED, WorkerState.FAILED)
"""The states in which a worker has no process, and gets none without an order or a request."""
ON_DEMAND = (WorkerState.UNLOADED, WorkerState.ASLEEP)
"""The states in which the next request brings the worker up."""
COMING_UP = (WorkerState.STARTING, WorkerState.LOADING, WorkerState.WAKING, WorkerState.BACKOFF)
"""The states in which a worker is on its way to READY."""
GOING_DOWN = (WorkerState.DRAINING, WorkerState.STOPPING)


class Event(StrEnum):
    START = "start"
    """An operator, autostart or a request orders the worker up."""
    STOP = "stop"
    """An operator, or the supervisor's own end, orders the worker down. Its requests finish first."""
    STOP_NOW = "stop now"
    """An operator, or the supervisor's own end, orders the worker down at once."""
    HELLO = "hello"
    """The worker process has connected."""
    LOADED = "loaded"
    """The worker said READY."""
    DRAINED = "drained"
    """The last request of a draining worker has ended, or the time for draining has."""
    DIED = "died"
    """The process is gone and may be started again."""
    DIED_FOR_GOOD = "died for good"
    """The process is gone, and its exit or the restart limit forbids another try."""
    ON_DEMAND = "on demand"
    """The worker has no process, and a request may start one from now on."""
    UNLOAD = "unload"
    """The worker is idle, and its ttl is over or another model needs its memory."""
    SLEEP = "sleep"
    """The worker is idle, and an operator, its ``sleep_after`` or another model's need orders it to sleep."""
    SLEPT = "slept"
    """The worker said that it sleeps."""
    CANNOT_SLEEP = "cannot sleep"
    """The worker said why it cannot sleep. It is ended instead."""
    WOKE = "woke"
    """The worker said that it is awake."""
    NO_ROOM = "no room"
    """There is no room on the GPU of a worker that was to wake."""
    BACKOFF_OVER = "backoff over"
    """The pause before the next try has passed."""


class LifecycleAction(StrEnum):
    """What the fleet has to do after a transition."""

    BEGIN_START = "begin start"
    """Begin the start of a process of a new generation."""
    OPEN = "open"
    """Give the worker the requests that wait."""
    REFUSE_NEW = "refuse new"
    """Answer new requests with the error of the worker's state. ``WorkerLife`` returns HOLD_NEW in its place if the
    worker will be started again."""
    ACCEPT_NEW = "accept new"
    """Queue new requests."""
    HOLD_NEW = "hold new"
    """Queue new requests for the worker's next process."""
    REST = "rest"
    """Queue new requests. The first one starts the worker."""
    WATCH_DRAIN = "watch drain"
    """Report DRAINED when no request is left or the time for draining is over."""
    PUT_TO_SLEEP = "put to sleep"
    """Tell the worker to sleep."""
    BEGIN_WAKE = "begin wake"
    """Find room on the worker's GPU, then tell the worker to wake."""
    TURN_AWAY = "turn away"
    """End the requests that wait for the model, because there is no room, if no worker of it will serve. Queue new
    ones. The first one tries again to wake the worker."""
    CLIMB = "climb"
    """Begin the stop ladder."""
    END_ACTIVE = "end active"
    """Take the requests from the process that has ended."""
    END_WAITING = "end waiting"
    """End the requests that wait for the model, with the error of its state, if no worker of the model will serve."""
    ARM_BACKOFF = "arm backoff"
    """Report BACKOFF_OVER after the pause."""
    FORGIVE = "forgive"
    """Forget earlier failures and a pending retry."""


_S, _E, _X = WorkerState, Event, LifecycleAction
_STOPS, _DEATHS = (_E.STOP, _E.STOP_NOW), (_E.DIED, _E.DIED_FOR_GOOD)
_START = (_X.FORGIVE, _X.ACCEPT_NEW, _X.BEGIN_START)
_REFUSE = (_X.REFUSE_NEW, _X.END_WAITING)
_GONE = (_X.REFUSE_NEW, _X.END_ACTIVE)
_Row = tuple[tuple[WorkerState, ...], tuple[Event, ...], WorkerState | None, tuple[LifecycleAction, ...]]

ROWS: tuple[_Row, ...] = (
    # From the order to READY. An operator need not wait for the pause of a backoff.
    ((_S.STOPPED, _S.UNLOADED, _S.BACKOFF, _S.FAILED), (_E.START,), _S.STARTING, _START),
    ((_S.STARTING,), (_E.HELLO,), _S.LOADING, ()),
    ((_S.LOADING,), (_E.LOADED,), _S.READY, (_X.OPEN,)),
    ((_S.BACKOFF,), (_E.BACKOFF_OVER,), _S.STARTING, (_X.BEGIN_START,)),
    # From READY to the end of the process.
    ((_S.READY,), (_E.STOP,), _S.DRAINING, (*_REFUSE, _X.WATCH_DRAIN)),
    ((_S.DRAINING,), (_E.DRAINED,), _S.STOPPING, (_X.CLIMB,)),
    ((_S.READY, _S.DRAINING), (_E.STOP_NOW,), _S.STOPPING, (*_REFUSE, _X.CLIMB)),
    ((_S.STARTING, _S.LOADING, _S.FALLING_ASLEEP, _S.ASLEEP, _S.WAKING), _STOPS, _S.STOPPING, (*_REFUSE, _X.CLIMB)),
    # The ladder begins again, with shorter times.
    ((_S.STOPPING,), (_E.STOP_NOW,), _S.STOPPING, (*_REFUSE, _X.CLIMB)),
    ((_S.DRAINING, _S.STOPPING), _DEATHS, _S.STOPPED, _GONE),
    # An order to stop a worker that has no process.
    ((_S.BACKOFF,), _STOPS, _S.STOPPED, (_X.FORGIVE, *_REFUSE)),
    ((_S.FAILED,), _STOPS, _S.STOPPED, (_X.FORGIVE, _X.REFUSE_NEW)),
    ((_S.UNLOADED,), _STOPS, _S.STOPPED, _REFUSE),
    # On demand. A request that comes while the process is being stopped starts the worker again after its end.
    ((_S.STOPPED,), (_E.ON_DEMAND,), _S.UNLOADED, (_X.REST,)),
    ((_S.FAILED,), (_E.ON_DEMAND,), _S.UNLOADED, (_X.FORGIVE, _X.REST)),  # it failed for want of room: try again
    ((_S.READY, _S.ASLEEP), (_E.UNLOAD,), _S.STOPPING, (_X.HOLD_NEW, _X.CLIMB)),
    # Sleep. The worker has no request when it is told to sleep. Requests that come from then on wait, and wake it.
    ((_S.READY,), (_E.SLEEP,), _S.FALLING_ASLEEP, (_X.HOLD_NEW, _X.PUT_TO_SLEEP)),
    ((_S.FALLING_ASLEEP,), (_E.SLEPT,), _S.ASLEEP, (_X.REST,)),
    ((_S.FALLING_ASLEEP,), (_E.CANNOT_SLEEP,), _S.STOPPING, (_X.HOLD_NEW, _X.CLIMB)),
    ((_S.ASLEEP,), (_E.START,), _S.WAKING, (_X.ACCEPT_NEW, _X.BEGIN_WAKE)),
    ((_S.WAKING,), (_E.WOKE,), _S.READY, (_X.OPEN,)),
    ((_S.WAKING,), (_E.NO_ROOM,), _S.ASLEEP, (_X.TURN_AWAY,)),
    # A worker that dies asleep is not started again before a request needs it: ``WorkerLife`` desires it on demand.
    ((_S.FALLING_ASLEEP, _S.ASLEEP), (_E.DIED,), _S.STOPPED, _GONE),
    # Deaths that nobody asked for. Waiting requests go on waiting, unless there will be no other try.
    ((_S.STARTING, _S.LOADING, _S.READY, _S.WAKING), (_E.DIED,), _S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (
        (_S.STARTING, _S.LOADING, _S.READY, _S.FALLING_ASLEEP, _S.ASLEEP, _S.WAKING), (_E.DIED_FOR_GOOD,),
        _S.FAILED, (*_GONE, _X.END_WAITING),
    ),
    # The worker is already in the state that the order asks for, or on its way there.
    ((_S.STARTING, _S.LOADING, _S.READY, _S.WAKING), (_E.START,), None, ()),
    ((_S.FALLING_ASLEEP, _S.ASLEEP), (_E.SLEEP,), None, ()),
    ((_S.STOPPED,), _STOPS, None, ()),
    # START while the worker goes down or falls asleep: ``WorkerLife`` notes that the worker is desired up, and starts
    # or wakes it when it is STOPPED or ASLEEP. Requests wait for that. A later STOP changes the desired state again.
    ((_S.DRAINING, _S.STOPPING, _S.FALLING_ASLEEP), (_E.START,), None, (_X.ACCEPT_NEW,)),
    ((_S.DRAINING, _S.STOPPING), (_E.STOP,), None, _REFUSE),
    # HELLO, READY or a word about its sleep was on the way when the stop was decided.
    ((_S.STOPPING,), (_E.HELLO, _E.LOADED, _E.SLEPT, _E.CANNOT_SLEEP, _E.WOKE), None, ()),
    # The drain's time ran out in the same turn of the loop in which STOP_NOW came.
    ((_S.STOPPING,), (_E.DRAINED,), None, ()),
)  # fmt: skip
"""States, events, the state after each of these pairs (None: the same state), and the actions that follow."""

TRANSITIONS = {
    (state, event): (after or state, actions)
    for states, events, after, actions in ROWS
    for state in states
    for event in events
}


class IllegalTransition(Exception):
    """An event that cannot happen in this state. It is a bug in the supervisor or in a worker. The text tells the
    worker's last transitions."""


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


class EndTransition(NamedTuple):
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

    def ended(self, report: "ExitReport", now: float, *, blames_request: bool, chance: float) -> EndTransition:
        """Apply the end of a process, or a start that failed. Return what the caller has to carry out.

        blames_request  whether one request surely caused the end. Such ends do not count towards the restart limit: if
                        they did, a few requests could take the model away from all clients
        chance          a draw from [0, 1), for the pause before the next try
        """
        if report.reason == "asked":
            return EndTransition(self.apply(Event.DIED, now, report.message), "")
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
        return EndTransition(self.apply(event, now, report.message), what_next)

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


# The stop ladder: the messages and signals that a worker gets, and when, until its process has ended. Pure.
#
#     0  SHUTDOWN  asks the worker. The worker finishes its step, closes and exits with 0. While it loads, it does not
#                  read messages.
#     1  SIGTERM   to the whole group. The default action ends the worker, whatever its Python does, and its children.
#     2  SIGKILL   to the whole group. This also ends processes that are stopped (SIGSTOP) or ignore SIGTERM.
#
# Each rung ends processes that the rung before cannot end. Only the last one is certain.


class Rung(StrEnum):
    SHUTDOWN = "SHUTDOWN"
    SIGTERM = "SIGTERM"
    SIGKILL = "SIGKILL"


@dataclass(frozen=True)
class LadderTimes:
    """Seconds that each rung gets before the next one is due."""

    shutdown_s: float = 5.0
    sigterm_s: float = 2.0


PATIENT = LadderTimes()
IMPATIENT = LadderTimes(shutdown_s=0.5, sigterm_s=0.5)
"""The times for ``stop --now``. They end a worker within about a second, even if it hangs."""


def plan(now: float, times: LadderTimes, *, reads_messages: bool) -> list[tuple[float, Rung]]:
    """Return the rungs of one climb, as pairs of monotonic time and rung. The first rung is due at once.

    reads_messages  whether the worker has loaded its model, and so reads SHUTDOWN
    """
    rungs: list[tuple[float, Rung]] = []
    at = now
    if reads_messages:
        rungs.append((at, Rung.SHUTDOWN))
        at += times.shutdown_s
    rungs.append((at, Rung.SIGTERM))
    rungs.append((at + times.sigterm_s, Rung.SIGKILL))
    return rungs


# Decide from a worker's leases (``protocol.process.worker_spec``) whether it makes progress or hangs. Pure.
#
# Time is counted in checks. Each check counts the time since the check before it, at most twice the intended interval.
# If the supervisor was stopped or the machine suspended, the workers may have been stopped too, and must not be
# killed.
#
# A worker that renews its leases in time is slow at worst. When a lease runs out, the worker hangs. The supervisor
# asks the worker for its stacks, and kills it DUMP_S later, unless the worker has made progress meanwhile.


CHECK_S = 0.1
"""Seconds between two checks of all workers."""
DUMP_S = 1.0
"""Seconds that a hung worker gets to write its stacks before it is killed. Writing them takes a millisecond of
processor time. On a machine whose cores were all busy, a worker did not get that within 0.3 s."""
_DOING = {
    WorkerPhase.STARTING: "before it came up",
    WorkerPhase.LOADING: "while loading",
    WorkerPhase.IDLE: "while idle",
    WorkerPhase.STEP: "in a step",
    WorkerPhase.MOVING: "while going to sleep or waking",
}


class CheckClock:
    """Counts the time between checks."""

    def __init__(self, interval_s: float = CHECK_S) -> None:
        self._most = 2 * interval_s
        self._last: float | None = None

    def passed(self, now: float) -> float:
        """Return the seconds to count since the last check; 0 at the first check, and if the clock went back."""
        last, self._last = self._last, now
        return 0.0 if last is None else max(0.0, min(now - last, self._most))


class HangVerdict(StrEnum):
    FINE = "fine"
    HUNG = "hung"
    """The worker's lease has just run out: ask the worker for its stacks."""
    DOOMED = "doomed"
    """The worker hangs, and still has time to write its stacks."""
    SPARED = "spared"
    """The worker hung at the check before, and has made progress since."""
    LOST = "lost"
    """The worker hangs, and the time for its stacks is over: kill it. Every later check returns LOST again."""


@dataclass
class HangDetector:
    """The state of one process: the last reading of its lease, and the seconds counted since the reading changed."""

    reading: Reading
    silent_s: float = 0.0
    hung: bool = False
    overdue_s: float = 0.0
    """Seconds counted since the worker was found hung."""

    def check(self, reading: Reading, passed_s: float) -> HangVerdict:
        """Return the verdict on a lease that was read ``passed_s`` seconds after the check before."""
        if reading.word != self.reading.word:
            spared = self.hung
            self.reading, self.silent_s, self.hung, self.overdue_s = reading, 0.0, False, 0.0
            return HangVerdict.SPARED if spared else HangVerdict.FINE
        self.silent_s += passed_s
        if self.hung:
            self.overdue_s += passed_s
            return HangVerdict.LOST if self.overdue_s >= DUMP_S else HangVerdict.DOOMED
        if self.silent_s <= reading.lease_s:
            return HangVerdict.FINE
        self.hung = True
        return HangVerdict.HUNG

    @property
    def can_tell(self) -> bool:
        """Return whether the worker can write its stacks. Before its first lease, the signal for that would end it."""
        return self.reading.phase is not WorkerPhase.STARTING

    def story(self) -> str:
        """Return, for people, a text that says in which phase a worker hangs, and for how long."""
        phase = self.reading.phase
        doing = "in no known phase" if phase is None else _DOING[phase]
        return f"hung: no progress for {self.silent_s:.1f} s {doing} (lease {self.reading.lease_s:g} s)"

    def describe(self) -> dict[str, str | float]:
        """Return phase (the name of a ``WorkerPhase``, or "unknown") and beat_s, seconds since the last progress."""
        phase = self.reading.phase
        return {"phase": "unknown" if phase is None else phase.name.lower(), "beat_s": round(self.silent_s, 1)}
