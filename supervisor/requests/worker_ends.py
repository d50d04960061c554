"""Decide what becomes of a worker's requests when the worker dies, has drained for too long, or is stopped. Pure."""

from protocol.errors import ErrorCode, WireError
from supervisor.requests.in_flight import Effect, InFlight
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.request_table import RequestTable


class WorkerEnds:
    """Handles the ends of workers. ``PoisonTracker`` decides which requests a death is blamed on."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def not_sent(self, worker: str, key: tuple[int, int]) -> None:
        """Take note that a job could not be sent, because the worker is not connected any more. The worker's end, which
        is about to be known, is not the request's fault.

        key  channel and number of the request
        """
        self._table.slot_of(worker).unsent.add(key)

    def worker_gone(self, worker: str, error: WireError, now: float, *, struck: bool = True) -> list[Effect]:
        """Take note that a worker's process has ended. Its requests go on in another worker, now or after the restart.

        error   ends the requests that cannot go on: their resume is false, or no worker of the model will come up
        struck  whether one of the requests may be the reason of the death; False after an order to stop the worker
        """
        table = self._table
        queue = table.queue_of_worker[worker]
        computed = set(queue.worker_slots[worker].computed)
        running = queue.worker_slots[worker].close()
        if struck:  # also requests that were given up: the worker had yet to let them go, so it was computing them
            table.poison.add_death(queue.name, computed, now)
        effects: list[Effect] = []
        for request in running:
            request.settle()
            if request.phase is RequestPhase.RUNNING:
                request.note(now, "worker_ended", worker=worker.partition("~")[0], reason=error.message)
                effects += self._after_death(request, error, now, struck=struck and request in computed)
            else:
                table.leave(request)
        queue.after_death()
        return effects + table.dispatch(queue, now)

    def _after_death(self, request: InFlight, error: WireError, now: float, *, struck: bool) -> list[Effect]:
        """Put a request of a dead worker back into the queue, or end it."""
        table, queue = self._table, self._table.queues[request.model]
        if request.cancelled:  # the worker had yet to confirm the cancel, which makes no difference to the client
            return table.end(request, None, now)
        if struck:
            suspicion = table.poison.find(request.model, request.body, now)
            if table.poison.poisons(suspicion):
                return table.end(request, table.poison.error(), now)
            request.place, request.alone = request.next_seq, table.poison.next_is_last(suspicion)
        if not request.resumable or not queue.accepts:
            return table.end(request, error, now)
        request.phase, request.worker = RequestPhase.WAITING, ""
        request.resumes += 1
        queue.totals.resumed += 1
        queue.push(request)
        return []

    def finds_culprit(self, worker: str, now: float) -> bool:
        """Return whether the worker's death makes a request poisoned, which then does not come to another worker.

        Call this before ``worker_gone``.
        """
        queue = self._table.queue_of_worker[worker]
        return self._table.poison.finds_culprit(queue.name, queue.worker_slots[worker].computed, now)

    def end_running(self, worker: str, now: float) -> list[Effect]:
        """End the requests of a worker whose time to drain is over, unless they can go on in another worker."""
        queue = self._table.queue_of_worker[worker]
        effects: list[Effect] = []
        message = f"model {queue.name!r} is being stopped; the request was ended before its time"
        for request in queue.worker_slots[worker].running.values():
            if request.phase is RequestPhase.RUNNING and not (queue.accepts and request.resumable):
                effects += self._table.give_up(request, WireError(ErrorCode.DRAINING, message), now)
        return effects

    def end_waiting(self, worker: str, error: WireError, now: float) -> list[Effect]:
        """End all requests that wait for the model of a worker that will not serve, unless another worker will."""
        queue = self._table.queue_of_worker[worker]
        if queue.accepts:
            return []
        effects: list[Effect] = []
        for request in list(queue.all_waiting()):
            effects += self._table.give_up(request, self._table.leaving or error, now)
        return effects

    def release_held(self, worker: str | None, now: float) -> list[Effect]:
        """Send the held events of requests that a stopped worker has finished. Their ends do not wait for credit.

        worker  the name of the worker; None: all workers are stopped
        """
        effects: list[Effect] = []
        held = [r for r in self._table.live.values() if r.phase is RequestPhase.HELD and worker in (None, r.worker)]
        for request in held:
            effects += self._table.release(request, now, all_of_it=True)
        return effects
