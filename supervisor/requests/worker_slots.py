"""The workers of a model as the scheduler sees them, and the choice of the worker for a conversation. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.codec import unpack_body
from protocol.errors import FrameError, WireError
from supervisor.requests.digest import digest
from supervisor.requests.in_flight import InFlight
from supervisor.requests.request_phase import RequestPhase

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
