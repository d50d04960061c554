"""The states of a worker and the table of transitions between them. Pure. ``worker_life`` applies the table.

A pair of state and event that is not in the table is a bug, and raises IllegalTransition. A pair that a race can cause
has a row of its own. Example: READY was on its way when an operator stopped the model.
"""

from enum import StrEnum


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
_START = (_X.FORGIVE, _X.ACCEPT_NEW, _X.BEGIN_START)

TRANSITIONS: dict[tuple[WorkerState, Event], tuple[WorkerState, tuple[LifecycleAction, ...]]] = {
    # From the order to READY.
    (_S.STOPPED, _E.START): (_S.STARTING, _START),
    (_S.STARTING, _E.HELLO): (_S.LOADING, ()),
    (_S.LOADING, _E.LOADED): (_S.READY, (_X.OPEN,)),
    (_S.BACKOFF, _E.BACKOFF_OVER): (_S.STARTING, (_X.BEGIN_START,)),
    (_S.BACKOFF, _E.START): (_S.STARTING, _START),  # an operator need not wait for the pause
    (_S.FAILED, _E.START): (_S.STARTING, _START),
    # From READY to the end of the process.
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
    # The ladder begins again, with shorter times.
    (_S.STOPPING, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.BACKOFF, _E.STOP_NOW): (_S.STOPPED, (_X.FORGIVE, _X.REFUSE_NEW, _X.END_WAITING)),
    (_S.FAILED, _E.STOP_NOW): (_S.STOPPED, (_X.FORGIVE, _X.REFUSE_NEW)),
    (_S.DRAINING, _E.DIED): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.DRAINING, _E.DIED_FOR_GOOD): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.STOPPING, _E.DIED): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.STOPPING, _E.DIED_FOR_GOOD): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    # On demand. A request that comes while the process is being stopped starts the worker again after its end.
    (_S.STOPPED, _E.ON_DEMAND): (_S.UNLOADED, (_X.REST,)),
    (_S.FAILED, _E.ON_DEMAND): (_S.UNLOADED, (_X.FORGIVE, _X.REST)),  # it failed for want of room: try again
    (_S.UNLOADED, _E.START): (_S.STARTING, _START),
    (_S.UNLOADED, _E.STOP): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_WAITING)),
    (_S.UNLOADED, _E.STOP_NOW): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_WAITING)),
    (_S.READY, _E.UNLOAD): (_S.STOPPING, (_X.HOLD_NEW, _X.CLIMB)),
    # Sleep. The worker has no request when it is told to sleep. Requests that come from then on wait, and wake it.
    (_S.READY, _E.SLEEP): (_S.FALLING_ASLEEP, (_X.HOLD_NEW, _X.PUT_TO_SLEEP)),
    (_S.FALLING_ASLEEP, _E.SLEPT): (_S.ASLEEP, (_X.REST,)),
    (_S.FALLING_ASLEEP, _E.CANNOT_SLEEP): (_S.STOPPING, (_X.HOLD_NEW, _X.CLIMB)),
    (_S.ASLEEP, _E.START): (_S.WAKING, (_X.ACCEPT_NEW, _X.BEGIN_WAKE)),
    (_S.WAKING, _E.WOKE): (_S.READY, (_X.OPEN,)),
    (_S.WAKING, _E.NO_ROOM): (_S.ASLEEP, (_X.TURN_AWAY,)),
    (_S.ASLEEP, _E.UNLOAD): (_S.STOPPING, (_X.HOLD_NEW, _X.CLIMB)),
    (_S.FALLING_ASLEEP, _E.STOP): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.ASLEEP, _E.STOP): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.WAKING, _E.STOP): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.FALLING_ASLEEP, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.ASLEEP, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    (_S.WAKING, _E.STOP_NOW): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING, _X.CLIMB)),
    # A worker that dies asleep is not started again before a request needs it: ``WorkerLife`` desires it on demand.
    (_S.FALLING_ASLEEP, _E.DIED): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.ASLEEP, _E.DIED): (_S.STOPPED, (_X.REFUSE_NEW, _X.END_ACTIVE)),
    (_S.WAKING, _E.DIED): (_S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (_S.FALLING_ASLEEP, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    (_S.ASLEEP, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    (_S.WAKING, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    # Deaths that nobody asked for. Waiting requests go on waiting, unless there will be no other try.
    (_S.STARTING, _E.DIED): (_S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (_S.LOADING, _E.DIED): (_S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (_S.READY, _E.DIED): (_S.BACKOFF, (_X.END_ACTIVE, _X.ARM_BACKOFF)),
    (_S.STARTING, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    (_S.LOADING, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    (_S.READY, _E.DIED_FOR_GOOD): (_S.FAILED, (_X.REFUSE_NEW, _X.END_ACTIVE, _X.END_WAITING)),
    # The worker is already in the state that the order asks for, or on its way there.
    (_S.STARTING, _E.START): (_S.STARTING, ()),
    (_S.LOADING, _E.START): (_S.LOADING, ()),
    (_S.READY, _E.START): (_S.READY, ()),
    (_S.WAKING, _E.START): (_S.WAKING, ()),
    (_S.FALLING_ASLEEP, _E.SLEEP): (_S.FALLING_ASLEEP, ()),
    (_S.ASLEEP, _E.SLEEP): (_S.ASLEEP, ()),
    (_S.STOPPED, _E.STOP): (_S.STOPPED, ()),
    (_S.STOPPED, _E.STOP_NOW): (_S.STOPPED, ()),
    # START while the worker goes down: ``WorkerLife`` notes that the worker is desired up, and starts it when it is
    # STOPPED. Requests wait for that. A later STOP changes the desired state again.
    (_S.DRAINING, _E.START): (_S.DRAINING, (_X.ACCEPT_NEW,)),
    (_S.STOPPING, _E.START): (_S.STOPPING, (_X.ACCEPT_NEW,)),
    (_S.DRAINING, _E.STOP): (_S.DRAINING, (_X.REFUSE_NEW, _X.END_WAITING)),
    (_S.STOPPING, _E.STOP): (_S.STOPPING, (_X.REFUSE_NEW, _X.END_WAITING)),
    # A worker that falls asleep is desired up: it is woken when it sleeps.
    (_S.FALLING_ASLEEP, _E.START): (_S.FALLING_ASLEEP, (_X.ACCEPT_NEW,)),
    # HELLO, READY or a word about its sleep was on the way when the stop was decided.
    (_S.STOPPING, _E.HELLO): (_S.STOPPING, ()),
    (_S.STOPPING, _E.LOADED): (_S.STOPPING, ()),
    (_S.STOPPING, _E.SLEPT): (_S.STOPPING, ()),
    (_S.STOPPING, _E.CANNOT_SLEEP): (_S.STOPPING, ()),
    (_S.STOPPING, _E.WOKE): (_S.STOPPING, ()),
    # The drain's time ran out in the same turn of the loop in which STOP_NOW came.
    (_S.STOPPING, _E.DRAINED): (_S.STOPPING, ()),
}


class IllegalTransition(Exception):
    """An event that cannot happen in this state. It is a bug in the supervisor or in a worker. The text tells the
    worker's last transitions."""
