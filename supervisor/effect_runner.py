"""Carry out effects: send frames, end connections, start the workers that requests wait for.

Only the loop calls ``EffectRunner.run``, after each message, each exit and each timer. An effect may cause new
decisions (a start may unload another model, which moves that model's requests). Such a decision only adds to the
queue, and ``run`` comes to it later. So ``run`` is never called while it runs, and effects happen in the order
in which they were decided. The following cases depend on that order:

* **ACCEPTED comes before the first event.** The scheduler decides ACCEPTED and JOB in one call. The worker can answer
  only after it was sent JOB, and its frames are read in a later turn.
* **CANCEL of a job comes after its JOB**, because a worker's frames leave in the order of the decisions. Without the
  queue, a decision taken while JOB was still in a list could overtake it.
* **A REPLY comes after what the order has caused.** A client that orders `stop` gets the terminal events of its waiting
  requests, and then the REPLY. Replies are effects for that reason.
* **The relay never overtakes the queue.** Compiled code sends ordinary events from ``back`` to ``front`` by itself. The
  loop runs this after each frame that the relay leaves to Python, before the relay goes on.
* **When a client is found gone, its requests end in the same turn.** A send has failed, or the monitor has reported the
  end. When the queue is empty, the scheduler decides (CANCEL for workers, JOB for the requests of other clients). These
  effects are carried out before ``run`` returns. Frames for the lost client that were still in the queue are dropped.
* **A worker may end between a decision and its effect.** Its exit can be handled, and its next process started, in the
  handler that has added the effect. Such a frame names the generation of the process that it is for. It is dropped if
  that process has ended, since the scheduler has then been told of the end, and each request has its new decision.
* **A revoked key's requests end before its connection**, so the client reads their errors and then the last one.
"""

import time
from collections.abc import Sequence

from protocol.codec import decode
from protocol.messages import SUPERVISOR_TO_WORKER, JobMessage
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.on_demand import OnDemandLoader
from supervisor.fleet.reloads import Reloads
from supervisor.ports.client_ports import ClientPorts
from supervisor.ports.worker_port import WorkerPort
from supervisor.requests.effect_queue import EffectQueue, EndConnection
from supervisor.requests.in_flight import ToClient, ToWorker, Wake
from supervisor.requests.scheduler import Scheduler


class EffectRunner:
    """The runner of the effects in one queue."""

    def __init__(
        self,
        queue: EffectQueue,
        clients: ClientPorts,
        workers: Sequence[WorkerPort],
        scheduler: Scheduler,
        fleet: Fleet,
        on_demand: OnDemandLoader,
        reloads: Reloads,
    ) -> None:
        self._queue = queue
        self._clients = clients
        self._workers = workers
        self._scheduler = scheduler
        self._fleet = fleet
        self._on_demand = on_demand
        self._reloads = reloads

    def run(self) -> None:
        """Carry out the queued effects, and the effects that they add, until the queue is empty."""
        effects = self._queue.take()
        while True:
            for effect in effects:
                if isinstance(effect, ToClient):
                    self._clients.send(effect.channel, effect.frame)
                elif isinstance(effect, ToWorker):
                    self._send_to_worker(effect)
                elif isinstance(effect, Wake):
                    self._on_demand.wake(effect.model)
                elif isinstance(effect, EndConnection):
                    self._clients.end(effect.channel, effect.error)
                else:
                    self._reloads.advance_soon()
            for channel in self._clients.take_gone():
                self._queue.add(self._scheduler.gone(channel, time.monotonic()))
            if not (effects := self._queue.take()):
                return

    def _send_to_worker(self, effect: ToWorker) -> None:
        replica = self._fleet.registry.replicas.get(effect.worker)
        if replica is None or replica.generation != effect.generation:
            return  # the process has ended, and the scheduler knows
        if not any(port.send(replica.routing_id, effect.frame) for port in self._workers):
            # The worker is not connected any more. The loop is about to see its exit, which ends all its requests. Or
            # the worker is 10,000 frames behind, and would lose a request silently.
            message = decode(effect.frame, SUPERVISOR_TO_WORKER)
            if isinstance(message, JobMessage):
                self._scheduler.not_sent(effect.worker, (message.channel, message.request))
            self._fleet.kill(replica, "it cannot be reached")
