"""Requests that hold no slot while a worker compiles their constraints. Pure. See ``scheduler``.

A worker gives a job back (PARKED) whose constraint it has to compile first. The request waits beside the lines, and its
slot is given to another one. When the worker has compiled the constraint (COMPILED), the request goes back to its place
at the head of its client's requests, and takes its turn again. It counts as waiting all the time.

What a compilation costs is charged to whoever caused it, as tokens: the client's account in the line, and over TCP what
its key may use a minute (see ``ports.gate``).
"""

from protocol.errors import ErrorCode, FrameError
from supervisor.requests.in_flight import Effect
from supervisor.requests.reports import report
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.request_table import RequestTable

TOKENS_PER_MS = 1
"""What a millisecond of compilation counts as: a costly constraint is worth an answer of a thousand tokens."""
LONGEST_MS = 3_600_000
"""A worker that says that a compilation took longer is out of its mind: it takes a second, or two."""


class Parking(RequestTable):
    """What workers say of the constraints of requests."""

    def parked(self, worker: str, key: tuple[int, int], now: float) -> list[Effect]:
        """A worker gives a job back until its constraint is compiled."""
        queue = self._of_worker[worker]
        worker_slot = queue.worker_slots[worker]
        request = worker_slot.running.get(key)
        if request is None:
            return []
        self._leave_seat(worker_slot, request)
        effects: list[Effect] = []
        if request.phase is RequestPhase.ENDED:
            self._leave(request)
        elif request.cancelled:
            effects += self._end_cancelled(request)
        else:
            request.phase, request.started = RequestPhase.WAITING, None
            request.parkings += 1
            request.compiler = worker_slot.process
            queue.parked[key] = request
            request.reported = 0
            if request.route.queue_ms is not None:  # it may have passed while the worker had the job
                self._due.add(request.accepted + request.route.queue_ms / 1000, "queue_ms", request)
            if request.route.progress and not request.has_tokens:
                effects.append(report(request, {"phase": "compiling"}))
        return effects + self._dispatch(queue, now)

    def compiled(self, worker: str, key: tuple[int, int], milliseconds: int, now: float) -> list[Effect]:
        """A worker has compiled the constraint of a request, or given it up: the request takes its turn again. Raises
        FrameError for a time that cannot be."""
        if milliseconds > LONGEST_MS:
            raise FrameError(ErrorCode.BAD_FRAME, f"a constraint took {milliseconds} ms of processor time")
        queue = self._of_worker[worker]
        queue.fair_queue.charge(key[0], TOKENS_PER_MS * milliseconds)
        request = queue.parked.get(key)
        if request is None or request.compiler != queue.worker_slots[worker].process:
            return []
        del queue.parked[key]
        queue.push(request)
        return self._dispatch(queue, now)
