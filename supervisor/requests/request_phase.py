"""Where a request is."""

from enum import Enum


class RequestPhase(Enum):
    WAITING = "waiting"
    """In the model's queue: new, or to go on after the death of its worker."""
    RUNNING = "running"
    """A worker has its job."""
    ENDED = "ended"
    """The client has its terminal event, or is gone; the worker still has to let go of the job."""
    HELD = "held"
    """The worker has finished; the client still has to grant credit for the last events."""
