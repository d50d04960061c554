"""The supervisor's own end: every model is stopped, clients are told, and then the process leaves."""

import logging

from protocol.codec import encode, pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import GoAway
from supervisor.event_history import LEAVES, EventKind, noted
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.reloads import Reloads
from supervisor.ports.client_ports import ClientPorts
from supervisor.requests.effect_queue import EffectQueue
from supervisor.requests.in_flight import ToClient
from supervisor.requests.scheduler import Scheduler


class SupervisorShutdown:
    """The state of the supervisor's shutdown.

    begun  whether a shutdown has begun
    """

    def __init__(
        self,
        fleet: Fleet,
        reloads: Reloads,
        scheduler: Scheduler,
        clients: ClientPorts,
        effects: EffectQueue,
        log: logging.Logger,
    ) -> None:
        self.begun = False
        self._fleet = fleet
        self._reloads = reloads
        self._scheduler = scheduler
        self._clients = clients
        self._effects = effects
        self._log = log
        self._impatient = False

    def begin(self, cause: str, *, now: bool = False) -> None:
        """Stop every model. The supervisor exits when all workers have ended and their VRAM is free again.

        now  do not wait for requests, nor for the VRAM. A second call may set this
        """
        self._log.info(f"{LEAVES}%s: %s", " now" if now else "", cause, extra=noted(EventKind.SUPERVISOR))
        self._impatient = self._impatient or now
        if not self.begun:
            self.begun = True
            self._reloads.rollouts.abandon()
            self._scheduler.leave(shutting_down())
            # This goes before the errors that end waiting requests, so that clients know the reason.
            frame = encode(GoAway(pack_body({"reason": "the supervisor is shutting down"})))
            self._effects.add(ToClient(channel, frame) for channel in self._clients.channels_for_requests())
        for name in self._fleet.registry.replicas:
            self._fleet.stop(name, cause, now=now)

    @property
    def is_done(self) -> bool:
        """Whether the supervisor may exit now."""
        return self.begun and self._fleet.all_stopped and (self._impatient or not self._fleet.vram.awaited)

    def check_not_begun(self) -> None:
        """Raise the error for new requests and orders during a shutdown, if one has begun."""
        if self.begun:
            raise shutting_down()


def shutting_down() -> WireError:
    """Return the error for new requests and orders during a shutdown."""
    return WireError(ErrorCode.DRAINING, "the supervisor is shutting down: it takes no new requests and starts nothing")
