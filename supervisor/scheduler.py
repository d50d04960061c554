"""Requests from acceptance to their one terminal event. Pure: messages in, effects out; no sockets, no clock.

Law 1 lives here. A request enters the table when it is ACCEPTED and leaves it when its terminal event has been put
on the way *and* the worker no longer holds its job (it said so, or it is dead). Removing it earlier is how zombies
are made: a later cancel would find nothing to cancel.
"""

from collections import Counter

from protocol import limits
from protocol.codec import encode, pack_body, pack_error, pack_event
from protocol.errors import ErrorCode, FrameError, RequestError, WireError
from protocol.messages import (
    TERMINAL,
    Accepted,
    CancelJob,
    Error,
    EventEntry,
    EventFlag,
    Events,
    FinishReason,
    Generate,
    JobMessage,
)
from supervisor.in_flight import Effect, InFlight, ModelQueue, Phase, ToClient, ToWorker

HELD_EVENT_COST = 256
"""What holding one event takes beside its own bytes; most events are far smaller than that."""
MAX_HELD_BYTES = 4 << 20
"""Memory for the events of one stream whose client grants no credit, before it is ended with slow_consumer; ..."""
MAX_HELD_BYTES_OF_CONNECTION = 64 << 20
"""... and for all streams of one connection, those included whose worker has long finished."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes of request bodies waiting for one model."""
RETRY_AFTER_MS = 1000
UNLIMITED = 1 << 32
"""Credit for everything that a stream may still hold."""


class Scheduler:
    """The table of requests of all models and connections. One writer: the supervisor's loop."""

    def __init__(self, *, window: int = limits.STREAM_WINDOW) -> None:
        self._window = window
        self._models: dict[str, ModelQueue] = {}
        self._live: dict[tuple[int, int], InFlight] = {}
        self._held_bytes: Counter[int] = Counter()
        """By channel."""
        self.dropped_frames = 0
        """EVENTS frames of a former generation, or events of requests that are over: dropped, counted."""

    # --- models -------------------------------------------------------------------------------------------------

    def add_model(self, name: str, *, queue_limit: int, refusal: WireError) -> None:
        self._models[name] = ModelQueue(queue_limit, refusal)

    def accept_new(self, model: str) -> None:
        """Queue new requests of a model from now on (it is, or soon will be, running)."""
        self._models[model].refusal = None

    def refuse_new(self, model: str, error: WireError) -> None:
        """Answer new requests of a model with this error from now on."""
        self._models[model].refusal = error

    def open(self, model: str, generation: int, capacity: int) -> list[Effect]:
        """A worker is ready for up to ``capacity`` jobs at once: give it what waits."""
        queue = self._models[model]
        queue.generation, queue.capacity = generation, capacity
        return self._dispatch(model, queue)

    def end_running(self, model: str, error: WireError) -> list[Effect]:
        """The worker is gone: end everything it held. The event says how many tokens were delivered."""
        queue = self._models[model]
        queue.capacity = 0
        queue.generation = 0
        effects: list[Effect] = []
        for request in list(queue.running.values()):
            if request.phase is Phase.RUNNING:
                effects += self._end_with_error(request, error)
            self._remove(request)
        return effects

    def end_waiting(self, model: str, error: WireError) -> list[Effect]:
        """The model will not serve: end everything that waits for it."""
        queue = self._models[model]
        effects: list[Effect] = []
        for request in list(queue.waiting):
            effects += self._end_with_error(request, error)
            self._remove(request)
        return effects

    def release_held(self, model: str) -> list[Effect]:
        """The model is stopped: send what finished requests still hold back. Their end does not wait for credit."""
        held = [r for r in self._live.values() if r.model == model and r.phase is Phase.HELD]
        effects: list[Effect] = []
        for request in held:
            request.credit += UNLIMITED
            effects += self._release(request)
        return effects

    def cancel_running(self, model: str) -> list[Effect]:
        """The drain's time is over: end what is left with DRAINING."""
        effects: list[Effect] = []
        error = WireError(
            ErrorCode.DRAINING, f"model {model!r} is being stopped; the request was ended before its time"
        )
        for request in list(self._models[model].running.values()):
            if request.phase is Phase.RUNNING:
                effects += self._abandon(request)
                effects += self._end_with_error(request, error)
        return effects

    def counts(self, model: str) -> tuple[int, int]:
        """(running, waiting) requests of a model. Running includes those whose worker has yet to confirm a cancel."""
        queue = self._models[model]
        return len(queue.running), len(queue.waiting)

    def totals(self, model: str) -> dict[str, int]:
        """Counts since the supervisor's start: tokens generated, requests finished, requests ended with an error."""
        queue = self._models[model]
        return {"tokens": queue.tokens, "finished": queue.finished, "errors": queue.errors}

    # --- clients ------------------------------------------------------------------------------------------------

    def submit(self, channel: int, message: Generate) -> list[Effect]:
        """A new request: ACCEPTED (and JOB, if the worker has room), or ERROR."""
        try:
            queue = self._admit(channel, message)
        except WireError as e:
            return [ToClient(channel, encode(Error(message.request, pack_error(e))))]
        request = InFlight(channel, message.request, message.model, message.body, self._window)
        self._live[request.key] = request
        queue.waiting.append(request)
        queue.waiting_bytes += len(request.body)
        position = len(queue.waiting) - 1
        body = pack_body({"model": message.model, "queue_position": position})
        effects: list[Effect] = [ToClient(channel, encode(Accepted(message.request, body)))]
        return effects + self._dispatch(message.model, queue)

    def _admit(self, channel: int, message: Generate) -> ModelQueue:
        for key, value in message.route.items():
            if key != "resume":
                raise RequestError(f"unknown routing key {key!r}: known is 'resume'", field=f"route.{key}")
            if value is not False:
                raise RequestError(
                    "resume: only false is offered; a request whose worker dies ends with worker_died",
                    field="route.resume",
                    code=ErrorCode.UNSUPPORTED if value is True else ErrorCode.INVALID_REQUEST,
                )
        if message.request == 0:
            raise RequestError("request is 0: ids start at 1 (0 is the connection itself)", field="request")
        if (channel, message.request) in self._live:
            raise WireError(
                ErrorCode.DUPLICATE_REQUEST, f"request {message.request} is in use on this connection", field="request"
            )
        queue = self._models.get(message.model)
        if queue is None:
            known = ", ".join(sorted(self._models))
            raise WireError(
                ErrorCode.MODEL_NOT_FOUND, f"no model {message.model!r} is configured: there is {known}", field="model"
            )
        if queue.refusal is not None:
            raise queue.refusal
        if len(queue.waiting) >= queue.limit or queue.waiting_bytes + len(message.body) > MAX_WAITING_BYTES:
            raise WireError(
                ErrorCode.OVERLOADED,
                f"model {message.model!r} has {len(queue.waiting)} requests waiting (at most {queue.limit}): try later",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return queue

    def cancel(self, channel: int, request_id: int) -> list[Effect]:
        """The client no longer wants an answer. Idempotent; the terminal event says what it came to."""
        request = self._live.get((channel, request_id))
        if request is None or request.phase is Phase.ENDED:
            return []
        if request.phase is Phase.WAITING:
            event = pack_event((), {
                "text": "",
                "finish_reason": FinishReason.CANCELLED,
                "usage": {"prompt_tokens": 0, "completion_tokens": 0},
                "timings": {},
            })  # fmt: skip
            entry = EventEntry(request_id, request.sent, int(EventFlag.FINISHED), 0, len(event))
            self._models[request.model].finished += 1
            self._remove(request)
            return [ToClient(channel, encode(Events(channel, 0, [entry], event)))]
        # Whoever cancels may not go on granting credit: what is held, and the terminal event behind it, must not wait.
        request.credit += UNLIMITED
        abandon = self._abandon(request) if request.phase is Phase.RUNNING else []
        return self._release(request) + abandon

    def credit(self, channel: int, request_id: int, events: int) -> list[Effect]:
        """The client has consumed events of a stream: send what was held back for it."""
        request = self._live.get((channel, request_id))
        if request is None:
            return []
        request.credit += min(events, self._window)
        return self._release(request)

    def gone(self, channel: int) -> list[Effect]:
        """The connection has ended: nobody waits for its answers."""
        effects: list[Effect] = []
        for request in [r for r in self._live.values() if r.channel == channel]:
            if request.phase is Phase.RUNNING:
                effects += self._abandon(request)
                request.phase = Phase.ENDED
                self._drop_held(request)
            elif request.phase is not Phase.ENDED:
                self._remove(request)
        return effects

    def channels(self) -> set[int]:
        """Connections with unfinished requests."""
        return {channel for channel, _ in self._live}

    # --- workers ------------------------------------------------------------------------------------------------

    def events(self, model: str, frame: bytes, message: Events) -> list[Effect]:
        """What one engine step brought for one connection. ``frame`` is the message as it came: where every stream in
        it has credit, it is passed on whole, which is what makes the router cheap. Raises FrameError, nothing changed,
        if an event has another number than the one that is due."""
        queue = self._models[model]
        if message.generation != queue.generation:
            self.dropped_frames += 1
            return []
        if not self._passes_whole(queue, message):
            effects = self._slice(queue, message)
        else:
            effects = [ToClient(message.channel, frame)]
            for entry in message.index:
                request = queue.running[message.channel, entry.request]
                self._count_sent(request, entry)
                if entry.flags & TERMINAL:
                    self._finish(request, entry)
        for entry in message.index:
            queue.tokens += entry.tokens
        return effects + self._dispatch(model, queue)

    @staticmethod
    def _passes_whole(queue: ModelQueue, message: Events) -> bool:
        """Whether every event may go to the client now. Raises FrameError if one came out of turn."""
        count = len(message.index)
        whole = True
        due: dict[int, int] = {}  # by request, the number of its next event; -1 behind its end
        for entry in message.index:
            request = queue.running.get((message.channel, entry.request))
            if request is None or request.phase is not Phase.RUNNING:
                whole = False
                continue
            number = due.get(entry.request, request.sent + len(request.held))
            if number < 0:  # a worker that goes on behind the end: the client must not see that
                whole = False
                continue
            if entry.seq != number:
                # A token is missing or came twice, and nothing that this worker says can be believed any more.
                raise FrameError(ErrorCode.BAD_FRAME, f"event {entry.seq} of a request where {number} was due")
            due[entry.request] = -1 if entry.flags & TERMINAL else number + 1
            # A stream may have several events in the frame; asking for credit for all of them is a little too strict,
            # which only costs the slicing.
            if request.held or request.credit < count:
                whole = False
        return whole

    def _slice(self, queue: ModelQueue, message: Events) -> list[Effect]:
        """Pass on what may go and hold the rest, event by event."""
        effects: list[Effect] = []
        index: list[EventEntry] = []
        chunks: list[bytes] = []
        at = 0
        for entry in message.index:
            event = message.body[at : at + entry.length]
            at += entry.length
            request = queue.running.get((message.channel, entry.request))
            if request is None:
                self.dropped_frames += 1
            elif request.phase is Phase.ENDED:
                if entry.flags & TERMINAL:
                    self._remove(request)  # the worker has let go
            elif request.held or (request.credit <= 0 and not entry.flags & TERMINAL):
                effects += self._hold(request, entry, event)
            else:
                self._count_sent(request, entry)
                index.append(entry)
                chunks.append(event)
                if entry.flags & TERMINAL:
                    self._finish(request, entry)
        if index:
            frame = encode(Events(message.channel, message.generation, index, b"".join(chunks)))
            effects.insert(0, ToClient(message.channel, frame))
        return effects

    def _hold(self, request: InFlight, entry: EventEntry, event: bytes) -> list[Effect]:
        request.held.append((entry, event))
        self._charge(request, len(event) + HELD_EVENT_COST)
        if entry.flags & TERMINAL:
            request.phase = Phase.HELD
            del self._models[request.model].running[request.key]
            return []
        of_connection = self._held_bytes[request.channel]
        if request.held_bytes <= MAX_HELD_BYTES and of_connection <= MAX_HELD_BYTES_OF_CONNECTION:
            return []
        effects = self._abandon(request)
        return effects + self._end_with_error(
            request,
            WireError(
                ErrorCode.SLOW_CONSUMER,
                f"{len(request.held)} events waited for the client to read them: {request.held_bytes} bytes for this "
                f"stream (at most {MAX_HELD_BYTES}), {of_connection} for all (at most {MAX_HELD_BYTES_OF_CONNECTION})",
            ),
        )

    def _release(self, request: InFlight) -> list[Effect]:
        """Send held events in order, as far as credit goes; a terminal event needs none."""
        index: list[EventEntry] = []
        chunks: list[bytes] = []
        for entry, event in request.held:
            if request.credit <= 0 and not entry.flags & TERMINAL:
                break
            self._count_sent(request, entry)
            self._charge(request, -len(event) - HELD_EVENT_COST)
            index.append(entry)
            chunks.append(event)
        if not index:
            return []
        del request.held[: len(index)]
        effects: list[Effect] = [ToClient(request.channel, encode(Events(request.channel, 0, index, b"".join(chunks))))]
        if index[-1].flags & TERMINAL:
            self._finish(request, index[-1])
        return effects

    # --- shared -------------------------------------------------------------------------------------------------

    def _dispatch(self, model: str, queue: ModelQueue) -> list[Effect]:
        effects: list[Effect] = []
        while queue.waiting and len(queue.running) < queue.capacity:
            request = queue.waiting.popleft()
            queue.waiting_bytes -= len(request.body)
            request.phase = Phase.RUNNING
            queue.running[request.key] = request
            effects.append(ToWorker(model, encode(JobMessage(request.channel, request.request, {}, request.body))))
            request.body = b""
        return effects

    def _count_sent(self, request: InFlight, entry: EventEntry) -> None:
        request.sent = entry.seq + 1
        request.credit -= 1
        request.delivered_tokens += entry.tokens

    def _finish(self, request: InFlight, entry: EventEntry) -> None:
        queue = self._models[request.model]
        if entry.flags & EventFlag.ERROR:
            queue.errors += 1
        else:
            queue.finished += 1
        self._remove(request)

    def _abandon(self, request: InFlight) -> list[Effect]:
        """Have the worker let go. The request stays in the table until it did."""
        return [ToWorker(request.model, encode(CancelJob(request.channel, request.request)))]

    def _end_with_error(self, request: InFlight, error: WireError) -> list[Effect]:
        """The one terminal event, made here because the worker cannot. Its number follows what the client has seen."""
        self._models[request.model].errors += 1
        request.phase = Phase.ENDED
        self._drop_held(request)
        event = pack_event((), {"error": error.to_wire(), "delivered_tokens": request.delivered_tokens})
        entry = EventEntry(request.request, request.sent, int(EventFlag.ERROR), 0, len(event))
        request.sent += 1
        return [ToClient(request.channel, encode(Events(request.channel, 0, [entry], event)))]

    def _charge(self, request: InFlight, cost: int) -> None:
        request.held_bytes += cost
        self._held_bytes[request.channel] += cost

    def _drop_held(self, request: InFlight) -> None:
        request.held.clear()
        self._charge(request, -request.held_bytes)
        if not self._held_bytes[request.channel]:
            del self._held_bytes[request.channel]

    def _remove(self, request: InFlight) -> None:
        self._drop_held(request)
        queue = self._models[request.model]
        if queue.running.pop(request.key, None) is None and request in queue.waiting:
            queue.waiting.remove(request)
            queue.waiting_bytes -= len(request.body)
        self._live.pop(request.key, None)
