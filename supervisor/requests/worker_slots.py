"""A model's workers as the scheduler sees them, and which of them a request goes to. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.codec import unpack_body
from protocol.errors import FrameError, WireError
from supervisor.requests.digest import digest
from supervisor.requests.in_flight import InFlight

MOST_PREFIXES = 10_000
"""Affinities remembered for a model; those not used for longest are forgotten first."""
PREFIX_CHARS = 256
"""The beginning of a prompt that stands for a conversation."""
FIRST_TURN_CHARS = 4096
"""The same of messages, of which those up to the first of the user count: what follows changes from turn to turn."""
LONG_BODY = 64 << 10
"""Bytes of a body beyond which its own beginning stands for that of its prompt: unpacking megabytes, only to look at
the first of them, would keep everybody waiting."""
IMBALANCE = 0.5
"""Share of its capacity by which a worker may be busier than the least busy one and still be preferred for its cache.
A system prompt that all conversations share would otherwise send them all to one worker."""


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """One worker of a model, as the scheduler sees it.

    capacity    jobs that the worker takes now
    batch_size  how many of them it computes at once
    refusal     the error for new requests; None while requests may wait for this worker
    """

    worker: str
    refusal: WireError | None
    capacity: int = 0
    batch_size: int = 0
    generation: int = 0
    running: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    tokens: int = 0
    """Generated since the supervisor's start."""
    unloaded: bool = False
    """No process, until it is woken."""
    suspects: list[InFlight] = field(default_factory=list)
    """Those of the running requests that have yet to pass their probation."""

    def open(self, generation: int, capacity: int, batch_size: int) -> None:
        """A new process is ready."""
        self.generation, self.capacity, self.batch_size = generation, capacity, batch_size

    def close(self) -> list[InFlight]:
        """The process is gone. Return the requests that it had."""
        running = list(self.running.values())
        self.generation = self.capacity = self.batch_size = 0
        self.running.clear()
        self.suspects.clear()
        return running

    def give(self, request: InFlight) -> None:
        """The worker gets a request."""
        self.running[request.key] = request
        request.begun = request.next_seq
        if request.place is not None:
            self.suspects.append(request)

    def review_suspects(self) -> None:
        """Forget the suspects that have ended or passed."""
        if self.suspects:
            self.suspects = [r for r in self.suspects if self.running.get(r.key) is r and not r.has_passed]

    @property
    def probations(self) -> int:
        """How many requests are on probation."""
        return sum(request.on_probation for request in self.suspects)

    @property
    def tries_alone(self) -> bool:
        """Whether a request is on probation that must be alone with that."""
        return any(request.alone and request.on_probation for request in self.suspects)

    @property
    def unsettled(self) -> int:
        """How many requests may be the reason if the worker dies: those that are new to it, and those on probation."""
        return sum(request.is_new or request.on_probation for request in self.running.values())

    @property
    def free_in_batch(self) -> int:
        """How many more requests would be computed at once."""
        return max(0, min(self.batch_size, self.capacity) - len(self.running))

    @property
    def process(self) -> tuple[str, int]:
        """The worker, and which of its processes this is: its generation."""
        return self.worker, self.generation

    @property
    def load(self) -> float:
        return len(self.running) / self.capacity


class Affinity:
    """Where a conversation was computed last: its prefix is in that worker's cache."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, worker_slots: Sequence[WorkerSlot], key: bytes) -> WorkerSlot:
        """Of worker slots that have room, that of the key; else the one with the least to do."""
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
    """What stands for the request's conversation: its affinity, else the beginning of its prompt."""
    if request.route.affinity is not None:
        kind, identity = b"k", request.route.affinity.encode(errors="surrogatepass")
    else:
        kind, identity = b"p", _beginning(request.body)
    return kind + digest(identity)  # many are remembered, and an affinity may have 1 KB


def _beginning(body: bytes) -> bytes:
    if len(body) > LONG_BODY:
        return body[:FIRST_TURN_CHARS]
    try:
        fields = unpack_body(body)
    except FrameError:  # the worker refuses it
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
