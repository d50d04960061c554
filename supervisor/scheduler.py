"""Requests from acceptance to their one terminal event. Pure: messages and times in, effects out; no sockets, no clock.

Law 1 lives here. A request enters the table when it is ACCEPTED and leaves it when its terminal event has been put
on the way *and* the worker no longer holds its job (it said so, or it is dead). Removing it earlier is how zombies
are made: a later cancel would find nothing to cancel.

A request whose worker dies goes back into its model's line with the ids that were delivered, and on in the next worker
that is free. What is decided about it there is in the rooms beside this one: ``model_queue`` (which is next, where),
``deliveries`` (numbering, credit), ``strikes`` (whether it is to blame).
"""

from collections.abc import Iterable
from itertools import islice

from protocol.codec import encode, pack_body, pack_error
from protocol.errors import ErrorCode, FrameError, RequestError, WireError
from protocol.messages import (
    TERMINAL,
    Accepted,
    CancelJob,
    Error,
    EventEntry,
    EventFlag,
    Events,
    Generate,
    JobMessage,
    Report,
)
from supervisor.deliveries import Deliveries, HoldLimits
from supervisor.due import DueTimes
from supervisor.held import HeldEvents
from supervisor.in_flight import Effect, InFlight, Phase, ToClient, ToWorker
from supervisor.model_queue import BYTES_PER_TOKEN, ModelQueue, QueueLimits
from supervisor.route import read_route
from supervisor.seats import Seat
from supervisor.strikes import StrikePolicy, Strikes

UNLIMITED = 1 << 32
"""Credit for everything that a stream may still hold."""


CONFIRM_S = 1.0
"""How long a worker is given to confirm a cancel, before the client is told without it."""
MOST_REPORTS = 256
"""Queue positions that are reported at once, of each model: counting them is quadratic."""


class Scheduler:
    """The table of requests of all models and connections. One writer: the supervisor's loop.

    Times are monotonic seconds. A worker is known by its name, which is one model's.
    """

    def __init__(
        self,
        *,
        window: int | None = None,
        holds: HoldLimits | None = None,
        strikes: StrikePolicy | None = None,
    ) -> None:
        self._deliveries = Deliveries(bounds=holds) if window is None else Deliveries(window, holds)
        self._strikes = Strikes(strikes or StrikePolicy())
        self._models: dict[str, ModelQueue] = {}
        self._of_worker: dict[str, ModelQueue] = {}
        self._live: dict[tuple[int, int], InFlight] = {}
        self._due = DueTimes(lambda request: self._live.get(request.key) is request)
        self.dropped_frames = 0
        """EVENTS frames of a former generation, or events of requests that are over: dropped, counted."""

    # --- models and their workers ---------------------------------------------------------------------------------

    def add_model(
        self, name: str, *, refusal: WireError, workers: Iterable[str] | None = None, limits: QueueLimits | None = None
    ) -> None:
        """A model, and the names of its workers (by default one, called as the model is), none of them up."""
        seats = {worker: Seat(worker, refusal) for worker in workers or (name,)}
        queue = self._models[name] = ModelQueue(name, limits or QueueLimits(), seats)
        self._of_worker |= dict.fromkeys(seats, queue)

    def accept_new(self, worker: str) -> None:
        """Requests may wait for this worker from now on (it is, or soon will be, running)."""
        self._of_worker[worker].seats[worker].refusal = None

    def refuse_new(self, worker: str, error: WireError, now: float) -> list[Effect]:
        """Requests do not wait for this worker any more, and it gets no others; those it has it finishes. If none of
        the model's takes any, this is what new ones are told."""
        queue = self._of_worker[worker]
        seat = queue.seats[worker]
        seat.refusal, seat.capacity = error, 0
        return self._dispatch(queue, now)  # what it was kept free for goes elsewhere

    def open(self, worker: str, generation: int, capacity: int, now: float) -> list[Effect]:
        """A worker is ready for up to ``capacity`` jobs at once: give it what waits."""
        queue = self._of_worker[worker]
        seat = queue.seats[worker]
        seat.generation, seat.capacity, seat.isolates = generation, capacity, False
        return self._dispatch(queue, now)

    def worker_gone(self, worker: str, error: WireError, now: float, *, struck: bool = True) -> list[Effect]:
        """The worker's process has ended. What it was computing goes on in another one, now or after the restart.

        error   what those are told that cannot: resume is false, or no worker of the model will come up
        struck  whether the requests may be why it ended (an order to stop it is none of their doing)
        """
        queue = self._of_worker[worker]
        seat = queue.seats[worker]
        seat.capacity = seat.generation = 0
        seat.isolates = False
        running = list(seat.running.values())
        seat.running.clear()
        effects: list[Effect] = []
        if struck:  # once a death for each payload, and also those that were given up: they were being computed
            for body in {request.body for request in running}:
                self._strikes.add(queue.name, body, now)
        for request in running:
            request.settle()
            if request.phase is Phase.RUNNING:
                effects += self._after_death(queue, request, error, now, struck=struck)
            else:
                self._leave(request)
        return effects + self._dispatch(queue, now)

    def _after_death(
        self, queue: ModelQueue, request: InFlight, error: WireError, now: float, *, struck: bool
    ) -> list[Effect]:
        if request.cancelled:  # its client need not know how narrow that was
            queue.totals.finished += 1
            end = self._deliveries.end_cancelled(request)
            self._leave(request)
            return [end]
        if struck:
            request.strikes = self._strikes.count(request.model, request.body, now)
            if self._strikes.poisons(request.strikes):
                return self._end(request, self._poisoned(request.strikes))
        if not request.route.resume or not queue.accepts:
            return self._end(request, error)
        request.phase, request.worker = Phase.WAITING, ""
        request.resumes += 1
        request.alone = self._strikes.isolates(request.strikes)
        queue.totals.resumed += 1
        queue.push(request)
        return []

    def _poisoned(self, strikes: int) -> WireError:
        window = self._strikes.policy.window_s
        return WireError(
            ErrorCode.POISONED,
            f"{strikes} workers died while they were computing this request, or one just like it: it is not tried "
            f"again for {window:g} s",
        )

    def end_waiting(self, worker: str, error: WireError) -> list[Effect]:
        """This worker will not serve: if none of the model's will, end everything that waits."""
        queue = self._of_worker[worker]
        if queue.accepts:
            return []
        effects: list[Effect] = []
        for request in list(queue.all_waiting()):
            queue.remove(request)
            effects += self._end(request, error)
        return effects

    def release_held(self, worker: str, now: float) -> list[Effect]:
        """The worker is stopped: send what requests that it finished still hold. Their end does not wait for credit."""
        effects: list[Effect] = []
        for request in [r for r in self._live.values() if r.phase is Phase.HELD and r.worker == worker]:
            effects += self._release(request, now, all_of_it=True)
        return effects

    def end_running(self, worker: str) -> list[Effect]:
        """The drain's time is over. What cannot go on in another worker ends with DRAINING."""
        queue = self._of_worker[worker]
        effects: list[Effect] = []
        told = f"model {queue.name!r} is being stopped; the request was ended before its time"
        for request in queue.seats[worker].running.values():
            if request.phase is Phase.RUNNING and not (queue.accepts and request.route.resume):
                effects += self._abandon(request)
                effects += self._end_running(request, WireError(ErrorCode.DRAINING, told))
        return effects

    # --- counts -------------------------------------------------------------------------------------------------

    def counts(self, model: str) -> tuple[int, int]:
        """(running, waiting) requests of a model. Running includes those whose worker has yet to confirm a cancel."""
        queue = self._models[model]
        return queue.running, queue.waiting

    def work(self, worker: str) -> tuple[int, int]:
        """(requests that a worker has, tokens that it and its predecessors have generated)."""
        seat = self._of_worker[worker].seats[worker]
        return len(seat.running), seat.tokens

    def totals(self, model: str) -> dict[str, int]:
        """Counts since the supervisor's start: tokens generated, requests finished, ended with an error, resumed."""
        queue = self._models[model]
        totals = queue.totals
        return {
            "tokens": sum(seat.tokens for seat in queue.seats.values()),
            "finished": totals.finished,
            "errors": totals.errors,
            "resumed": totals.resumed,
        }

    @property
    def held_bytes(self) -> int:
        """Bytes of events that wait for clients to read."""
        return self._deliveries.held_bytes

    def channels(self) -> set[int]:
        """Connections with unfinished requests."""
        return {channel for channel, _ in self._live}

    # --- clients ------------------------------------------------------------------------------------------------

    def submit(self, channel: int, message: Generate, now: float) -> list[Effect]:
        """A new request: ACCEPTED (and JOB, if a worker has room), or ERROR."""
        try:
            queue, request = self._admit(channel, message, now)
        except WireError as e:
            return [ToClient(channel, encode(Error(message.request, pack_error(e))))]
        self._live[request.key] = request
        queue.push(request)
        route = request.route
        for what, limit in ("queue_ms", route.queue_ms), ("ttft_ms", route.ttft_ms), ("deadline_ms", route.deadline_ms):
            if limit is not None:
                self._due.add(now + limit / 1000, what, request)
        request.reported = queue.position(request)
        body = pack_body({"model": message.model, "queue_position": request.reported})
        return [ToClient(channel, encode(Accepted(message.request, body))), *self._dispatch(queue, now)]

    def _admit(self, channel: int, message: Generate, now: float) -> tuple[ModelQueue, InFlight]:
        route = read_route(message.route)
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
        if not queue.accepts:
            raise queue.refusal
        cost = 1 + len(message.body) // BYTES_PER_TOKEN
        queue.check_room(cost)
        strikes = self._strikes.count(message.model, message.body, now)
        if self._strikes.poisons(strikes):
            raise self._poisoned(strikes)
        request = InFlight(
            channel,
            message.request,
            message.model,
            route,
            message.body,
            cost,
            queue.line.account(channel, route.priority),
            accepted=now,
            credit=self._deliveries.window,
            held=HeldEvents(),
            resumable=route.resume,
            strikes=strikes,
        )
        return queue, request

    def cancel(self, channel: int, request_id: int, now: float) -> list[Effect]:
        """The client no longer wants an answer. Idempotent; the terminal event says what it came to."""
        request = self._live.get((channel, request_id))
        if request is None or request.phase is Phase.ENDED or request.cancelled:
            return []
        if request.phase is Phase.WAITING:
            queue = self._models[request.model]
            queue.totals.finished += 1
            queue.remove(request)
            end = self._deliveries.end_cancelled(request)
            self._leave(request)
            return [end, *self._dispatch(queue, now)]  # one that had to be alone kept a worker free
        # Whoever cancels may not go on granting credit: what is held, and the terminal event behind it, must not wait.
        request.cancelled = True
        self._due.add(now + CONFIRM_S, "cancelled", request)
        request.credit += UNLIMITED
        abandon = self._abandon(request) if request.phase is Phase.RUNNING else []
        return self._release(request, now) + abandon

    def credit(self, channel: int, request_id: int, events: int, now: float) -> list[Effect]:
        """The client has consumed events of a stream: send what was held back for it."""
        request = self._live.get((channel, request_id))
        if request is None:
            return []
        self._deliveries.grant(request, events)
        return self._release(request, now) if request.holds else []

    def gone(self, channel: int, now: float) -> list[Effect]:
        """The connection has ended: nobody waits for its answers."""
        effects: list[Effect] = []
        touched = set()
        for request in [r for r in self._live.values() if r.channel == channel]:
            touched.add(request.model)
            if request.phase is Phase.RUNNING:
                effects += self._abandon(request)
                request.phase = Phase.ENDED
                self._deliveries.drop(request)
            elif request.phase is not Phase.ENDED:
                if request.phase is Phase.WAITING:
                    self._models[request.model].remove(request)
                self._leave(request)
        for queue in self._models.values():
            queue.line.forget(channel)
            if queue.name in touched:  # one that had to be alone may have left: a worker is kept free no more
                effects += self._dispatch(queue, now)
        return effects

    # --- time ---------------------------------------------------------------------------------------------------

    @property
    def next_due(self) -> float | None:
        """When ``expire`` has something to do; None: it has not."""
        return self._due.earliest

    def expire(self, now: float) -> list[Effect]:
        """End requests whose time is over, whatever their worker is doing."""
        effects: list[Effect] = []
        for what, request in self._due.take(now):
            if request.phase not in (Phase.WAITING, Phase.RUNNING):
                continue
            if request.cancelled:  # its worker has not confirmed that
                self._models[request.model].totals.finished += 1
                request.phase = Phase.ENDED
                effects.append(self._deliveries.end_cancelled(request))
                continue
            if (what == "queue_ms" and request.started is not None) or (what == "ttft_ms" and request.has_tokens):
                continue
            effects += self._give_up(request, _too_late(what, request))
            effects += self._dispatch(self._models[request.model], now)
        return effects

    def end_stalled(self, now: float) -> list[Effect]:
        """End streams whose clients have stopped reading."""
        effects: list[Effect] = []
        for request, error in self._deliveries.stalled(now):
            effects += self._give_up(request, error)
            effects += self._dispatch(self._models[request.model], now)
        return effects

    def report_positions(self) -> list[Effect]:
        """REPORT to those that asked for it and have moved on in the line."""
        effects: list[Effect] = []
        for queue in self._models.values():
            # not to those that go on behind their first token
            wanted = (r for r in queue.all_waiting() if r.route.progress and not r.has_tokens)
            for request in islice(wanted, MOST_REPORTS):
                if (at := queue.position(request)) != request.reported:
                    request.reported = at
                    effects.append(_report(request, {"phase": "queued", "queue_position": at}))
        return effects

    # --- workers ------------------------------------------------------------------------------------------------

    def prefill(self, worker: str, key: tuple[int, int], done: int, total: int) -> list[Effect]:
        """A worker has computed part of a prompt."""
        request = self._of_worker[worker].seats[worker].running.get(key)
        if request is None or request.phase is not Phase.RUNNING or request.has_tokens or not request.route.progress:
            return []
        return [_report(request, {"phase": "prefill", "done": done, "total": total})]

    def events(self, worker: str, frame: bytes, message: Events, now: float) -> list[Effect]:
        """What one engine step brought for one connection. ``frame`` is the message as it came: where every stream in
        it has credit, it is passed on whole, which is what makes the router cheap. Raises FrameError, nothing changed,
        if an event has another number than the one that is due."""
        queue = self._of_worker[worker]
        seat = queue.seats[worker]
        if message.generation != seat.generation:
            self.dropped_frames += 1
            return []
        ended = False
        if not self._passes_whole(seat, message):
            effects, ended = self._slice(seat, message, now)
        else:
            effects = [ToClient(message.channel, frame)]
            running, channel, body = seat.running, message.channel, message.body
            at = 0
            # The road of nearly every token: what note_tokens and count_sent do, without the calls.
            for number, seq, flags, tokens, length in message.index:
                request = running[channel, number]
                if tokens:
                    request.has_tokens = True
                    seat.tokens += tokens
                    request.unpaid += tokens
                    request.delivered_tokens += tokens
                    if request.resumable:
                        request.ids += body[at : at + 4 * tokens]
                at += length
                request.sent = seq + 1
                request.credit -= 1
                if flags & TERMINAL:
                    ended = True
                    self._finish(seat, request, flags, now)
        return effects + self._dispatch(queue, now) if ended else effects

    @staticmethod
    def _note_tokens(request: InFlight, tokens: int, ids: bytes) -> None:
        """What the answer consists of, for the worker that may have to go on with it."""
        request.has_tokens = True
        request.unpaid += tokens
        if request.resumable:
            request.ids += ids

    @staticmethod
    def _passes_whole(seat: Seat, message: Events) -> bool:
        """Whether every event may go to the client now. Raises FrameError if one came out of turn."""
        count, channel, running = len(message.index), message.channel, seat.running
        whole = True
        due: dict[int, int] = {}  # by request, the number of its next event; -1 behind its end
        for number, seq, flags, _, _ in message.index:
            request = running.get((channel, number))
            if request is None or request.phase is not Phase.RUNNING:
                whole = False
                continue
            awaited = due.get(number)
            if awaited is None:
                awaited = request.sent
                if request.holds:
                    awaited += len(request.held)
            if awaited < 0:  # a worker that goes on behind the end: the client must not see that
                whole = False
                continue
            if seq != awaited:
                # A token is missing or came twice, and nothing that this worker says can be believed any more.
                raise FrameError(ErrorCode.BAD_FRAME, f"event {seq} of a request where {awaited} was due")
            due[number] = -1 if flags & TERMINAL else awaited + 1
            # A stream may have several events in the frame; asking for credit for all of them is a little too strict,
            # which only costs the slicing.
            if request.holds or request.credit < count:
                whole = False
        return whole

    def _slice(self, seat: Seat, message: Events, now: float) -> tuple[list[Effect], bool]:
        """Pass on what may go and hold the rest, event by event. Whether the worker let go of a job."""
        effects: list[Effect] = []
        index: list[EventEntry] = []
        chunks: list[bytes] = []
        at, ended = 0, False
        for entry in message.index:
            event = message.body[at : at + entry.length]
            at += entry.length
            request = seat.running.get((message.channel, entry.request))
            if request is None:
                self.dropped_frames += 1
                continue
            ended = ended or bool(entry.flags & TERMINAL)
            if request.phase is Phase.ENDED:
                if entry.flags & TERMINAL:  # the worker has let go
                    self._leave_seat(seat, request)
                    self._leave(request)
                continue
            if entry.tokens:
                seat.tokens += entry.tokens
                self._note_tokens(request, entry.tokens, event[: 4 * entry.tokens])
            if request.holds or (request.credit <= 0 and not entry.flags & TERMINAL):
                effects += self._hold(seat, request, entry, event, now)
                continue
            self._deliveries.count_sent(request, entry)
            index.append(entry)
            chunks.append(event)
            if entry.flags & TERMINAL:
                self._finish(seat, request, entry.flags, now)
        if index:
            frame = encode(Events(message.channel, message.generation, index, b"".join(chunks)))
            effects.insert(0, ToClient(message.channel, frame))
        return effects, ended

    def _hold(self, seat: Seat, request: InFlight, entry: EventEntry, event: bytes, now: float) -> list[Effect]:
        self._deliveries.hold(request, entry, event, now)
        if entry.flags & TERMINAL:
            request.phase = Phase.HELD
            self._leave_seat(seat, request)
            self._note_served(request, entry.flags, now)
        if excess := self._deliveries.excess(request):
            ended, error = excess
            return self._give_up(ended, error) + self._dispatch(self._models[ended.model], now)
        return []

    def _release(self, request: InFlight, now: float, *, all_of_it: bool = False) -> list[Effect]:
        """Send held events in order, as far as credit goes."""
        frames, last = self._deliveries.release(request, now, all_of_it=all_of_it)
        if last & TERMINAL:
            self._count_end(request, last)
            self._leave(request)
        return list(frames)

    # --- shared -------------------------------------------------------------------------------------------------

    def _dispatch(self, queue: ModelQueue, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while queue.waiting and (chosen := queue.next(now)) is not None:
            seat, request = chosen
            strikes = self._strikes.count(request.model, request.body, now)  # others like it may have run meanwhile
            if self._strikes.poisons(strikes):
                seat.isolates = seat.isolates and not request.alone
                effects += self._end(request, self._poisoned(strikes))
                continue
            request.strikes = max(request.strikes, strikes)
            if self._strikes.isolates(strikes) and not request.alone:
                request.alone = True
                queue.push(request)
                continue
            request.phase, request.worker = Phase.RUNNING, seat.worker
            seat.running[request.key] = request
            if request.started is None:
                request.started = now
            job = JobMessage(request.channel, request.request, _carry(request), request.body)
            effects.append(ToWorker(seat.worker, encode(job)))
        return effects

    def _finish(self, seat: Seat, request: InFlight, flags: int, now: float) -> None:
        """The worker said how it ended, and the client was told."""
        self._note_served(request, flags, now)
        self._count_end(request, flags)
        self._leave_seat(seat, request)
        self._leave(request)

    def _note_served(self, request: InFlight, flags: int, now: float) -> None:
        if flags & EventFlag.ERROR or request.cancelled or request.started is None:
            return
        self._models[request.model].totals.served(now - request.started)
        self._strikes.clear(request.model, request.body)

    def _count_end(self, request: InFlight, flags: int) -> None:
        totals = self._models[request.model].totals
        if flags & EventFlag.ERROR:
            totals.errors += 1
        else:
            totals.finished += 1

    def _abandon(self, request: InFlight) -> list[Effect]:
        """Have the worker let go. The request stays in the table until it did."""
        return [ToWorker(request.worker, encode(CancelJob(request.channel, request.request)))]

    def _give_up(self, request: InFlight, error: WireError) -> list[Effect]:
        """End a request wherever it is."""
        if request.phase is Phase.RUNNING:
            return self._abandon(request) + self._end_running(request, error)
        if request.phase is Phase.WAITING:
            self._models[request.model].remove(request)
        return self._end(request, error)

    def _end_running(self, request: InFlight, error: WireError) -> list[Effect]:
        """The terminal event of a request whose worker still has its job."""
        self._models[request.model].totals.errors += 1
        request.phase = Phase.ENDED
        return [self._deliveries.end_with_error(request, error)]

    def _end(self, request: InFlight, error: WireError) -> list[Effect]:
        """The terminal event of a request that is in no line, and that no worker has."""
        self._models[request.model].totals.errors += 1
        end = self._deliveries.end_with_error(request, error)
        self._leave(request)
        return [end]

    def _leave_seat(self, seat: Seat, request: InFlight) -> None:
        del seat.running[request.key]
        request.settle()
        if request.alone:
            seat.isolates = False

    def _leave(self, request: InFlight) -> None:
        """Out of the table."""
        request.phase = Phase.ENDED  # it may still be in a list that is being worked through
        request.body, request.ids = b"", bytearray()  # the heap of due times may remember it for long
        if request.holds:
            self._deliveries.drop(request)
        self._live.pop(request.key, None)


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
    return carry


def _too_late(what: str, request: InFlight) -> WireError:
    limit = getattr(request.route, what)
    if what == "queue_ms":
        told = f"the request waited for a worker for {limit} ms, which is its queue_ms"
        return WireError(ErrorCode.QUEUE_TIMEOUT, told, field="route.queue_ms")
    awaited = "its first token" if what == "ttft_ms" else "the end of its answer"
    told = f"{awaited} did not come within {limit} ms, which is the request's {what}"
    return WireError(ErrorCode.DEADLINE_EXCEEDED, told, field=f"route.{what}")


def _report(request: InFlight, fields: dict[str, object]) -> ToClient:
    return ToClient(request.channel, encode(Report(request.request, pack_body(fields))))
