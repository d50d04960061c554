"""Handle the messages of workers about their jobs: events for clients, progress, and compiled constraints. Pure.

A worker gives a job back (PARKED) if it has to compile the job's constraint first. The request then waits beside the
queue, and its slot is given to another request. When the worker has compiled the constraint (COMPILED), the request
goes back to its place at the head of its client's requests, and takes its turn again. It counts as waiting all the
time. The time that a compilation takes is charged as tokens to the client that caused it: here to the client's account
in the queue, and to the budget of its key (``RequestAuthorizer.charge_party``).
"""

from typing import Any

from protocol.codec import encode, unpack_body
from protocol.errors import ErrorCode, FrameError
from protocol.messages import TERMINAL, EventEntry, EventFlag, Events
from supervisor.requests.counters import CACHED, COMPLETION, PROMPT
from supervisor.requests.queue import WorkerSlot
from supervisor.requests.request import Effect, InFlight, ToClient
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.stories import MOST_TOKENS, RequestEnd
from supervisor.requests.table import RequestTable, report

TOKENS_PER_MS = 1
"""The tokens that are charged for a millisecond of compilation. A second costs as much as an answer of a thousand
tokens."""
LONGEST_MS = 3_600_000
"""The longest time of a compilation that the supervisor believes. A compilation takes a second or two."""


_USAGE = ("prompt_tokens", "cached_tokens")


class WorkerEvents:
    """Handles the messages of workers about requests.

    dropped  EVENTS frames of a former generation, and events of requests that are over
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.dropped = 0

    def prefill(self, worker: str, key: tuple[int, int], done: int, total: int) -> list[Effect]:
        """Take note that a worker reads a prompt, or has computed part of it.

        The first such message counts the prompt in the ledger. So the prompt of an answer that goes on in another
        worker counts once. Report the progress if the client asked for reports. Raises FrameError for a length that is
        not possible.
        """
        if total > MOST_TOKENS:
            raise FrameError(ErrorCode.BAD_FRAME, f"a prompt of {total} tokens")
        request = self._table.slot_of(worker).running.get(key)
        if request is None or request.phase is not RequestPhase.RUNNING or request.has_tokens:
            return []
        _count_prompt(request, total)
        if not request.route.progress or not done:
            return []
        return [report(request, {"phase": "prefill", "done": done, "total": total})]

    def parked(self, worker: str, key: tuple[int, int], now: float) -> list[Effect]:
        """Take back a job whose constraint the worker compiles first. Let the request wait beside the queue."""
        table = self._table
        queue = table.queue_of_worker[worker]
        worker_slot = queue.worker_slots[worker]
        request = worker_slot.running.get(key)
        if request is None:
            return []
        table.leave_slot(worker_slot, request)
        effects: list[Effect] = []
        if request.phase is RequestPhase.ENDED:
            table.leave(request)
        elif request.cancelled:
            effects += table.end(request, None, now)
        else:
            request.phase, request.started = RequestPhase.WAITING, None
            request.parkings += 1
            request.note(now, "parked", **worker_slot.place)
            request.compiler = worker_slot.process
            queue.parked[key] = request
            request.reported = 0
            if request.route.queue_ms is not None:  # it may have passed while the worker had the job
                table.deadlines.add(request.accepted + request.route.queue_ms / 1000, "queue_ms", request)
            if request.route.progress and not request.has_tokens:
                effects.append(report(request, {"phase": "compiling"}))
        return effects + table.dispatch(queue, now)

    def compiled(self, worker: str, key: tuple[int, int], party: int, milliseconds: int, now: float) -> list[Effect]:
        """Take note that a worker has compiled a request's constraint, or given up. The request takes its turn again.

        party         see ``InFlight``
        milliseconds  processor time of the compilation, which the client pays for

        Raises FrameError for a time that is not possible.
        """
        if milliseconds > LONGEST_MS:
            raise FrameError(ErrorCode.BAD_FRAME, f"a constraint took {milliseconds} ms of processor time")
        queue = self._table.queue_of_worker[worker]
        queue.fair_queue.charge(party, TOKENS_PER_MS * milliseconds)
        request = queue.parked.get(key)
        if request is None or request.compiler != queue.worker_slots[worker].process:
            return []
        del queue.parked[key]
        request.note(now, "compiled", worker=worker.partition("~")[0])
        queue.push(request)
        return self._table.dispatch(queue, now)

    def events(self, worker: str, frame: bytes, message: Events, now: float) -> list[Effect]:
        """Pass on the events of one engine step for one connection.

        frame  the message as it came. If every stream in it has credit, the frame is passed on whole. That saves the
               supervisor the packing, and nearly all frames pass in this way

        Raises FrameError if an event does not have the expected number. Then nothing has changed.
        """
        queue = self._table.queue_of_worker[worker]
        worker_slot = queue.worker_slots[worker]
        if message.generation != worker_slot.generation:
            self.dropped += 1
            return []
        last = _ends_in(worker_slot, message)
        requests = requests_of_whole_frame(worker_slot, message)
        for request, flags, body in last:
            _note_end(request, flags, body)
        if requests:
            effects: list[Effect] = [ToClient(message.channel, frame)]
            ended = self._note_whole(worker_slot, requests, message, now)
        else:
            effects, ended = self._slice(worker_slot, message, now)
        if ended or queue.needs_every_event:
            effects += self._table.dispatch(queue, now)
        return effects

    def _note_whole(self, worker_slot: WorkerSlot, requests: list[InFlight], message: Events, now: float) -> bool:
        """Note the events of a frame that goes to its client whole. Return whether a request has ended.

        ``FastPath.passed`` does this for a frame that takes the fast path. This method is one loop without calls,
        because every token passes here if the compiled module is not used.
        """
        body, at, tokens_in_all, ended = message.body, 0, 0, False
        for request, (_, seq, flags, tokens, length) in zip(requests, message.index, strict=True):
            if tokens:
                if not request.has_tokens:
                    request.has_tokens, request.first_token = True, now
                tokens_in_all += tokens
                request.unpaid += tokens
                request.delivered_tokens += tokens
                if request.counters is not None:
                    request.counters[COMPLETION] += tokens
                if request.resumable:
                    request.ids += body[at : at + 4 * tokens]
            at += length
            request.sent = seq + 1
            request.credit -= 1
            if flags & TERMINAL:
                ended = True
                self._table.finish(worker_slot, request, now)
        worker_slot.tokens += tokens_in_all
        return ended

    def _slice(self, worker_slot: WorkerSlot, message: Events, now: float) -> tuple[list[Effect], bool]:
        """Pass on the events that may go and hold the others, one by one. Return whether the worker let a job go."""
        effects: list[Effect] = []
        index: list[EventEntry] = []
        chunks: list[bytes] = []
        at, ended = 0, False
        for entry in message.index:
            event = message.body[at : at + entry.length]
            at += entry.length
            request = worker_slot.running.get((message.channel, entry.request))
            if request is None:
                self.dropped += 1
                continue
            ended = ended or bool(entry.flags & TERMINAL)
            if request.phase is RequestPhase.ENDED:
                if entry.flags & TERMINAL:  # the worker has let the job go
                    self._table.leave_slot(worker_slot, request)
                    self._table.leave(request)
                continue
            if entry.tokens:
                worker_slot.tokens += entry.tokens
                if not request.has_tokens:
                    request.has_tokens, request.first_token = True, now
                request.unpaid += entry.tokens
                if request.resumable:
                    request.ids += event[: 4 * entry.tokens]
            if request.credit <= 0 and not request.holds:
                effects += self._table.credit.advances.use(request)
            if request.holds or (request.credit <= 0 and not entry.flags & TERMINAL):
                effects += self._hold(worker_slot, request, entry, event, now)
                continue
            self._table.credit.count_sent(request, entry)
            index.append(entry)
            chunks.append(event)
            if entry.flags & TERMINAL:
                self._table.finish(worker_slot, request, now)
        if index:
            frame = encode(Events(message.channel, message.generation, index, b"".join(chunks)))
            effects.insert(0, ToClient(message.channel, frame))
        return effects, ended

    def _hold(
        self, worker_slot: WorkerSlot, request: InFlight, entry: EventEntry, event: bytes, now: float
    ) -> list[Effect]:
        """Hold an event until its client grants credit. If the held events then exceed a limit, end one stream."""
        self._table.credit.hold(request, entry, event, now)
        if entry.flags & TERMINAL:
            self._table.finish_held(worker_slot, request, now)
        if excess := self._table.credit.excess(request):
            ended, error = excess
            return self._table.give_up(ended, error, now) + self._table.dispatch(self._table.queues[ended.model], now)
        return []


def _note_end(request: InFlight, flags: int, body: dict[str, Any]) -> None:
    """Note how a worker has ended a request, and count the tokens of its prompt in the ledger."""
    request.end = RequestEnd.of_worker(body, failed=bool(flags & EventFlag.ERROR))
    if request.end.computed:
        _count_prompt(request, body.get("usage", {}).get("prompt_tokens", 0))
        if request.counters is not None:
            request.counters[CACHED] += request.end.cached_tokens or 0


def _count_prompt(request: InFlight, tokens: int) -> None:
    """Note the length of a prompt, and count it in the ledger unless that was done."""
    if request.prompt_tokens is None:
        request.prompt_tokens = tokens
        if request.counters is not None:
            request.counters[PROMPT] += tokens


def _ends_in(worker_slot: WorkerSlot, message: Events) -> list[tuple[InFlight, int, dict[str, Any]]]:
    """Return (request, flags, map of its last event) for each answer that ends in a frame.

    Raises FrameError for counts of tokens that are not possible.
    """
    found, at = {}, 0
    for number, _, flags, tokens, length in message.index:
        if flags & TERMINAL:
            request = worker_slot.running.get((message.channel, number))
            if request is not None and request.phase is RequestPhase.RUNNING:
                body = unpack_body(message.body[at + 4 * tokens : at + length])
                usage = body.get("usage", {})
                counts = [usage.get(name, 0) if isinstance(usage, dict) else -1 for name in _USAGE]
                if not all(type(count) is int and 0 <= count <= MOST_TOKENS for count in counts):
                    raise FrameError(ErrorCode.BAD_FRAME, "the end of an answer counts no tokens of its prompt")
                found[number] = request, flags, body
        at += length
    return list(found.values())


def requests_of_whole_frame(worker_slot: WorkerSlot, message: Events) -> list[InFlight] | None:
    """Return the request of each event if the frame may go to its client whole, else None.

    This is the reference. ``FastPath.fits`` makes the same decision without Python for nearly all frames. It never
    passes a frame that this function refuses.

    A frame passes whole if every event in it is the next one expected for a running request, which has credit for the
    event and holds none back. Raises FrameError if an event does not have the expected number.
    """
    channel, running, whole = message.channel, worker_slot.running, True
    is_running = RequestPhase.RUNNING  # looked up once: every token passes here if the compiled module is not used
    requests: list[InFlight] = []
    expected: dict[int, int] = {}  # by request, the number of its next event; -1 behind its end
    for number, seq, flags, _, _ in message.index:
        request = running.get((channel, number))
        if request is None or request.phase is not is_running:
            whole = False
            continue
        due = expected.get(number, request.next_seq if request.holds else request.sent)
        if due < 0:  # the worker goes on behind the end, and the client must not see that
            whole = False
            continue
        if seq != due:
            # A token is missing or came twice. This worker cannot be trusted any more.
            raise FrameError(ErrorCode.BAD_FRAME, f"event {seq} of a request where {due} was due")
        expected[number] = -1 if flags & TERMINAL else due + 1
        if request.holds or request.credit <= due - request.sent:
            whole = False
        requests.append(request)
    return requests if whole else None
