"""Requests from acceptance to their one terminal event. Pure: messages and times in, effects out; no sockets, no clock.

Every accepted request ends in exactly one terminal event. Four modules see to that: this one handles what clients ask
and which workers there are, ``deaths`` the ends of workers, ``worker_events`` what workers say, and ``request_table``
what all of these do to the table of requests.

A request whose worker dies goes back into its model's line with the ids that were delivered, and on in the next worker
that is free. The modules beside these decide about it: ``model_queue`` (which request is next, and where),
``credit_control`` (numbers of events, credit), ``poison`` (which payloads deaths are blamed on).
"""

from itertools import islice

from protocol.codec import encode, pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import Accepted, Generate
from supervisor.requests.credit_control import SendBufferLimits
from supervisor.requests.deaths import Deaths
from supervisor.requests.in_flight import Effect, InFlight, ToClient
from supervisor.requests.model_queue import BYTES_PER_TOKEN, ModelQueue, QueueLimits
from supervisor.requests.poison import PoisonPolicy
from supervisor.requests.refusals import refusal
from supervisor.requests.reports import report
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.route import read_route
from supervisor.requests.send_buffer import SendBuffer
from supervisor.requests.worker_slots import Affinity, WorkerSlot

UNLIMITED = 1 << 32
"""Credit for everything that a stream may still hold."""
CONFIRM_S = 1.0
"""How long a worker is given to confirm a cancel, before the client is told without it."""
MOST_REPORTS = 256
"""Queue positions that are reported at once, of each model: counting them is quadratic."""


class Scheduler(Deaths):
    """The table of requests of all models and connections. One writer: the supervisor's loop.

    Times are monotonic seconds. A worker is known by its name, which is one model's.
    """

    def leave(self, error: WireError) -> None:
        """Take no new requests from now on, whatever becomes of the models: the supervisor is shutting down.

        error  what new requests are told, and those that still wait when the last worker of their model goes
        """
        self._leaving = error

    # --- models and their workers ---------------------------------------------------------------------------------

    def add_model(self, name: str, limits: QueueLimits | None = None) -> None:
        """A model without workers."""
        before = self._models.get(name)
        if before is not None:  # it was removed once; requests of then may still be held
            before.limits, before.removed = limits or QueueLimits(), False
        else:
            self._models[name] = ModelQueue(name, limits or QueueLimits(), {})

    def add_worker(self, model: str, worker: str, refusal: WireError) -> None:
        """Another worker of a model, not up."""
        queue = self._of_worker[worker] = self._models[model]
        queue.worker_slots[worker] = WorkerSlot(worker, refusal)

    def remove_worker(self, worker: str) -> None:
        """A worker that is stopped will not come back."""
        queue = self._of_worker.pop(worker)
        queue.totals.tokens_before += queue.worker_slots.pop(worker).tokens

    def remove_model(self, name: str) -> None:
        """A model whose workers are all removed is not configured any more."""
        queue = self._models[name]
        queue.removed, queue.affinity = True, Affinity()  # the latter may take megabytes

    def set_limits(self, model: str, limits: QueueLimits) -> None:
        """From the next request on."""
        self._models[model].limits = limits

    def set_policies(self, holds: SendBufferLimits, strikes: PoisonPolicy) -> None:
        """From now on."""
        self._credit.bounds, self._poison.policy = holds, strikes

    def accept_new(self, worker: str) -> None:
        """Requests may wait for this worker from now on (it is, or soon will be, running)."""
        worker_slot = self._of_worker[worker].worker_slots[worker]
        worker_slot.refusal, worker_slot.unloaded = None, False

    def rest(self, worker: str, now: float) -> list[Effect]:
        """Requests may wait for this worker, which has to be woken for them: there is a ``Wake`` when it is needed."""
        queue = self._of_worker[worker]
        worker_slot = queue.worker_slots[worker]
        worker_slot.refusal, worker_slot.capacity, worker_slot.unloaded = None, 0, True
        return self._dispatch(queue, now)

    def pause(self, worker: str, now: float) -> list[Effect]:
        """The worker gets no other requests and finishes those it has; its successor is to come, and new ones wait."""
        queue = self._of_worker[worker]
        worker_slot = queue.worker_slots[worker]
        worker_slot.refusal, worker_slot.capacity, worker_slot.unloaded = None, 0, False
        return self._dispatch(queue, now)  # what it was kept free for goes elsewhere

    def refuse_new(self, worker: str, error: WireError, now: float) -> list[Effect]:
        """Requests do not wait for this worker any more, and it gets no others; those it has it finishes. If none of
        the model's takes any, this is what new ones are told."""
        queue = self._of_worker[worker]
        worker_slot = queue.worker_slots[worker]
        worker_slot.refusal, worker_slot.capacity, worker_slot.unloaded = error, 0, False
        return self._dispatch(queue, now)  # what it was kept free for goes elsewhere

    def open(
        self, worker: str, generation: int, capacity: int, now: float, *, batch_size: int | None = None
    ) -> list[Effect]:
        """A worker is ready: give it what waits.

        capacity  jobs that it takes at once
        slots     jobs that it computes at once, the others wait in the worker; None: all of them
        """
        queue = self._of_worker[worker]
        queue.worker_slots[worker].open(generation, capacity, capacity if batch_size is None else batch_size)
        return self._dispatch(queue, now)

    def end_waiting(self, worker: str, error: WireError) -> list[Effect]:
        """This worker will not serve: if none of the model's will, end everything that waits."""
        queue = self._of_worker[worker]
        if queue.accepts:
            return []
        effects: list[Effect] = []
        for request in list(queue.all_waiting()):
            effects += self._withdraw(queue, request)
            effects += self._end(request, self._leaving or error)
        return effects

    def release_held(self, worker: str | None, now: float) -> list[Effect]:
        """The worker is stopped (None: all are): send what requests that it finished still hold. Their end does not
        wait for credit."""
        effects: list[Effect] = []
        for request in [r for r in self._live.values() if r.phase is RequestPhase.HELD and worker in (None, r.worker)]:
            effects += self._release(request, now, all_of_it=True)
        return effects

    def end_running(self, worker: str) -> list[Effect]:
        """The drain's time is over. What cannot go on in another worker ends with DRAINING."""
        queue = self._of_worker[worker]
        effects: list[Effect] = []
        message = f"model {queue.name!r} is being stopped; the request was ended before its time"
        for request in queue.worker_slots[worker].running.values():
            if request.phase is RequestPhase.RUNNING and not (queue.accepts and request.resumable):
                effects += self._abandon(request)
                effects += self._end_running(request, WireError(ErrorCode.DRAINING, message))
        return effects

    # --- clients ------------------------------------------------------------------------------------------------

    def submit(self, channel: int, message: Generate, now: float, party: int | None = None) -> list[Effect]:
        """A new request: ACCEPTED (and JOB, if a worker has room), or ERROR.

        party  whose turn it is when its constraint is compiled; None: the connection's own
        """
        try:
            queue, request = self._admit(channel, message, now)
            request.party = channel if party is None else party
        except WireError as e:
            runs = self.holds(channel, message.request)
            return [ToClient(channel, encode(refusal(e, message.kind, message.request, runs=runs)))]
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
        if message.request == 0:
            raise RequestError("request is 0: ids start at 1 (0 is the connection itself)", field="request")
        if self.holds(channel, message.request):
            text = f"request {message.request} is in use on this connection and goes on: give each request its own id"
            raise WireError(ErrorCode.DUPLICATE_REQUEST, text, field="request")
        route = read_route(message.route)
        queue = self._models.get(message.model)
        if queue is None or queue.removed:
            known = ", ".join(sorted(name for name, queue in self._models.items() if not queue.removed))
            raise WireError(
                ErrorCode.MODEL_NOT_FOUND, f"no model {message.model!r} is configured: there is {known}", field="model"
            )
        if self._leaving is not None:
            raise self._leaving.again()
        if not queue.accepts:
            raise queue.refusal.again()
        cost = 1 + len(message.body) // BYTES_PER_TOKEN
        queue.check_room(cost)
        if self._poison.poisons(self._poison.find(message.model, message.body, now)):
            raise self._poisoned()
        request = InFlight(
            channel,
            message.request,
            message.model,
            route,
            message.body,
            cost,
            queue.fair_queue.account(channel, route.priority),
            accepted=now,
            window=self._credit.window,
            held=SendBuffer(),
        )
        return queue, request

    def cancel(self, channel: int, request_id: int, now: float) -> list[Effect]:
        """The client no longer wants an answer. Idempotent; the terminal event says what it came to."""
        request = self._live.get((channel, request_id))
        if request is None or request.phase is RequestPhase.ENDED or request.cancelled:
            return []
        if request.phase is RequestPhase.WAITING:
            queue = self._models[request.model]
            withdrawn = self._withdraw(queue, request)
            # and then the others: they may have waited for one that had to be tried alone
            return withdrawn + self._end_cancelled(request) + self._dispatch(queue, now)
        # Whoever cancels may not go on granting credit: what is held, and the terminal event behind it, must not wait.
        request.cancelled = True
        self._due.add(now + CONFIRM_S, "cancelled", request)
        request.credit += UNLIMITED
        abandon = self._abandon(request) if request.phase is RequestPhase.RUNNING else []
        return self._release(request, now) + abandon

    def credit(self, channel: int, request_id: int, events: int, now: float) -> list[Effect]:
        """The client has consumed events of a stream: send what was held back for it."""
        request = self._live.get((channel, request_id))
        if request is None:
            return []
        self._credit.grant(request, events)
        return self._release_in_advance(request, now) if request.holds else []

    def pong(self, channel: int, nonce: int, now: float) -> list[Effect]:
        """The client has answered a PING: send what was held back until it was known to read."""
        pings, waiting = self._credit.advances.answered(channel, nonce)
        effects: list[Effect] = list(pings)
        for request in waiting:
            self._credit.has_read(request)
            effects += self._release_in_advance(request, now)
        return effects

    def _release_in_advance(self, request: InFlight, now: float) -> list[Effect]:
        """Send held events, as far as credit goes and credit in advance may be used."""
        effects = self._release(request, now)
        while request.holds and (pings := self._use_advance(request)) is not None:
            effects += [*self._release(request, now), *pings]
        return effects

    def _use_advance(self, request: InFlight) -> list[Effect] | None:
        """Use a window of credit in advance: the PING that is due. None if no credit came of it."""
        pings = self._credit.advances.use(request)
        return list(pings) if request.credit > 0 else None

    def reject(self, channel: int, error: WireError, now: float) -> list[Effect]:
        """The connection may have no requests any more: end those it has."""
        effects: list[Effect] = []
        for request in [r for r in self._live.values() if r.channel == channel and r.phase is not RequestPhase.ENDED]:
            effects += self._give_up(request, error)
        for queue in self._models.values():
            effects += self._dispatch(queue, now)
        return effects

    def gone(self, channel: int, now: float) -> list[Effect]:
        """The connection has ended: nobody waits for its answers."""
        self._credit.advances.gone(channel)
        effects: list[Effect] = []
        touched = set()
        for request in [r for r in self._live.values() if r.channel == channel]:
            touched.add(request.model)
            if request.phase is RequestPhase.RUNNING:
                effects += self._abandon(request)
                request.phase = RequestPhase.ENDED
                self._credit.drop(request)
            elif request.phase is not RequestPhase.ENDED:
                if request.phase is RequestPhase.WAITING:
                    effects += self._withdraw(self._models[request.model], request)
                self._leave(request)
        for queue in self._models.values():
            queue.fair_queue.forget(channel)
            if queue.name in touched:  # others may have waited for one that had to be tried alone
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
            if request.phase not in (RequestPhase.WAITING, RequestPhase.RUNNING):
                continue
            if request.cancelled:  # its worker has not confirmed that
                self._models[request.model].totals.finished += 1
                request.phase = RequestPhase.ENDED
                effects.append(self._credit.end_cancelled(request))
                continue
            if (what == "queue_ms" and request.started is not None) or (what == "ttft_ms" and request.has_tokens):
                continue
            effects += self._give_up(request, _too_late(what, request))
            effects += self._dispatch(self._models[request.model], now)
        return effects

    def end_stalled(self, now: float) -> list[Effect]:
        """End streams whose clients have stopped reading."""
        effects: list[Effect] = []
        for request, error in self._credit.stalled(now):
            effects += self._give_up(request, error)
            effects += self._dispatch(self._models[request.model], now)
        return effects

    def report_loading(self, model: str, part: str, done: int, total: int) -> list[Effect]:
        """REPORT to those that wait for a model while it is loaded."""
        if any(worker_slot.capacity for worker_slot in self._models[model].worker_slots.values()):
            return []  # they wait for room: another worker is up
        wanted = (r for r in self._models[model].all_waiting() if r.route.progress and not r.has_tokens)
        fields = {"phase": "loading", "part": part, "done": done, "total": total}
        return [report(request, fields) for request in islice(wanted, MOST_REPORTS)]

    def report_positions(self) -> list[Effect]:
        """REPORT to those that asked for it and have moved on in the line."""
        effects: list[Effect] = []
        for queue in self._models.values():
            # not to those that go on behind their first token
            wanted = (r for r in queue.all_waiting() if r.route.progress and not r.has_tokens)
            for request in islice(wanted, MOST_REPORTS):
                if (at := queue.position(request)) != request.reported:
                    request.reported = at
                    effects.append(report(request, {"phase": "queued", "queue_position": at}))
        return effects


def _too_late(what: str, request: InFlight) -> WireError:
    limit = getattr(request.route, what)
    if what == "queue_ms":
        message = f"the request waited for a worker for {limit} ms, which is its queue_ms"
        return WireError(ErrorCode.QUEUE_TIMEOUT, message, field="route.queue_ms")
    awaited = "its first token" if what == "ttft_ms" else "the end of its answer"
    message = f"{awaited} did not come within {limit} ms, which is the request's {what}"
    return WireError(ErrorCode.DEADLINE_EXCEEDED, message, field=f"route.{what}")
