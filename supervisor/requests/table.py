"""The unfinished requests of all models and connections: which queue or worker has each, and how each ends. Pure.

A request enters the table when it is accepted. It leaves the table when its terminal event has been put on the way
*and* the worker no longer has its job (the worker said so, or is dead). If the request left earlier, a later cancel
would find nothing to cancel, and the job would go on.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

from protocol.codec import encode, pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import TERMINAL, CancelJob, FinishReason, JobMessage, Report
from supervisor.requests.counters import REQUESTS
from supervisor.requests.credit import CreditControl
from supervisor.requests.poison import PoisonTracker
from supervisor.requests.queue import ModelQueue, WorkerSlot
from supervisor.requests.request import Awaited, Effect, InFlight, LoadForRequests, ToClient, ToWorker
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.stories import DISCONNECTED, RequestEnd, Stories
from supervisor.requests.usage_ledger import UsageLedger

# Keep the times at which requests expire, in a heap that skips outdated entries. Pure.


LIMITS = ("queue_ms", "ttft_ms", "deadline_ms")
"""The time limits that a request's route may have."""
CANCEL = "cancel"
"""The limit of a cancelled request: until then the worker has to confirm that it has let the request go."""


class Deadlines:
    """A heap of entries (time, limit, request), earliest first. Times are monotonic seconds.

    is_live  whether an entry of this request still matters
    alarm    called with each time at which ``take`` has to be called, unless it was called before
    """

    def __init__(self, is_live: Callable[[InFlight], bool], alarm: Callable[[float], object]) -> None:
        self._is_live = is_live
        self._alarm = alarm
        self._heap: list[tuple[float, int, str, InFlight]] = []
        self._ties = count()
        self._clear_at = 1024

    def add_limits(self, request: InFlight) -> None:
        """Watch the limits that a new request has, and forget the earliest entries as far as their requests have ended.

        With limits of hours, the supervisor would hold a thousand ended requests for as long.
        """
        while self._heap and not self._is_live(self._heap[0][3]):
            heapq.heappop(self._heap)
        for limit in LIMITS:
            if (milliseconds := getattr(request.route, limit)) is not None:
                self.add(request.accepted + milliseconds / 1000, limit, request)

    def add(self, when: float, limit: str, request: InFlight) -> None:
        """Watch one limit of a request: one of ``LIMITS``, or ``CANCEL``."""
        heapq.heappush(self._heap, (when, next(self._ties), limit, request))
        if len(self._heap) > self._clear_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[3])]
            heapq.heapify(self._heap)
            self._clear_at = max(1024, 2 * len(self._heap))
        self._alarm(when)

    def take(self, now: float) -> list[tuple[str, InFlight]]:
        """Remove and return everything that is due, as (limit, request). Set the alarm for what is due next."""
        due = []
        while self._heap and (self._heap[0][0] <= now or not self._is_live(self._heap[0][3])):
            _, _, limit, request = heapq.heappop(self._heap)
            if self._is_live(request):
                due.append((limit, request))
        if self._heap:
            self._alarm(self._heap[0][0])
        return due


def is_met(limit: str, request: InFlight) -> bool:
    """Return whether a request already has what its limit is for: a worker (queue_ms), or a token (ttft_ms)."""
    if limit == "queue_ms":
        return request.started is not None
    return limit == "ttft_ms" and request.has_tokens


def too_late(limit: str, request: InFlight) -> WireError:
    """Return the error that ends a request which has exceeded this limit of its route."""
    milliseconds = getattr(request.route, limit)
    if limit == "queue_ms":
        message = f"the request waited for a worker for {milliseconds} ms, which is its queue_ms"
        return WireError(ErrorCode.QUEUE_TIMEOUT, message, field="route.queue_ms")
    awaited = "its first token" if limit == "ttft_ms" else "the end of its answer"
    message = f"{awaited} did not come within {milliseconds} ms, which is the request's {limit}"
    return WireError(ErrorCode.DEADLINE_EXCEEDED, message, field=f"route.{limit}")


MOST_PARKINGS = 2
"""The number of times that a request may be parked. One worker may compile its constraint, and then another worker is
free first."""


class RequestTable:
    """Holds the requests and the queues of their models, gives requests to workers, and ends requests.

    Only ``Scheduler``, ``WorkerEvents`` and ``WorkerEnds`` use the table. Times are monotonic seconds.

    queues           the queues of the models, by the model's name
    queue_of_worker  the queue of each worker's model, by the worker's name
    live             the requests, by (channel, request)
    leaving          the error for new requests once the supervisor is shutting down
    stories          the last requests that have ended
    ledger           gives requests the counters for their tokens; None to count nothing
    alarm            see ``Scheduler``
    """

    def __init__(
        self,
        credit: CreditControl,
        poison: PoisonTracker,
        ledger: UsageLedger | None,
        stories: Stories,
        alarm: Callable[[float], object],
    ) -> None:
        self.ledger = ledger
        self.credit, self.poison = credit, poison
        self.queues: dict[str, ModelQueue] = {}
        self.queue_of_worker: dict[str, ModelQueue] = {}
        self.live: dict[tuple[int, int], InFlight] = {}
        self.leaving: WireError | None = None
        self.stories = stories
        self.deadlines = Deadlines(lambda request: self.live.get(request.key) is request, alarm)

    def slot_of(self, worker: str) -> WorkerSlot:
        """Return the slot of a worker that was added and not removed."""
        return self.queue_of_worker[worker].worker_slots[worker]

    def add(self, queue: ModelQueue, request: InFlight) -> None:
        """Take a new request in, and let it wait."""
        self.live[request.key] = request
        if self.ledger is not None:
            request.usage_place, counters = self.ledger.row(request.owner, request.model)
            counters[REQUESTS] += 1
            request.count_in(counters)
        queue.push(request)
        request.reported = queue.position(request)
        request.note(request.accepted, "accepted", queue_position=request.reported, ready=queue.is_ready)
        self.deadlines.add_limits(request)

    # --- into a worker's slot, and out of it ----------------------------------------------------------------------

    def dispatch(self, queue: ModelQueue, now: float) -> list[Effect]:
        """Give waiting requests to the model's workers, as far as these have room."""
        effects: list[Effect] = []
        queue.unpark_orphans()
        queue.needs_every_event = False
        while queue.waiting and (chosen := queue.next()) is not None:
            worker_slot, request = chosen
            # A request with the same payload may have been computed, or blamed for a death, while this one waited.
            suspicion = self.poison.find(request.model, request.body, now)
            if self.poison.poisons(suspicion):
                effects += self.end(request, self.poison.error(), now)
                continue
            if self.poison.update(request, suspicion):
                queue.push(request)
                continue
            if request.compiler != worker_slot.process:
                effects += self._forget_constraint(queue, request)
            request.compiler = None
            request.phase, request.worker = RequestPhase.RUNNING, worker_slot.worker
            worker_slot.give(request)
            request.note(now, "placed", **worker_slot.place)
            if request.started is None:
                request.started = now
            job = JobMessage(request.channel, request.request, _carry(request), request.body)
            effects.append(ToWorker(*worker_slot.process, encode(job)))
        if queue.waiting > len(queue.parked) and queue.needs_load:
            effects.append(LoadForRequests(queue.name))
        return effects

    def withdraw(self, queue: ModelQueue, request: InFlight) -> list[Effect]:
        """Take a waiting request out of its queue. Tell the worker that compiles its constraint, or has compiled it."""
        queue.remove(request)
        return self._forget_constraint(queue, request)

    @staticmethod
    def _forget_constraint(queue: ModelQueue, request: InFlight) -> list[Effect]:
        """Have the worker that keeps a constraint for this request forget it, if the worker still runs."""
        process, request.compiler = request.compiler, None
        if process is None or not queue.runs(process):
            return []
        return [ToWorker(*process, encode(CancelJob(request.channel, request.request)))]

    def abandon(self, request: InFlight) -> list[Effect]:
        """Have the worker of a running request let it go. The request stays in the table until the worker has done
        so."""
        process = self.slot_of(request.worker).process
        return [ToWorker(*process, encode(CancelJob(request.channel, request.request)))]

    @staticmethod
    def leave_slot(worker_slot: WorkerSlot, request: InFlight) -> None:
        """Take note that the worker has let a request go."""
        del worker_slot.running[request.key]
        request.settle()

    # --- ends -----------------------------------------------------------------------------------------------------

    def finish(self, worker_slot: WorkerSlot, request: InFlight, now: float) -> None:
        """Take note that the worker has ended a request, and that the terminal event is on its way to the client."""
        self._served(worker_slot, request, now)
        self._ended(request, request.end, now)
        self.leave(request)

    def finish_held(self, worker_slot: WorkerSlot, request: InFlight, now: float) -> None:
        """Take note that the worker has ended a request, whose client still has to grant credit for the end."""
        self._served(worker_slot, request, now)
        request.phase = RequestPhase.HELD
        self.queues[request.model].totals.figures.add(request.record(request.end, now))

    def _served(self, worker_slot: WorkerSlot, request: InFlight, now: float) -> None:
        if not (request.end.error or request.cancelled or request.started is None):
            self.queues[request.model].totals.served(now - request.started)
            self.poison.clear(request.model, request.body)
        self.leave_slot(worker_slot, request)

    def give_up(self, request: InFlight, error: WireError, now: float) -> list[Effect]:
        """End a request with an error, whether it waits, runs, or holds its last events."""
        told: list[Effect] = []
        if runs := request.phase is RequestPhase.RUNNING:
            told = self.abandon(request)
        elif request.phase is RequestPhase.WAITING:
            told = self.withdraw(self.queues[request.model], request)
        return told + self.end(request, error, now, runs=runs)

    def end(self, request: InFlight, error: WireError | None, now: float, *, runs: bool = False) -> list[Effect]:
        """Send the terminal event of a request that its worker does not end.

        error  None for a request that was cancelled
        runs   whether a worker still has its job. Then it stays in the table. Else it must be in no queue
        """
        how = RequestEnd(FinishReason.CANCELLED) if error is None else RequestEnd.of_error(error)
        self._ended(request, how, now)
        terminal = self.credit.end(request, error)
        if runs:
            request.phase = RequestPhase.ENDED
        else:
            self.leave(request)
        return [terminal]

    def release(self, request: InFlight, now: float, *, all_of_it: bool = False) -> list[Effect]:
        """Send held events in order, as far as credit goes. If the terminal event is among them, the request leaves."""
        effects, last = self.credit.release(request, now, all_of_it=all_of_it)
        if last & TERMINAL:
            self._ended(request, request.end, now)
            self.leave(request)
        return list(effects)

    def leave(self, request: InFlight) -> None:
        """Take a request out of the table. Its slot or its place in a queue must have been given up before."""
        request.phase = RequestPhase.ENDED  # a list that is being worked through may still hold the request
        request.body, request.ids = b"", bytearray()  # the heap of deadlines may hold the request for long
        if request.holds:
            self.credit.drop(request)
        self.live.pop(request.key, None)

    def left(self, request: InFlight, now: float) -> None:
        """Take note that the client of a request has gone."""
        if request.phase is not RequestPhase.ENDED:
            self._ended(request, RequestEnd(DISCONNECTED), now)

    def _ended(self, request: InFlight, end: RequestEnd, now: float) -> None:
        """Count and remember a request that has ended: its client is sent its terminal event now, or is gone.

        Call this once for each request, before its phase says that it has ended.
        """
        record, totals = request.record(end, now), self.queues[request.model].totals
        if request.phase is not RequestPhase.HELD:  # else the metrics have counted the end that its worker has made
            totals.figures.add(record)
        if end.error is not None:
            totals.errors += 1
        elif end.finish_reason != DISCONNECTED:
            totals.finished += 1
        self.stories.add(record)


def _carry(request: InFlight) -> dict[str, object]:
    """Return the fields that the worker needs beside the body."""
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
    if request.verb:
        carry["verb"] = request.verb
    if request.defaults:
        carry["defaults"] = request.defaults
    return carry


# Tell clients that wait how far their requests are. Pure.


MOST_REPORTS = 256
"""The most reports that are made at once for one model. Counting the places of n requests takes n² steps."""


def report(request: InFlight, fields: dict[str, object]) -> ToClient:
    """Return the effect that sends REPORT to the client of a request."""
    return ToClient(request.channel, encode(Report(request.request, pack_body(fields))))


def loading(queue: ModelQueue, progress: Mapping[str, Any]) -> list[Effect]:
    """Report how far the load of a model is to the clients that wait for it. ``progress`` is as ``status`` shows it."""
    if queue.is_ready:
        return []  # another worker is up: the clients wait for room there
    fields = {"phase": "loading", "part": progress["phase"], "done": progress["done"], "total": progress["total"]}
    fields |= {name: progress[name] for name in ("unit", "per_s") if progress.get(name)}
    return [report(request, fields) for request in _interested(queue.all_waiting())]


def positions(queue: ModelQueue) -> list[Effect]:
    """Report the place in the queue to each client whose request has moved on since the last report, or whose model
    waits for something else."""
    effects: list[Effect] = []
    for request in chain(_interested(queue.ahead), _interested(queue.all_waiting())):
        position, told = queue.position(request), awaited_text(queue.waits_for, request.owner.may_use)
        if position != request.reported or told != request.told:
            request.reported, request.told = position, told
            fields: dict[str, object] = {"phase": "queued", "queue_position": position}
            effects.append(report(request, fields | ({"waits_for": told} if told else {})))
    return effects


def awaited_text(awaited: Awaited, may_use: Callable[[str], bool] = lambda model: True) -> str:
    """Return what a model waits for before it can be loaded, for people: "a to finish 2 requests"; "" for nothing.

    may_use  whether the reader may know of a model. Others have no name in the text
    """
    parts = []
    for model, running in awaited:
        work = f"finish {running} request{'s' if running > 1 else ''}" if running else "make room"
        parts.append(f"{model if may_use(model) else 'another model'} to {work}")
    return " and ".join(parts)


def _interested(waiting: Iterable[InFlight]) -> Iterator[InFlight]:
    """Yield the requests with ``progress``, except those that have a token already."""
    return islice((r for r in waiting if r.route.progress and not r.has_tokens), MOST_REPORTS)
