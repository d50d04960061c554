"""The requests that wait for one model, its workers, and the choice of the next request and its worker. Pure."""

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from math import isqrt
from typing import Any

from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError, WireError
from supervisor.requests.figures import RequestFigures
from supervisor.requests.request import Account, Awaited, Band, InFlight, digest
from supervisor.requests.request_phase import RequestPhase

# The workers of a model as the scheduler sees them, and the choice of the worker for a conversation. Pure.


MOST_PREFIXES = 10_000
"""The number of conversations remembered for a model. The least recently used are forgotten first."""
PREFIX_CHARS = 256
"""Characters at the beginning of a prompt that identify its conversation."""
FIRST_TURN_CHARS = 4096
"""Characters of a chat's messages that identify its conversation. Only messages up to the user's first one count,
because later messages are added at every turn."""
LONG_BODY = 64 << 10
"""The longest body that is unpacked to find the beginning of its prompt. For a longer one, the first bytes of the body
identify the conversation: while the supervisor unpacks megabytes, all clients wait."""
IMBALANCE = 0.5
"""The share of its capacity by which a worker may be busier than the least busy one, and still be preferred for its
cache. Without this limit, a system prompt that all conversations share would send all of them to one worker."""


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """One worker of a model, as the scheduler sees it.

    worker      its name
    refusal     the error for new requests; None while requests may wait for this worker
    capacity    jobs that the worker takes now
    batch_size  jobs that it computes at once
    generation  which of the worker's processes is up; 0 if none is ready
    gpu         the GPUs that the process is on, for people
    running     the requests that the worker has, by (channel, request)
    """

    worker: str
    refusal: WireError | None
    capacity: int = 0
    batch_size: int = 0
    generation: int = 0
    gpu: str = ""
    running: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    tokens: int = 0
    """Tokens that the worker has generated since the supervisor's start."""
    unsent: set[tuple[int, int]] = field(default_factory=set)
    """Keys of running requests that could not be sent, because the worker was not connected any more."""
    held_back: int = 0
    """The capacity that the worker has again when it yields to no other model any more; 0 if it does not yield."""
    unloaded: bool = False
    """True while the worker has no process until requests need it."""
    suspects: list[InFlight] = field(default_factory=list)
    """The running requests that have yet to pass their probation."""

    def open(self, generation: int, capacity: int, batch_size: int, gpu: str) -> None:
        """Take note that a new process of the worker is ready."""
        self.generation, self.capacity, self.batch_size, self.gpu = generation, capacity, batch_size, gpu
        self.held_back = 0

    def close(self) -> list[InFlight]:
        """Take note that the process is gone. Return the requests that it had."""
        running = list(self.running.values())
        self.generation = self.capacity = self.batch_size = self.held_back = 0
        self.running.clear()
        self.suspects.clear()
        self.unsent.clear()
        return running

    def give(self, request: InFlight) -> None:
        """Give the worker a request."""
        self.running[request.key] = request
        request.begun = request.next_seq
        if request.place is not None:
            self.suspects.append(request)

    def review_suspects(self) -> None:
        """Forget the suspects that have ended, and those that have passed their probation."""
        if self.suspects:
            self.suspects = [r for r in self.suspects if self.running.get(r.key) is r and not r.has_passed]

    @property
    def probations(self) -> int:
        """Return how many requests are on probation."""
        return sum(request.on_probation for request in self.suspects)

    @property
    def tries_alone(self) -> bool:
        """Return whether a request is on probation that must be the only one on probation."""
        return any(request.alone and request.on_probation for request in self.suspects)

    @property
    def unsettled(self) -> int:
        """Return how many requests may be the reason if the worker dies now: new ones, and those on probation."""
        return sum(request.is_new or request.on_probation for request in self.running.values())

    @property
    def computed(self) -> list[InFlight]:
        """Return the running requests that have been sent."""
        return [request for key, request in self.running.items() if key not in self.unsent]

    @property
    def ahead(self) -> list[InFlight]:
        """Return the requests that wait in the worker for a place in its batch, in the order of their turns.

        A worker is given a few requests ahead of free places, and computes as many as its batch has places, in the
        order in which it got them. A request with an event of this worker certainly has a place.
        """
        if len(self.running) <= self.batch_size:
            return []
        running = [request for request in self.running.values() if request.phase is RequestPhase.RUNNING]
        excess = len(running) - self.batch_size
        return [request for request in running if request.next_seq == request.begun][-excess:] if excess > 0 else []

    @property
    def free_in_batch(self) -> int:
        """Return how many more requests the worker could compute at once."""
        return max(0, min(self.batch_size, self.capacity) - len(self.running))

    @property
    def process(self) -> tuple[str, int]:
        """Return the worker's name and the generation of its process."""
        return self.worker, self.generation

    @property
    def place(self) -> dict[str, str]:
        """Return the name of the worker as people know it, and its GPUs."""
        return {"worker": self.worker.partition("~")[0], "gpu": self.gpu}

    @property
    def load(self) -> float:
        """Return the share of the worker's capacity that is in use."""
        return len(self.running) / self.capacity


class Affinity:
    """Remembers which worker computed a conversation last, because the prefix is in that worker's cache."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, worker_slots: Sequence[WorkerSlot], key: bytes) -> WorkerSlot:
        """Choose one of the slots that have room.

        The worker that computed the conversation last is chosen, unless it is much busier than the least busy worker.
        Else the least busy worker is chosen.

        key  identifies the conversation, see ``affinity_key``
        """
        worker = self._last.get(key)
        chosen = min(worker_slots, key=lambda worker_slot: worker_slot.load)
        for worker_slot in worker_slots:
            if worker_slot.worker == worker and worker_slot.load <= chosen.load + IMBALANCE:
                chosen = worker_slot
                break
        self._last[key] = chosen.worker
        self._last.move_to_end(key)
        if len(self._last) > MOST_PREFIXES:
            self._last.popitem(last=False)
        return chosen


def affinity_key(request: InFlight) -> bytes:
    """Return the key of the request's conversation: a digest of its affinity, else of the beginning of its prompt."""
    if request.route.affinity is not None:
        kind, identity = b"k", request.route.affinity.encode(errors="surrogatepass")
    elif request.verb:  # nothing of it is kept in a cache
        kind, identity = b"r", request.id.encode()
    else:
        kind, identity = b"p", _beginning(request.body)
    return kind + digest(identity)  # many keys are remembered, and an affinity may have 1 KB


def _beginning(body: bytes) -> bytes:
    """Return the beginning of the prompt that a body holds."""
    if len(body) > LONG_BODY:
        return body[:FIRST_TURN_CHARS]
    try:
        fields = unpack_body(body)
    except FrameError:  # the worker will refuse the request
        return b""
    if isinstance(ids := fields.get("token_ids"), bytes):
        return ids[:PREFIX_CHARS]
    if isinstance(prompt := fields.get("prompt"), str):
        return prompt[:PREFIX_CHARS].encode(errors="surrogatepass")
    turns = []
    if isinstance(messages := fields.get("messages"), list):
        for message in messages:
            if isinstance(message, dict) and isinstance(content := message.get("content"), str):
                turns.append(content[:FIRST_TURN_CHARS])
                if message.get("role") == "user":
                    break
    return "\0".join(turns)[:FIRST_TURN_CHARS].encode(errors="surrogatepass")


# The queue of new requests. It is fair between clients and weighted by priority. ``Account`` and ``Band`` in
# ``request.py`` have its counts.
#
# The method is start-time fair queueing (Goyal, Vin, Cheng 1996) on two levels. Clients share tokens, as in VTC (Sheng
# et al., "Fairness in Serving Large Language Models", 2024). Each client has an account for each priority. The account
# counts the tokens that were computed for the client. The next request is one of the account that was served least.
# Priorities share in the same way, by weight. A priority that is seldom used goes first when it is used. The lowest
# priority still moves while the others have requests waiting, so no client starves. A client that comes, or comes back,
# begins where the other clients are: idle time earns no claim.
#
# A client is a party, see ``InFlight``: a connection over ipc, or a key with all its requests.


WEIGHTS = {"interactive": 16, "normal": 4, "batch": 1}
"""The share of each priority, in parts of 21, while all three have requests waiting."""
_ties = count()


class FairQueue:
    """Requests in the order in which they are to be given to workers."""

    def __init__(self) -> None:
        self._bands = {name: Band(weight) for name, weight in WEIGHTS.items()}
        self._clock = 0.0
        """``served`` of the band that was chosen last."""
        self.cost = 0
        """Tokens of the prompts of all requests that wait."""

    def __len__(self) -> int:
        return sum(band.waiting for band in self._bands.values())

    def __iter__(self) -> Iterator["InFlight"]:
        for band in self._bands.values():
            for account in band.accounts.values():
                yield from account.requests

    def account(self, party: int, priority: str) -> Account:
        """Return a client's account. It is made at the client's first request of this priority."""
        band = self._bands[priority]
        account = band.accounts.get(party)
        if account is None:
            account = band.accounts[party] = Account(band)
        return account

    def charge(self, party: int, tokens: int) -> None:
        """Charge a client for something that is not part of an answer. A client that is gone is not charged."""
        accounts = (band.accounts.get(party) for band in self._bands.values())
        if (account := next(filter(None, accounts), None)) is not None:
            account.charge(tokens)

    def forget(self, party: int) -> None:
        """Forget a client that is gone. None of its requests may wait here."""
        for band in self._bands.values():
            band.accounts.pop(party, None)
            band.compact()

    def push(self, request: "InFlight") -> None:
        """Let a request wait."""
        account = request.account
        band = account.band
        if not band.waiting:
            band.served = max(band.served, self._clock)
        if not account.requests:
            account.served = max(account.served, band.clock)
        if request.charged:  # it has had its turn already, and was given back
            account.requests.insert(0, request)
        else:
            account.requests.append(request)
        band.waiting += 1
        self.cost += request.cost
        if not account.in_heap:
            account.in_heap = True
            heapq.heappush(band.heap, (account.served, next(_ties), account))

    def pop(self) -> "InFlight":
        """Remove the next request, and charge its prompt the first time. At least one request must wait."""
        band = min((b for b in self._bands.values() if b.waiting), key=lambda b: b.served)
        self._clock = max(self._clock, band.served)
        while True:
            served, _, account = band.heap[0]
            if not account.requests:  # all were cancelled
                heapq.heappop(band.heap)
                account.in_heap = False
            elif served < account.served:  # tokens were computed for the client meanwhile
                heapq.heapreplace(band.heap, (account.served, next(_ties), account))
            else:
                break
        band.clock = max(band.clock, account.served)
        request = account.requests.pop(0)
        if not account.requests:
            heapq.heappop(band.heap)
            account.in_heap = False
        band.waiting -= 1
        self.cost -= request.cost
        if not request.charged:
            account.charge(request.cost)
            request.charged = True
        return request

    def remove(self, request: "InFlight") -> None:
        """Take out a request that waits here. Raises ValueError if it does not wait here."""
        request.account.requests.remove(request)
        request.account.band.waiting -= 1
        self.cost -= request.cost
        request.account.band.compact()

    def position(self, request: "InFlight") -> int:
        """Return about how many requests are before this one. Higher priorities go first; clients take turns."""
        own = request.account.requests.index(request)
        ahead = own
        for band in self._bands.values():
            if band is request.account.band:
                break
            ahead += band.waiting
        for _, _, account in request.account.band.heap:  # an account with nothing waiting is not before it
            if account is not request.account:
                ahead += min(len(account.requests), own + (account.served <= request.account.served))
        return ahead


# The model's three queues, their limits and counts.


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
    """The most requests that may wait for a model, and the most tokens of all their prompts (estimated from bytes)."""

    requests: int = 256
    tokens: int = 4_000_000


@dataclass(slots=True)
class ModelTotals:
    """Counts since the supervisor's start.

    seconds        average time from when a worker gets a request to the end of its answer
    tokens_before  tokens that were generated by workers which have been removed
    figures        what ended requests have taken, for metrics
    """

    finished: int = 0
    errors: int = 0
    resumed: int = 0
    refused: int = 0
    seconds: float | None = None
    tokens_before: int = 0
    figures: RequestFigures = field(default_factory=RequestFigures)

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
    and the next suspect when one has passed its probation. So a second death finds only few suspects on probation, and
    is blamed on those. A suspect with one strike left goes to a worker where no request is new. That worker gets no
    other request until the suspect has passed, so a death meanwhile is blamed on the suspect alone. Requests that have
    passed go on.
    """

    name: str
    limits: QueueLimits
    worker_slots: dict[str, WorkerSlot]
    fair_queue: FairQueue = field(default_factory=FairQueue)
    again: deque[InFlight] = field(default_factory=deque)
    suspects: list[InFlight] = field(default_factory=list)
    """The suspects that wait, in the order in which they are tried, see ``_suspect_order``."""
    affinity: Affinity = field(default_factory=Affinity)
    totals: ModelTotals = field(default_factory=ModelTotals)
    most_tried: int = 1
    """The most suspects that may be on probation at once in one worker."""
    needs_every_event: bool = False
    """True while a request waits until other requests have passed their probation. Then every event of the model's
    workers may be the one that the request waits for."""
    parked: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    """Requests whose constraints are being compiled. They wait beside the three queues."""
    waits_for: Awaited = ()
    """The models that have to make room before this one can be loaded."""
    removed: bool = False
    """True if the model is not configured any more. The record is kept for requests whose ends are still held."""

    @property
    def accepts(self) -> bool:
        """Return whether requests may wait, because some worker will serve them."""
        return any(worker_slot.refusal is None for worker_slot in self.worker_slots.values())

    @property
    def is_ready(self) -> bool:
        """Return whether a worker of the model takes requests now."""
        return any(worker_slot.capacity for worker_slot in self.worker_slots.values())

    @property
    def needs_load(self) -> bool:
        """Return whether an unloaded worker has to be loaded for the requests that wait. None has to be while another
        worker is being loaded."""
        return any(worker_slot.unloaded for worker_slot in self.worker_slots.values()) and not any(
            worker_slot.refusal is None and not worker_slot.unloaded and not worker_slot.capacity
            for worker_slot in self.worker_slots.values()
        )

    def describe(self) -> dict[str, int]:
        """Return counts since the supervisor's start: tokens generated by all workers, former ones included; requests
        finished, ended with an error, resumed, and refused because the queue was full."""
        totals = self.totals
        return {
            "tokens": totals.tokens_before + sum(worker_slot.tokens for worker_slot in self.worker_slots.values()),
            "finished": totals.finished,
            "errors": totals.errors,
            "resumed": totals.resumed,
            "refused": totals.refused,
        }

    def figures(self, now: float) -> dict[str, Any]:
        """Return the figures of the model for metrics."""
        oldest = min((request.accepted for request in chain(self.ahead, self.all_waiting())), default=now)
        return {"oldest_waiting_s": now - oldest, **self.totals.figures.describe()}

    @property
    def running(self) -> int:
        """Return the number of requests that the model's workers have."""
        return sum(len(worker_slot.running) for worker_slot in self.worker_slots.values())

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait, parked ones included."""
        return len(self.fair_queue) + len(self.again) + len(self.suspects) + len(self.parked)

    @property
    def refusal(self) -> WireError:
        """Return the error for a request that no worker will serve. The error of a failed worker explains most."""
        refusals = [
            worker_slot.refusal for worker_slot in self.worker_slots.values() if worker_slot.refusal is not None
        ]
        if not refusals:  # the model is configured, but a reload has yet to add its workers
            awaited = f"model {self.name!r} has no worker yet: a reload goes on"
            return WireError(ErrorCode.MODEL_NOT_RUNNING, awaited, retry_after_ms=UNMEASURED_RETRY_MS)
        return next((error for error in refusals if error.code is ErrorCode.MODEL_FAILED), refusals[0])

    @property
    def ahead(self) -> list[InFlight]:
        """Return the requests that workers were given ahead of free places. For people and clients they wait."""
        return [request for worker_slot in self.worker_slots.values() for request in worker_slot.ahead]

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
        self.totals.refused += 1
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
        """Return about how many requests will be started before this one, which waits here or in a worker, see
        ``ahead``."""
        if request.key in self.parked:
            return 0
        ahead = self.ahead
        if request.phase is RequestPhase.RUNNING:
            return ahead.index(request)
        if request.place is not None:
            return len(ahead) + self.suspects.index(request)
        if request.resumes:
            return len(ahead) + len(self.suspects) + self.again.index(request)
        return len(ahead) + len(self.suspects) + len(self.again) + self.fair_queue.position(request)

    def after_death(self) -> None:
        """Decide how many suspects are tried at once. Call this after the suspects of a death have been pushed.

        With n suspects, k at a time, all have passed after n / k probations. If a death strikes k of them, those k are
        then tried one by one. The sum of both, n / k + k, is smallest if k is the square root of n.
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
        """Return the worker that gets no other requests for now. Soon no request is new there, and the next suspect can
        be tried there alone. The other workers still get requests. Return None if the next suspect need not be alone,
        or no worker is up."""
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
