"""The table of requests, and what everything that happens does to it. Pure. See ``scheduler``.

A request enters the table when it is ACCEPTED and leaves it when its terminal event has been put on the way *and* the
worker no longer holds its job (it said so, or it is dead). Removing it earlier is how zombies are made: a later cancel
would find nothing to cancel.
"""

from protocol import limits
from protocol.codec import encode
from protocol.errors import ErrorCode, WireError
from protocol.messages import TERMINAL, CancelJob, EventFlag, JobMessage
from supervisor.requests.credit_control import CreditControl, SendBufferLimits
from supervisor.requests.deadlines import Deadlines
from supervisor.requests.in_flight import Effect, InFlight, ToWorker, Wake
from supervisor.requests.model_queue import ModelQueue
from supervisor.requests.poison import PoisonPolicy, PoisonTracker, Suspicion
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.worker_slots import WorkerSlot

MOST_PARKINGS = 2
"""How often a request may be parked. One worker may compile its constraint, and then another worker is free first."""


class RequestTable:
    """The requests of all models and connections. Times are monotonic seconds."""

    def __init__(
        self,
        *,
        window: int = limits.STREAM_WINDOW,
        holds: SendBufferLimits | None = None,
        strikes: PoisonPolicy | None = None,
    ) -> None:
        self._credit = CreditControl(window, holds)
        self._poison = PoisonTracker(strikes or PoisonPolicy())
        self._models: dict[str, ModelQueue] = {}
        self._of_worker: dict[str, ModelQueue] = {}
        self._live: dict[tuple[int, int], InFlight] = {}
        self._due = Deadlines(lambda request: self._live.get(request.key) is request)
        self._leaving: WireError | None = None
        """What new requests are told once the supervisor is shutting down."""
        self.dropped_frames = 0
        """EVENTS frames of a former generation, or events of requests that are over: dropped, counted."""

    # --- counts -------------------------------------------------------------------------------------------------

    def counts(self, model: str) -> tuple[int, int]:
        """(running, waiting) requests of a model. Running includes those whose worker has yet to confirm a cancel."""
        queue = self._models[model]
        return queue.running, queue.waiting

    def work(self, worker: str) -> tuple[int, int]:
        """(requests that a worker has, tokens that it and its predecessors have generated)."""
        worker_slot = self._of_worker[worker].worker_slots[worker]
        return len(worker_slot.running), worker_slot.tokens

    def worker_slot(self, worker: str) -> WorkerSlot | None:
        """Return the worker slot for the fast path, which does not call ``events``.

        Return None where a waiting request may depend on each single event, and for a worker that was removed.
        """
        queue = self._of_worker.get(worker)
        return None if queue is None or queue.needs_every_event else queue.worker_slots.get(worker)

    def totals(self, model: str) -> dict[str, int]:
        """Counts since the supervisor's start: tokens generated, requests finished, ended with an error, resumed."""
        queue = self._models[model]
        totals = queue.totals
        return {
            "tokens": totals.tokens_before + sum(worker_slot.tokens for worker_slot in queue.worker_slots.values()),
            "finished": totals.finished,
            "errors": totals.errors,
            "resumed": totals.resumed,
        }

    @property
    def held_bytes(self) -> int:
        """Bytes of events that wait for clients to read."""
        return self._credit.held_bytes

    def channels(self) -> set[int]:
        """Connections with unfinished requests."""
        return {channel for channel, _ in self._live}

    def holds(self, channel: int, request: int) -> bool:
        """Whether a request is unfinished, or its worker has yet to let go of it."""
        return (channel, request) in self._live

    # --- into a worker's hands, and out of them -------------------------------------------------------------------

    def _dispatch(self, queue: ModelQueue, now: float) -> list[Effect]:
        effects: list[Effect] = []
        queue.unpark_orphans()
        queue.needs_every_event = False
        while queue.waiting and (chosen := queue.next()) is not None:
            worker_slot, request = chosen
            suspicion = self._poison.find(request.model, request.body, now)  # others like it may have run meanwhile
            if self._poison.poisons(suspicion):
                effects += self._end(request, self._poisoned())
                continue
            if self._has_changed(request, suspicion):
                queue.push(request)
                continue
            if request.compiler != worker_slot.process:
                effects += self._forget_constraint(queue, request)
            request.compiler = None
            request.phase, request.worker = RequestPhase.RUNNING, worker_slot.worker
            worker_slot.give(request)
            if request.started is None:
                request.started = now
            job = JobMessage(request.channel, request.request, _carry(request), request.body)
            effects.append(ToWorker(*worker_slot.process, encode(job)))
        if queue.waiting > len(queue.parked) and queue.sleeps:
            effects.append(Wake(queue.name))
        return effects

    def _has_changed(self, request: InFlight, suspicion: Suspicion | None) -> bool:
        """Bring a request up to date with what is remembered of its payload. Return whether it has become a suspect, or
        one of another kind, and thus has other things to wait for."""
        if suspicion is None:
            request.place, request.alone = None, False
            return False
        alone = self._poison.next_is_last(suspicion)
        if request.place is not None and request.alone == alone:
            return False
        request.place = suspicion.place if request.place is None else request.place
        request.alone = alone
        return True

    def _finish(self, worker_slot: WorkerSlot, request: InFlight, flags: int, now: float) -> None:
        """The worker said how it ended, and the client was told."""
        self._note_served(request, flags, now)
        self._count_end(request, flags)
        self._leave_seat(worker_slot, request)
        self._leave(request)

    def _note_served(self, request: InFlight, flags: int, now: float) -> None:
        if flags & EventFlag.ERROR or request.cancelled or request.started is None:
            return
        self._models[request.model].totals.served(now - request.started)
        self._poison.clear(request.model, request.body)

    def _count_end(self, request: InFlight, flags: int) -> None:
        totals = self._models[request.model].totals
        if flags & EventFlag.ERROR:
            totals.errors += 1
        else:
            totals.finished += 1

    def _abandon(self, request: InFlight) -> list[Effect]:
        """Have the worker let go. The request stays in the table until it did."""
        process = self._of_worker[request.worker].worker_slots[request.worker].process
        return [ToWorker(*process, encode(CancelJob(request.channel, request.request)))]

    def _give_up(self, request: InFlight, error: WireError) -> list[Effect]:
        """End a request wherever it is."""
        if request.phase is RequestPhase.RUNNING:
            return self._abandon(request) + self._end_running(request, error)
        withdrawn: list[Effect] = []
        if request.phase is RequestPhase.WAITING:
            withdrawn = self._withdraw(self._models[request.model], request)
        return withdrawn + self._end(request, error)

    def _withdraw(self, queue: ModelQueue, request: InFlight) -> list[Effect]:
        """Take a request out of the lines. Tell the worker that compiles its constraint, or has compiled it."""
        queue.remove(request)
        return self._forget_constraint(queue, request)

    @staticmethod
    def _forget_constraint(queue: ModelQueue, request: InFlight) -> list[Effect]:
        """Have the worker that keeps a constraint for this request forget it, if it still runs."""
        process, request.compiler = request.compiler, None
        if process is None or not queue.runs(process):
            return []
        return [ToWorker(*process, encode(CancelJob(request.channel, request.request)))]

    def _end_running(self, request: InFlight, error: WireError) -> list[Effect]:
        """The terminal event of a request whose worker still has its job."""
        self._models[request.model].totals.errors += 1
        request.phase = RequestPhase.ENDED
        return [self._credit.end_with_error(request, error)]

    def _end(self, request: InFlight, error: WireError) -> list[Effect]:
        """The terminal event of a request that is in no line, and that no worker has."""
        self._models[request.model].totals.errors += 1
        end = self._credit.end_with_error(request, error)
        self._leave(request)
        return [end]

    def _end_cancelled(self, request: InFlight) -> list[Effect]:
        """The same, of one that its client has cancelled."""
        self._models[request.model].totals.finished += 1
        end = self._credit.end_cancelled(request)
        self._leave(request)
        return [end]

    def _leave_seat(self, worker_slot: WorkerSlot, request: InFlight) -> None:
        del worker_slot.running[request.key]
        request.settle()

    def _leave(self, request: InFlight) -> None:
        """Out of the table."""
        request.phase = RequestPhase.ENDED  # it may still be in a list that is being worked through
        request.body, request.ids = b"", bytearray()  # the heap of due times may remember it for long
        if request.holds:
            self._credit.drop(request)
        self._live.pop(request.key, None)

    def _release(self, request: InFlight, now: float, *, all_of_it: bool = False) -> list[Effect]:
        """Send held events in order, as far as credit goes."""
        frames, last = self._credit.release(request, now, all_of_it=all_of_it)
        if last & TERMINAL:
            self._count_end(request, last)
            self._leave(request)
        return list(frames)

    def _poisoned(self) -> WireError:
        policy = self._poison.policy
        return WireError(
            ErrorCode.POISONED,
            f"the deaths of {policy.limit} workers are blamed on this request, or one just like it: it is not tried "
            f"again for {policy.window_s:g} s",
        )


def _carry(request: InFlight) -> dict[str, object]:
    """What the worker has to know beside the body."""
    carry: dict[str, object] = {}
    if request.started is not None:
        carry["queue_ms"] = 1000 * (request.started - request.accepted)
    if request.next_seq:
        carry["seq"], carry["token_ids"] = request.next_seq, bytes(request.ids)
    if request.resumes:
        carry["resumes"] = request.resumes
    if request.route.progress:
        carry["progress"] = True
    if request.party != request.channel:
        carry["party"] = request.party
    if request.parkings >= MOST_PARKINGS:
        carry["stay"] = True
    return carry
