"""The requests that wait for one model, the model's workers, and which request goes to which worker. Pure."""

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isqrt

from protocol.errors import ErrorCode, WireError
from supervisor.requests.fair_queue import FairQueue
from supervisor.requests.in_flight import InFlight
from supervisor.requests.worker_slots import Affinity, WorkerSlot, affinity_key

BYTES_PER_TOKEN = 4
"""Bytes of a request's body for each estimated token of its prompt. English text has 4 to 5, a token id has 4."""
RETRY_MS = (100, 60_000)
"""Least and greatest ``retry_after_ms``."""
UNMEASURED_RETRY_MS = 1000
"""``retry_after_ms`` of a model that has finished no request yet."""
SMOOTHING = 0.2
"""Weight of the newest service time in the average."""


@dataclass(frozen=True)
class QueueLimits:
    """How many requests may wait for a model, and how many tokens all their prompts may have (estimated from bytes)."""

    requests: int = 256
    tokens: int = 4_000_000


@dataclass(slots=True)
class ModelTotals:
    """Counts since the supervisor's start.

    seconds        average time from when a worker gets a request to the end of its answer
    tokens_before  tokens that workers have generated which were removed
    """

    finished: int = 0
    errors: int = 0
    resumed: int = 0
    seconds: float | None = None
    tokens_before: int = 0

    def served(self, seconds: float) -> None:
        """Count the time that one request took."""
        before = self.seconds
        self.seconds = seconds if before is None else before + SMOOTHING * (seconds - before)


@dataclass(slots=True)
class ModelQueue:
    """One model. Its requests wait in three queues.

    * ``suspects`` were being computed when a worker died, and may be the reason.
    * ``again`` go on after their worker was ended on purpose.
    * ``fair_queue`` has the others.

    Suspects go first, because their clients wait in the middle of an answer. A worker takes a few suspects at a time,
    and the next one when one has passed its probation. So a second death finds only few on probation, and is blamed on
    those. A suspect with one strike left goes to a worker where no request is new. Nothing else is given to that worker
    until the suspect has passed, so a death meanwhile is the suspect's doing. Requests that have passed go on.
    """

    name: str
    limits: QueueLimits
    worker_slots: dict[str, WorkerSlot]
    fair_queue: FairQueue = field(default_factory=FairQueue)
    again: deque[InFlight] = field(default_factory=deque)
    suspects: list[InFlight] = field(default_factory=list)
    """In the order in which they are tried, see ``_suspect_order``."""
    affinity: Affinity = field(default_factory=Affinity)
    totals: ModelTotals = field(default_factory=ModelTotals)
    most_tried: int = 1
    """How many suspects may be on probation at once in one worker."""
    needs_every_event: bool = False
    """Whether a request waits until other requests have passed their probation. Every event of the model's workers may
    be the one that it waits for."""
    parked: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    """Requests whose constraints are being compiled. They wait beside the three queues."""
    removed: bool = False
    """Whether the model is not configured any more. The record is kept for requests whose ends are still held."""

    @property
    def accepts(self) -> bool:
        """Whether requests may wait, because some worker will serve them."""
        return any(worker_slot.refusal is None for worker_slot in self.worker_slots.values())

    @property
    def needs_load(self) -> bool:
        """Whether an unloaded worker has to be loaded for the requests that wait. It has not while another worker is
        being loaded, or while all workers are loaded."""
        return any(worker_slot.unloaded for worker_slot in self.worker_slots.values()) and not any(
            worker_slot.refusal is None and not worker_slot.unloaded and not worker_slot.capacity
            for worker_slot in self.worker_slots.values()
        )

    @property
    def tokens(self) -> int:
        """Tokens that the model's workers have generated since the supervisor's start, former workers included."""
        return self.totals.tokens_before + sum(worker_slot.tokens for worker_slot in self.worker_slots.values())

    @property
    def running(self) -> int:
        """Requests that the model's workers have."""
        return sum(len(worker_slot.running) for worker_slot in self.worker_slots.values())

    @property
    def waiting(self) -> int:
        """Requests that wait, parked ones included."""
        return len(self.fair_queue) + len(self.again) + len(self.suspects) + len(self.parked)

    @property
    def refusal(self) -> WireError:
        """The error for a request that no worker will serve. The error of a failed worker explains most."""
        refusals = [
            worker_slot.refusal for worker_slot in self.worker_slots.values() if worker_slot.refusal is not None
        ]
        if not refusals:  # the model is configured, but a reload has yet to add its workers
            awaited = f"model {self.name!r} has no worker yet: a reload goes on"
            return WireError(ErrorCode.MODEL_NOT_RUNNING, awaited, retry_after_ms=UNMEASURED_RETRY_MS)
        return next((error for error in refusals if error.code is ErrorCode.MODEL_FAILED), refusals[0])

    def all_waiting(self) -> Iterator[InFlight]:
        """Yield every request that waits."""
        yield from self.suspects
        yield from self.again
        yield from self.fair_queue
        yield from self.parked.values()

    def check_room(self, cost: int) -> None:
        """Raise WireError (OVERLOADED) if a request with a prompt of ``cost`` tokens may not wait here.

        The error names the time after which the requests that wait now will have been started.
        """
        limits = self.limits
        waiting_cost = self.fair_queue.cost + sum(request.cost for request in self.parked.values())
        if self.waiting < limits.requests and (not waiting_cost or waiting_cost + cost <= limits.tokens):
            return
        message = (
            f"model {self.name!r} has {self.waiting} requests waiting (at most {limits.requests}), their prompts about "
            f"{waiting_cost} tokens long (at most {limits.tokens}): try later"
        )
        raise WireError(ErrorCode.OVERLOADED, message, retry_after_ms=self._retry_after_ms())

    def _retry_after_ms(self) -> int:
        capacity = sum(worker_slot.capacity for worker_slot in self.worker_slots.values())
        if self.totals.seconds is None or not capacity:
            return UNMEASURED_RETRY_MS
        least, most = RETRY_MS
        return int(min(most, max(least, 1000 * self.totals.seconds * self.waiting / capacity)))

    def push(self, request: InFlight) -> None:
        """Let a request wait in the queue that it belongs to."""
        if request.place is not None:
            insort(self.suspects, request, key=_suspect_order)
        elif request.resumes:
            self.again.append(request)
        else:
            self.fair_queue.push(request)

    def remove(self, request: InFlight) -> None:
        """Take a waiting request out."""
        if self.parked.pop(request.key, None) is not None:
            return
        if request.place is not None:
            self.suspects.remove(request)
        elif request.resumes:
            self.again.remove(request)
        else:
            self.fair_queue.remove(request)

    def position(self, request: InFlight) -> int:
        """Return about how many requests will be started before this one."""
        if request.key in self.parked:
            return 0
        if request.place is not None:
            return self.suspects.index(request)
        if request.resumes:
            return len(self.suspects) + self.again.index(request)
        return len(self.suspects) + len(self.again) + self.fair_queue.position(request)

    def after_death(self) -> None:
        """Decide how many suspects are tried at once. Call this after the suspects of a death have been pushed.

        With n suspects, k at a time, all have passed after n / k probations. If a death strikes k of them, those are
        then tried one by one. Both together take the fewest probations where k is the root of n.
        """
        self.most_tried = max(1, isqrt(len(self.suspects)))

    def runs(self, process: tuple[str, int]) -> bool:
        """Return whether this process of a worker, (worker, generation), is up."""
        worker, generation = process
        return worker in self.worker_slots and self.worker_slots[worker].generation == generation

    def unpark_orphans(self) -> None:
        """Put parked requests back into their queues if the process that compiled their constraints has ended."""
        for request in list(self.parked.values()):
            if request.compiler is None or not self.runs(request.compiler):
                del self.parked[request.key]
                request.compiler, request.parkings = None, 0
                self.push(request)

    def next(self) -> tuple[WorkerSlot, InFlight] | None:
        """Take out the next request. Return it with the worker that it goes to; None if none can be started now."""
        self.needs_every_event = False
        for worker_slot in self.worker_slots.values():
            worker_slot.review_suspects()
        return self._next_suspect() or self._next_other()

    def _next_suspect(self) -> tuple[WorkerSlot, InFlight] | None:
        free = [worker_slot for worker_slot in self.worker_slots.values() if worker_slot.free_in_batch]
        if not self.suspects or not free:
            return None
        request = self.suspects[0]
        if request.alone:
            able = [worker_slot for worker_slot in free if not worker_slot.unsettled]
        else:
            able = [
                worker_slot
                for worker_slot in free
                if worker_slot.probations < self.most_tried and not worker_slot.tries_alone
            ]
        if not able:
            self.needs_every_event = True
            return None
        del self.suspects[0]
        return self._choose_worker(able, request), request

    def _next_other(self) -> tuple[WorkerSlot, InFlight] | None:
        """Find a request that is no suspect, and a worker whose room is not needed for a waiting suspect."""
        if not (self.again or self.fair_queue):
            return None
        room = [
            worker_slot for worker_slot in self.worker_slots.values() if len(worker_slot.running) < worker_slot.capacity
        ]
        if self.suspects:
            if sum(worker_slot.free_in_batch for worker_slot in room) <= len(self.suspects):
                return None
            room = [worker_slot for worker_slot in room if worker_slot.free_in_batch]
        kept = self._kept_for_one_alone()
        free = [worker_slot for worker_slot in room if worker_slot is not kept and not worker_slot.tries_alone]
        if not free:
            self.needs_every_event = self.needs_every_event or bool(room)
            return None
        request = self.again.popleft() if self.again else self._pop()
        return self._choose_worker(free, request), request

    def _kept_for_one_alone(self) -> WorkerSlot | None:
        """Return the worker that gets no other requests, so that soon none is new there and the suspect that comes next
        can be tried there alone. The other workers still get requests."""
        if not self.suspects or not self.suspects[0].alone:
            return None
        able = [worker_slot for worker_slot in self.worker_slots.values() if worker_slot.capacity]
        return min(able, key=lambda worker_slot: (not worker_slot.free_in_batch, worker_slot.unsettled), default=None)

    def _pop(self) -> InFlight:
        if len(self.fair_queue) > 1:  # with one request there is nothing to choose, and accounts need not be exact
            for worker_slot in self.worker_slots.values():
                for running in worker_slot.running.values():
                    running.settle()
        return self.fair_queue.pop()

    def _choose_worker(self, free: Sequence[WorkerSlot], request: InFlight) -> WorkerSlot:
        if len(self.worker_slots) == 1:
            return free[0]
        for worker_slot in free:
            if worker_slot.process == request.compiler:  # it keeps the compiled constraint
                return worker_slot
        return self.affinity.choose(free, affinity_key(request))


def _suspect_order(suspect: InFlight) -> tuple[bool, bool, int]:
    """Return the key by which suspects are sorted.

    A suspect whose client waits in the middle of the answer goes before one that the dead worker may not even have
    begun. Suspects that must be tried alone go after the others. Then shorter prompts go first, so that a long one
    delays no other request.
    """
    return not suspect.has_tokens, suspect.alone, suspect.cost + len(suspect.ids) // 4
