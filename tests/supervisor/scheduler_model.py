"""Simple peers for the scheduler: workers with mailboxes, and clients that check what they receive.

Token k of a request is ``token(key, k)``. So the clients see a token that is missing, came twice or belongs to another
request.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from protocol.codec import decode, encode, pack_event, split_events, unpack_event
from protocol.messages import (
    SUPERVISOR_TO_CLIENT,
    SUPERVISOR_TO_WORKER,
    TERMINAL,
    Accepted,
    CancelJob,
    Compiled,
    Error,
    EventEntry,
    EventFlag,
    Events,
    JobMessage,
    Parked,
    Ping,
    Report,
)

Key = tuple[int, int]


def token(key: Key, place: int) -> int:
    """Return the id of an answer's token at this place."""
    channel, request = key
    return channel << 24 | request << 16 | place


@dataclass
class Heard:
    """Everything that one client has received about one accepted request."""

    resume: bool = True
    seqs: list[int] = field(default_factory=list)
    ends: int = 0
    end: str = ""
    tokens: int = 0
    delivered: int | None = None
    granted: int = 0
    cancelled: bool = False


class FakeClient:
    """A client that checks every frame: its numbers, and invariants 1 and 2 of docs/internals.md."""

    def __init__(self, channel: int, window: int) -> None:
        self.channel = channel
        self.window = window
        self.connected = True
        self.heard: dict[int, Heard] = {}
        self.accepted: list[int] = []
        """The numbers of the requests that were accepted. A client may use a number again."""
        self.refused: list[int] = []
        self.codes: Counter[str] = Counter()
        self.reports = 0
        self.pinged: deque[int] = deque()
        """Nonces of PINGs that the client has not answered yet."""

    def take(self, frame: bytes) -> None:
        assert self.connected, "a frame for a client that is gone"
        message = decode(frame, SUPERVISOR_TO_CLIENT)
        if isinstance(message, Accepted):
            former = self.heard.get(message.request)
            assert former is None or former.ends == 1, "accepted twice"
            self.heard[message.request] = Heard()
            self.accepted.append(message.request)
        elif isinstance(message, Error):
            self.refused.append(message.request)
        elif isinstance(message, Report):
            assert not self.heard[message.request].tokens, "a report behind the first token"
            self.reports += 1
        elif isinstance(message, Ping):
            self.pinged.append(message.nonce)
        elif isinstance(message, Events):
            assert message.channel == self.channel, "an event for another"
            for entry, event in split_events(message):
                self._take_event(entry, event)

    def _take_event(self, entry: EventEntry, event: bytes) -> None:
        heard = self.heard[entry.request]
        assert not heard.ends, f"event {entry.seq} of request {entry.request} follows its terminal event"
        assert entry.seq == len(heard.seqs), f"event {entry.seq} where {len(heard.seqs)} was due"
        ids, fields = unpack_event(entry, event)
        due = range(heard.tokens, heard.tokens + entry.tokens)
        assert list(ids) == [token((self.channel, entry.request), place) for place in due], "not the tokens due"
        heard.seqs.append(entry.seq)
        heard.tokens += entry.tokens
        if entry.flags & TERMINAL:
            heard.ends += 1
            heard.delivered = fields.get("delivered_tokens")
            heard.end = fields.get("error", {}).get("name") or "worker's own"
            self.codes[heard.end] += 1
            assert heard.delivered in (None, heard.tokens)
        else:
            assert heard.cancelled or len(heard.seqs) <= self.window + heard.granted, "sent without credit"


@dataclass
class Job:
    seq: int = 0
    tokens: int = 0


class FakeWorker:
    """A worker of one generation. It reads its mailbox only when told to, so that messages can cross on the way."""

    def __init__(self, generation: int, capacity: int) -> None:
        self.generation = generation
        self.capacity = capacity
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.jobs: dict[Key, Job] = {}
        self.parked: set[Key] = set()
        self.resumed = 0
        self._unsent: dict[int, list[tuple[EventEntry, bytes]]] = {}

    def read(self, *, parks: bool = False) -> None:
        """Read one message. ``parks``: park a job at once, if its message allows that."""
        message = decode(self.inbox.popleft(), SUPERVISOR_TO_WORKER)
        if isinstance(message, JobMessage):
            key = message.channel, message.request
            assert key not in self.jobs, "a job was given twice"
            assert key not in self.parked, "a job was given before its constraint was compiled"
            ids = list(memoryview(message.carry.get("token_ids", b"")).cast("I"))
            assert ids == [token(key, place) for place in range(len(ids))], "not the tokens that were delivered"
            if parks and not message.carry.get("stay"):
                self.parked.add(key)
                self.outbox.append(encode(Parked(*key)))
                return
            self.jobs[key] = Job(message.carry.get("seq", 0), len(ids))
            self.resumed += "seq" in message.carry
        elif isinstance(message, CancelJob) and (message.channel, message.request) in self.jobs:
            self.say(message.channel, message.request, EventFlag.FINISHED)
        elif isinstance(message, CancelJob):
            self.parked.discard((message.channel, message.request))
        self.flush()

    def compile(self, key: Key) -> None:
        """Report that the constraint of a parked job is compiled."""
        self.parked.remove(key)
        self.outbox.append(encode(Compiled(*key, party=key[0], milliseconds=7)))

    def say(self, channel: int, request: int, flags: int, *, tokens: int = 0, padding: int = 0) -> None:
        """Add an event of a job to the next frame. A terminal event ends the job."""
        job = self.jobs[channel, request]
        ids = [token((channel, request), place) for place in range(job.tokens, job.tokens + tokens)]
        self.say_anything(channel, EventEntry(request, job.seq, int(flags), tokens, 0), padding, ids)
        job.seq += 1
        job.tokens += tokens
        if flags & TERMINAL:
            del self.jobs[channel, request]

    def say_anything(self, channel: int, entry: EventEntry, padding: int = 0, ids: list[int] | None = None) -> None:
        event = pack_event(ids or (), {"text": "x" * padding, "finish_reason": "stop", "error": {}})
        self._unsent.setdefault(channel, []).append((entry._replace(length=len(event)), event))

    def flush(self) -> None:
        for channel, events in self._unsent.items():
            body = b"".join(event for _, event in events)
            self.outbox.append(encode(Events(channel, self.generation, [entry for entry, _ in events], body)))
        self._unsent.clear()
