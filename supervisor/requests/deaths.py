"""Decide how requests go on whose worker has died, and which of them the death is blamed on. Pure. See ``scheduler``.

Most deaths are nobody's fault: a driver, memory, an operator. So the requests go on in the next worker, and none waits
for another's answer. But each is a suspect from then on. In its next worker a suspect is on probation, until a few
events beyond the place where it was when the worker died. ``ModelQueue`` lets only a few suspects be on probation at
once, and those with one strike left one by one. A death during their probation is a strike against them, and against no
one else. With the limit of two strikes, a request that kills every worker is thus found by its third death at the
latest: the first makes it a suspect, the second strikes it with a few others, and the third finds it alone.
"""

from collections.abc import Collection

from protocol.errors import WireError
from supervisor.requests.in_flight import Effect, InFlight
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.worker_events import WorkerEvents


class Deaths(WorkerEvents):
    """The part of the scheduler that handles the ends of workers."""

    def worker_gone(self, worker: str, error: WireError, now: float, *, struck: bool = True) -> list[Effect]:
        """Take note that a worker's process has ended. Its requests go on in another worker, now or after the restart.

        error   the end of requests that cannot go on: their resume is false, or no worker of the model will come up
        struck  whether one of the requests may be the reason. An order to stop the worker is not their doing
        """
        queue = self._of_worker[worker]
        running = queue.worker_slots[worker].close()
        if struck:  # those too that were given up and that the worker had yet to let go: it was computing them
            self._suspect(queue.name, running, now)
        effects: list[Effect] = []
        for request in running:
            request.settle()
            if request.phase is RequestPhase.RUNNING:
                effects += self._after_death(request, error, now, struck=struck)
            else:
                self._leave(request)
        queue.after_death()
        return effects + self._dispatch(queue, now)

    def finds_culprit(self, worker: str, now: float) -> bool:
        """Return whether the worker's death makes a request poisoned, which then does not come to another worker. To be
        asked before ``worker_gone``."""
        queue = self._of_worker[worker]
        payloads, sure = blamed(queue.worker_slots[worker].running.values())
        return sure and all(self._poison.next_is_last(self._poison.find(queue.name, p, now)) for p in payloads)

    def _suspect(self, model: str, running: Collection[InFlight], now: float) -> None:
        """Remember the requests that a worker was computing when it died, and add a strike to each payload that the
        death is blamed on. A last strike, which makes a payload poisoned, is added only where no other request can be
        the reason."""
        struck, sure = blamed(running)
        for payload in {request.body for request in running}:
            place = max(request.next_seq for request in running if request.body == payload)
            last = self._poison.next_is_last(self._poison.find(model, payload, now))
            self._poison.add(model, payload, place, now, blamed=payload in struck and (sure or not last))

    def _after_death(self, request: InFlight, error: WireError, now: float, *, struck: bool) -> list[Effect]:
        queue = self._models[request.model]
        if request.cancelled:  # the worker had yet to confirm it, which makes no difference to the client
            return self._end_cancelled(request)
        if struck:
            suspicion = self._poison.find(request.model, request.body, now)
            if self._poison.poisons(suspicion):
                return self._end(request, self._poisoned())
            request.place, request.alone = request.next_seq, self._poison.next_is_last(suspicion)
        if not request.resumable or not queue.accepts:
            return self._end(request, error)
        request.phase, request.worker = RequestPhase.WAITING, ""
        request.resumes += 1
        queue.totals.resumed += 1
        queue.push(request)
        return []


def blamed(running: Collection[InFlight]) -> tuple[set[bytes], bool]:
    """Return the payloads that a death is blamed on, and whether no other can be the reason.

    running  the requests that the worker had, those included that were given up and not yet let go
    """
    payloads = {request.body for request in running}
    if len(payloads) == 1:
        return payloads, True
    tried = {request.body for request in running if request.on_probation}
    untried = {request.body for request in running if request.is_new} - tried
    return tried, len(tried) == 1 and not untried
