"""The phases of a request.

They have a file of their own, because both ``fast_path`` and ``request`` need them, and ``request``
imports ``fast_path``.
"""

from enum import Enum


class RequestPhase(Enum):
    WAITING = "waiting"
    """The request is in its model's queue: it is new, or goes on after the death of its worker, or is parked."""
    RUNNING = "running"
    """A worker has its job."""
    ENDED = "ended"
    """The terminal event is on its way, or the client is gone. The worker may still have to let the job go."""
    HELD = "held"
    """The worker has finished. The client still has to grant credit for the last events."""
