"""A model's life as a pure transition table: events in, effects out, no clock, no process.

``(state, event)`` pairs that are not in the table are bugs and raise with the model's story. Pairs that can happen
because two things race (a READY that was on the way when an operator stopped the model) have rows of their own.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class WorkerState(StrEnum):
    STOPPED = "stopped"
    """No process, and none wanted until an operator starts the model."""
    STARTING = "starting"
    """The process has been spawned and has not said HELLO yet."""
    LOADING = "loading"
    """The worker reads weights and warms up."""
    READY = "ready"
    """Warmed up and generating on request."""
    DRAINING = "draining"
    """Takes no new requests; the ones it has are being finished."""
    STOPPING = "stopping"
    """Climbing the stop ladder: SHUTDOWN, SIGTERM, SIGKILL."""
    BACKOFF = "backoff"
    """Ended without being asked to; will be started again after a pause. Requests wait."""
    UNLOADED = "unloaded"
    """No process; the first request starts it."""
    FAILED = "failed"
    """Cannot be loaded as configured, or failed too often; an operator has to start it."""


AT_REST = (WorkerState.STOPPED, WorkerState.UNLOADED, WorkerState.FAILED)
"""No process, and none to come by itself."""
GOING_DOWN = (WorkerState.DRAINING, WorkerState.STOPPING)


class Event(StrEnum):
    START = "start"
    """An operator, or autostart, wants the model up."""
    STOP = "stop"
    """An operator, or the supervisor's own end, wants it down after its requests are finished."""
    STOP_NOW = "stop now"
    """The same without waiting for requests."""
    HELLO = "hello"
    """The worker process has connected."""
    LOADED = "loaded"
    """The worker said READY."""
    DRAINED = "drained"
    """The last request of a draining model is over, or the drain's time is."""
    DIED = "died"
    """The process is gone and may be started again."""
    DIED_FOR_GOOD = "died for good"
    """The process is gone, and its exit or the restart limit forbids another try."""
    ON_DEMAND = "on demand"
    """It is at rest, and a request may start it."""
    UNLOAD = "unload"
    """It is idle, and its time is over or its memory needed."""
    BACKOFF_OVER = "backoff over"
    """The pause before the next try has passed."""


class LifecycleAction(StrEnum):
    SPAWN = "spawn"
    """Start a process of a new generation."""
    OPEN = "open"
    """Give the worker its waiting requests."""
    REFUSE_NEW = "refuse new"
    """Answer new requests with the state's error; on the way down to being started again, let them wait instead."""
    ACCEPT_NEW = "accept new"
    """Queue new requests."""
    HOLD_NEW = "hold new"
    """Queue new requests, which wait for the next process."""
    REST = "rest"
    """Queue new requests, the first of which wakes the model."""
    WATCH_DRAIN = "watch drain"
    """Report DRAINED when no request is left or the drain's time is over."""
    CLIMB = "climb"
    """Begin the stop ladder."""
    END_ACTIVE = "end active"
    """End the requests the process held with worker_died."""
    END_WAITING = "end waiting"
    """End the requests that wait for the model with its state's error."""
    ARM_BACKOFF = "arm backoff"
    """Report BACKOFF_OVER after the restart policy's delay."""
    FORGIVE = "forgive"
    """Forget earlier failures and a pending retry."""


_S, _E, _X = WorkerState, Event, LifecycleAction
_START = (_X.FORGIVE, _X.ACCEPT_NEW, _X.SPAWN)

TRANSITIONS: dict[tuple[WorkerState, Event], tuple[WorkerState, tuple[LifecycleAction, ...]]] = {
    # The road up.
    (_S.STOPPED, _E.START): (_S.STARTING, _START),
    (_S.STARTING, _E.HELLO): (_S.LOADING, ()),
    (_S.LOADING, _E.LOADED): (_S.READY, (_X.OPEN,)),
    (_S.BACKOFF, _E.BACKOFF_OVER): (_S.STARTING, (_X.SPAWN,)),
    (_S.BACKOFF, _E.START): (_S.STARTING, _START),  # an operator need not wait for the pause
    (_S.FAILED, _E.START): (_S.STARTING, _START),
    # The road down.
    (_S.READY, _E.STOP): (_S.DRAINING, (_X.REFUSE_NEW, _X.END_WAITING, _X.WATCH_DRAIN)),
    (_S.DRAINING, _E.DRAINED): (_S.STOPPING, (_X.CLIMB,)),
    (_S.STARTING, _E.STOP): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.LOADING, _E.STOP): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.BACKOFF, _E.STOP): (_S.STOPPED, (_X.FORGIVE, _X.REFUSE_NEW, _X.END_WAITING)),
    (_S.FAILED, _E.STOP): (_S.STOPPED, (_X.FORGIVE, _X.REFUSE_NEW)),
    (_S.READY, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.DRAINING, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.STARTING, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.LOADING, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    # impatience: the ladder begins anew, with shorter rungs
    (_S.STOPPING, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.BACKOFF, _E.STOP_NOW): (_S.STOPPED, (_X.FORGIVE, _X.REFUSE_NEW, _X.END_WAITING)),
    (_S.FAILED, _E.STOP_NOW): (_S.STOPPED, (_X.FORGIVE, _X.REFUSE_NEW)),
    (_S.DRAINING, _E.DIED): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.DRAINING, _E.DIED_FOR_GOOD): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.STOPPING, _E.DIED): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.STOPPING, _E.DIED_FOR_GOOD): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    # Life on demand. A request that comes while the process is on its way out wakes the model when that is gone.
    (_S.STOPPED, _E.ON_DEMAND): (_S.UNLOADED, (_X.REST,)),
    (_S.FAILED, _E.ON_DEMAND): (_S.UNLOADED, (_X.FORGIVE, _X.REST)),  # for want of room, which may be there by now
    (_S.UNLOADED, _E.START): (_S.STARTING, _START),
    (_S.UNLOADED, _E.STOP): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_WAITING)),
    (_S.UNLOADED, _E.STOP_NOW): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_WAITING)),
    (_S.READY, _E.UNLOAD): (_S.STOPPING, (_X.HOLD_NEW, _X.CLIMB)),
    # Deaths nobody asked for. Waiting requests wait on unless there will be no other try.
    (_S.STARTING, _E.DIED): (_S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (_S.LOADING, _E.DIED): (_S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (_S.READY, _E.DIED): (_S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (_S.STARTING, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    (_S.LOADING, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    (_S.READY, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    # Already so.
    (_S.STARTING, _E.START): (_S.STARTING, ()),
    (_S.LOADING, _E.START): (_S.LOADING, ()),
    (_S.READY, _E.START): (_S.READY, ()),
    (_S.STOPPED, _E.STOP): (_S.STOPPED, ()),
    (_S.STOPPED, _E.STOP_NOW): (_S.STOPPED, ()),
    # START while going down: the caller remembers the wish and repeats it when the state is STOPPED. Requests wait for
    # that. STOP takes the wish back.
    (_S.DRAINING, _E.START): (_S.DRAINING, (_X.ACCEPT_NEW,)),
    (_S.STOPPING, _E.START): (_S.STOPPING, (_X.ACCEPT_NEW,)),
    (_S.DRAINING, _E.STOP): (_S.DRAINING, (_X.REFUSE_NEW, _X.END_WAITING)),
    (_S.STOPPING, _E.STOP): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING)),
    # HELLO or READY was on the way when the stop was decided.
    (_S.STOPPING, _E.HELLO): (_S.STOPPING, ()),
    (_S.STOPPING, _E.LOADED): (_S.STOPPING, ()),
    # The drain's time ran out in the same turn of the loop in which STOP_NOW came.
    (_S.STOPPING, _E.DRAINED): (_S.STOPPING, ()),
}


class IllegalTransition(Exception):
    """An event that cannot happen in this state: a bug here. Holds the model's story."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One line of a model's story. ``at`` is a monotonic time in seconds."""

    at: float
    before: WorkerState
    event: Event
    after: WorkerState
    cause: str


class ModelLife:
    """One model's state and its recent story. Only ``apply`` changes it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.state = WorkerState.STOPPED
        self.since = 0.0
        self.story: deque[Transition] = deque(maxlen=50)

    def apply(self, event: Event, now: float, cause: str = "") -> tuple[LifecycleAction, ...]:
        """Move on, and say what has to be done. Raises IllegalTransition with the story."""
        row = TRANSITIONS.get((self.state, event))
        if row is None:
            message = "\n".join(f"  {s.at:.3f} {s.before} -> {s.after} on {s.event} ({s.cause})" for s in self.story)
            raise IllegalTransition(f"{self.model}: {event} in state {self.state}; its story:\n{message}")
        after, effects = row
        self.story.append(Transition(now, self.state, event, after, cause))
        if after is not self.state:
            self.state, self.since = after, now
        return effects
