"""Requests from acceptance to their one terminal event. Pure: messages and times in, effects out; no sockets, no clock.

Every accepted request ends in exactly one terminal event. These classes enforce that. Each calls only those below it:

* ``Scheduler`` handles the clients' messages, the list of models and workers, and deadlines.
* ``WorkerEvents`` handles the workers' messages about their jobs. ``WorkerEnds`` handles the ends of workers.
* ``RequestTable`` has the requests. It gives them to workers and ends them. It asks ``ModelQueue`` for the next request
  and its worker, ``CreditControl`` for numbers of events and credit, and ``PoisonTracker`` for the payloads that deaths
  are blamed on.

When a worker dies, its requests go back into their model's queue with the token ids that were delivered. The next
worker that is free goes on with them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from protocol import limits
from protocol.codec import encode, pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import Accepted, Generate
from protocol.names import unknown_model
from supervisor.keys.rights import OWNER, Identity, may_cancel, may_see
from supervisor.requests import table as reports
from supervisor.requests.credit import CreditControl, SendBufferLimits
from supervisor.requests.poison import PoisonPolicy, PoisonTracker
from supervisor.requests.queue import BYTES_PER_TOKEN, Affinity, ModelQueue, QueueLimits, WorkerSlot
from supervisor.requests.request import Awaited, Effect, InFlight, SendBuffer, ToClient, read_route, refusal
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.stories import Stories
from supervisor.requests.table import CANCEL, RequestTable, is_met, too_late
from supervisor.requests.usage_ledger import UsageLedger
from supervisor.requests.worker_events import WorkerEvents

# Decide what becomes of a worker's requests when the worker dies, has drained for too long, or is stopped. Pure.


class WorkerEnds:
    """Handles the ends of workers. ``PoisonTracker`` decides which requests a death is blamed on."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def not_sent(self, worker: str, key: tuple[int, int]) -> None:
        """Take note that a job could not be sent, because the worker is not connected any more. The worker's end, which
        is about to be known, is not the request's fault.

        key  channel and number of the request
        """
        self._table.slot_of(worker).unsent.add(key)

    def worker_gone(self, worker: str, error: WireError, now: float, *, struck: bool = True) -> list[Effect]:
        """Take note that a worker's process has ended. Its requests go on in another worker, now or after the restart.

        error   ends the requests that cannot go on: their resume is false, or no worker of the model will come up
        struck  whether one of the requests may be the reason of the death; False after an order to stop the worker
        """
        table = self._table
        queue = table.queue_of_worker[worker]
        computed = set(queue.worker_slots[worker].computed)
        running = queue.worker_slots[worker].close()
        if struck:  # also requests that were given up: the worker had yet to let them go, so it was computing them
            table.poison.add_death(queue.name, computed, now)
        effects: list[Effect] = []
        for request in running:
            request.settle()
            if request.phase is RequestPhase.RUNNING:
                request.note(now, "worker_ended", worker=worker.partition("~")[0], reason=error.message)
                effects += self._after_death(request, error, now, struck=struck and request in computed)
            else:
                table.leave(request)
        queue.after_death()
        return effects + table.dispatch(queue, now)

    def _after_death(self, request: InFlight, error: WireError, now: float, *, struck: bool) -> list[Effect]:
        """Put a request of a dead worker back into the queue, or end it."""
        table, queue = self._table, self._table.queues[request.model]
        if request.cancelled:  # the worker had yet to confirm the cancel, which makes no difference to the client
            return table.end(request, None, now)
        if struck:
            suspicion = table.poison.find(request.model, request.body, now)
            if table.poison.poisons(suspicion):
                return table.end(request, table.poison.error(), now)
            request.place, request.alone = request.next_seq, table.poison.next_is_last(suspicion)
        if not request.resumable or not queue.accepts:
            return table.end(request, error, now)
        request.phase, request.worker = RequestPhase.WAITING, ""
        request.resumes += 1
        queue.totals.resumed += 1
        queue.push(request)
        return []

    def finds_culprit(self, worker: str, now: float) -> bool:
        """Return whether the worker's death makes a request poisoned, which then does not come to another worker.

        Call this before ``worker_gone``.
        """
        queue = self._table.queue_of_worker[worker]
        return self._table.poison.finds_culprit(queue.name, queue.worker_slots[worker].computed, now)

    def end_running(self, worker: str, now: float) -> list[Effect]:
        """End the requests of a worker whose time to drain is over, unless they can go on in another worker."""
        queue = self._table.queue_of_worker[worker]
        effects: list[Effect] = []
        message = f"model {queue.name!r} is being stopped; the request was ended before its time"
        for request in queue.worker_slots[worker].running.values():
            if request.phase is RequestPhase.RUNNING and not (queue.accepts and request.resumable):
                effects += self._table.give_up(request, WireError(ErrorCode.DRAINING, message), now)
        return effects

    def end_waiting(self, worker: str, error: WireError, now: float) -> list[Effect]:
        """End all requests that wait for the model of a worker that will not serve, unless another worker will."""
        queue = self._table.queue_of_worker[worker]
        if queue.accepts:
            return []
        effects: list[Effect] = []
        for request in list(queue.all_waiting()):
            effects += self._table.give_up(request, self._table.leaving or error, now)
        return effects

    def release_held(self, worker: str | None, now: float) -> list[Effect]:
        """Send the held events of requests that a stopped worker has finished. Their ends do not wait for credit.

        worker  the name of the worker; None: all workers are stopped
        """
        effects: list[Effect] = []
        held = [r for r in self._table.live.values() if r.phase is RequestPhase.HELD and worker in (None, r.worker)]
        for request in held:
            effects += self._table.release(request, now, all_of_it=True)
        return effects


# Show unfinished requests to people, and find the request that a person names. Pure.


MOST = 500
"""The most requests in one list. Counting a place in a queue of n requests takes n steps, so a list takes n² steps."""


class RequestList:
    """The unfinished requests of all models and connections, as the verbs ``requests`` and ``cancel_request`` see them.

    table  has the requests in the order in which they were accepted
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def describe(
        self, identity: Identity, limit: int, shown: Callable[[str], str | None], now: float
    ) -> dict[str, Any]:
        """Return the result of the verb ``requests``: the oldest requests that ``identity`` may see.

        limit  the most requests in the list
        shown  returns the name under which people know a worker; None for a worker that was removed
        now    monotonic seconds
        """
        visible = [request for request in self._unfinished() if _is_visible(identity, request)]
        return {
            "requests": [self._describe_one(request, shown, now) for request in islice(visible, limit)],
            "total": len(visible),
        }

    def story(self, name: str, identity: Identity, unix: float) -> list[dict[str, Any]]:
        """Return what became of the requests that a name means, see ``Stories.find``: the result of ``story``.

        unix  what has to be added to monotonic seconds to get seconds since 1970

        Raises RequestError if there is none that ``identity`` may see.
        """
        live = {request.id: request for request in self._unfinished()}
        told = self._table.stories.find(name, identity, (request.record() for request in live.values()))
        return [
            story.describe("ended" if story.ended is not None else self._state(live[story.id])[0], unix)
            for story in told
        ]

    def find(self, identity: Identity, name: str) -> list[InFlight]:
        """Return the unfinished requests that a name means: ``12-3``, or a trace id, which several requests may have.

        Raises RequestError if there is none that ``identity`` may see, and WireError if ``identity`` may cancel none.
        """
        named = [request for request in self._unfinished() if name == request.id or name in request.route.trace_ids]
        visible = [request for request in named if _is_visible(identity, request)]
        if not visible:
            raise RequestError(f"no request {name[:128]!r} is unfinished: it has ended, or never was", field="id")
        found = [request for request in visible if may_cancel(identity, request.owner)]
        if not found:
            text = f"request {name[:128]} is another key's: cancelling it takes the right admin"
            raise WireError(ErrorCode.FORBIDDEN, text, field="id")
        return found

    def count_by_party(self) -> Counter[int]:
        """Return how many unfinished requests each party has, see ``InFlight``."""
        return Counter(request.party for request in self._unfinished())

    def counted_in(self) -> set[int]:
        """Return the places of the counters to which unfinished requests add their tokens."""
        return {request.usage_place for request in self._unfinished()}

    def _unfinished(self) -> Iterator[InFlight]:
        return (request for request in self._table.live.values() if request.phase is not RequestPhase.ENDED)

    def _describe_one(self, request: InFlight, shown: Callable[[str], str | None], now: float) -> dict[str, Any]:
        state, has_worker = self._state(request)
        position = self._table.queues[request.model].position(request) if state == "queued" else None
        worker = shown(request.worker) if has_worker else None
        return {
            "id": request.id,
            "model": request.model,
            "worker": worker,
            "key": request.owner.name,
            "state": state,
            "queue_position": position,
            "age_ms": int(1000 * (now - request.accepted)),
            "prompt_tokens": request.prompt_tokens,
            "prompt_tokens_estimate": request.cost,
            "tokens": request.tokens,
            "priority": request.route.priority,
        }

    def _state(self, request: InFlight) -> tuple[str, bool]:
        """Return (the state of an unfinished request, whether a worker has it)."""
        if request.key in self._table.queues[request.model].parked:
            return "parked", False
        if request.phase is RequestPhase.WAITING:
            return "queued", False
        if request.phase is RequestPhase.HELD:
            return "delivering", False
        if request.cancelled:
            return "cancelling", True
        return "queued" if request in self._table.slot_of(request.worker).ahead else "running", True


def _is_visible(identity: Identity, request: InFlight) -> bool:
    """Return whether an identity may know of a request: of its owner, and of its model."""
    return may_see(identity, request.owner) and identity.may_use(request.model)


UNLIMITED = 1 << 32
"""Credit for everything that a stream may still hold."""
CONFIRM_S = 1.0
"""Seconds that a worker has to confirm a cancel. After that the client gets the terminal event all the same."""


class Scheduler:
    """The requests of all models and connections. One writer: the supervisor's loop.

    Times are monotonic seconds. A worker is known by its name. Every name belongs to one model only.

    window   events that a stream may be ahead of its client's grants
    holds    the limits of held events, for clients that read slowly
    strikes  the policy by which a payload is refused because workers died of it
    ledger   gives requests the counters for their tokens; None to count nothing
    alarm    called with each time at which ``expire`` has to be called, unless it was called before
    """

    def __init__(
        self,
        *,
        window: int = limits.STREAM_WINDOW,
        holds: SendBufferLimits | None = None,
        strikes: PoisonPolicy | None = None,
        ledger: UsageLedger | None = None,
        stories: Stories | None = None,
        alarm: Callable[[float], object] = lambda when: None,
    ) -> None:
        self._credit = CreditControl(window, holds)
        self._poison = PoisonTracker(strikes or PoisonPolicy())
        self.ended = stories or Stories()
        """The last requests that have ended."""
        self._table = RequestTable(self._credit, self._poison, ledger, self.ended, alarm)
        self._worker_events = WorkerEvents(self._table)
        # Callers reach the classes for the messages and the ends of workers without a detour through methods here.
        self.events = self._worker_events.events
        self.prefill = self._worker_events.prefill
        self.parked = self._worker_events.parked
        self.compiled = self._worker_events.compiled
        worker_ends = WorkerEnds(self._table)
        self.not_sent, self.worker_gone = worker_ends.not_sent, worker_ends.worker_gone
        self.finds_culprit = worker_ends.finds_culprit
        self.end_running = worker_ends.end_running
        self.end_waiting = worker_ends.end_waiting
        self.release_held = worker_ends.release_held
        self.unfinished = RequestList(self._table)

    def leave(self, error: WireError) -> None:
        """Accept no new requests, whatever becomes of the models: the supervisor is shutting down.

        error  the error for new requests, and for those that still wait when the last worker of their model goes
        """
        self._table.leaving = error

    # --- counts ---------------------------------------------------------------------------------------------------

    def counts(self, model: str) -> tuple[int, int]:
        """Return how many requests of a model (run, wait). A cancelled request runs until its worker confirms that."""
        queue = self._table.queues[model]
        return queue.running, queue.waiting

    def computed(self, worker: str) -> int:
        """Return how many requests a worker computes, of those that it has. The others wait for a place in its
        batch."""
        worker_slot = self._table.slot_of(worker)
        return len(worker_slot.running) - len(worker_slot.ahead)

    def queued(self, model: str) -> int:
        """Return how many requests of a model wait: in its queue, or in a worker for a place in its batch."""
        queue = self._table.queues[model]
        return queue.waiting + len(queue.ahead)

    def work(self, worker: str) -> tuple[int, int]:
        """Return (requests that a worker has, tokens that it and its predecessors have generated)."""
        worker_slot = self._table.slot_of(worker)
        return len(worker_slot.running), worker_slot.tokens

    def worker_slot(self, worker: str) -> WorkerSlot | None:
        """Return the worker slot for the fast path, which does not call ``events``.

        Return None while a waiting request may depend on each single event, and for a worker that was removed.
        """
        queue = self._table.queue_of_worker.get(worker)
        return None if queue is None or queue.needs_every_event else queue.worker_slots.get(worker)

    def totals(self, model: str) -> dict[str, int]:
        """Return counts since the supervisor's start, see ``ModelQueue.describe``."""
        return self._table.queues[model].describe()

    def figures(self, model: str, now: float) -> dict[str, Any]:
        """Return what ended requests of a model have taken since the supervisor's start, for metrics."""
        return self._table.queues[model].figures(now)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of events that wait for clients to read."""
        return self._credit.held_bytes

    @property
    def dropped_frames(self) -> int:
        """Return how many EVENTS frames of former generations, and events of requests that are over, were dropped."""
        return self._worker_events.dropped

    def channels(self) -> set[int]:
        """Return the connections with unfinished requests."""
        return {channel for channel, _ in self._table.live}

    def holds(self, channel: int, request: int) -> bool:
        """Return whether a request is unfinished, or its worker has yet to let it go."""
        return (channel, request) in self._table.live

    def find(self, channel: int, request: int) -> InFlight | None:
        """Return a request that is unfinished, or that its worker has yet to let go; None if there is none."""
        return self._table.live.get((channel, request))

    def knows(self, model: str) -> bool:
        """Return whether a model of this name is configured."""
        queue = self._table.queues.get(model)
        return queue is not None and not queue.removed

    # --- models and their workers ---------------------------------------------------------------------------------

    def add_model(self, name: str, limits: QueueLimits | None = None) -> None:
        """Add a model without workers."""
        before = self._table.queues.get(name)
        if before is not None:  # the model was removed before, and ends of its old requests may still be held
            before.limits, before.removed = limits or QueueLimits(), False
        else:
            self._table.queues[name] = ModelQueue(name, limits or QueueLimits(), {})

    def add_worker(self, model: str, worker: str, refusal: WireError) -> None:
        """Add a worker to a model. The worker is not up yet.

        refusal  the error for new requests while none of the model's workers takes any
        """
        queue = self._table.queue_of_worker[worker] = self._table.queues[model]
        queue.worker_slots[worker] = WorkerSlot(worker, refusal)

    def remove_worker(self, worker: str) -> None:
        """Remove a worker that is stopped and will not come back."""
        queue = self._table.queue_of_worker.pop(worker)
        queue.totals.tokens_before += queue.worker_slots.pop(worker).tokens

    def remove_model(self, name: str) -> None:
        """Refuse requests for a model that is not configured any more. All its workers must have been removed."""
        queue = self._table.queues[name]
        queue.removed, queue.affinity = True, Affinity()  # the old affinity may take megabytes

    def set_limits(self, model: str, limits: QueueLimits) -> None:
        """Replace the limits of a model's queue. Requests that wait already stay."""
        self._table.queues[model].limits = limits

    def set_policies(self, holds: SendBufferLimits, strikes: PoisonPolicy) -> None:
        """Replace the limits of held events and the poison policy. Events already held and payloads already remembered
        stay."""
        self._credit.bounds, self._poison.policy = holds, strikes

    def accept_new(self, worker: str) -> None:
        """Let requests wait for this worker, which is running or soon will be."""
        worker_slot = self._table.slot_of(worker)
        worker_slot.refusal, worker_slot.unloaded = None, False

    def rest(self, worker: str, now: float) -> list[Effect]:
        """Let requests wait for this worker, which has no process. The effect ``Wake`` asks for one when needed."""
        return self._stop_giving(worker, None, now, unloaded=True)

    def pause(self, worker: str, now: float) -> list[Effect]:
        """Give the worker no other requests. It finishes those it has. New ones wait, since its successor will come."""
        return self._stop_giving(worker, None, now)

    def hold_back(self, worker: str) -> None:
        """Give a worker that is ready no other requests until ``go_on``. It finishes those it has, and the others wait.

        Whatever else becomes of the worker ends this, too.
        """
        worker_slot = self._table.slot_of(worker)
        worker_slot.held_back, worker_slot.capacity = worker_slot.capacity or worker_slot.held_back, 0

    def go_on(self, worker: str, now: float) -> list[Effect]:
        """Give requests again to a worker that was held back."""
        worker_slot = self._table.slot_of(worker)
        worker_slot.capacity, worker_slot.held_back = worker_slot.held_back, 0
        return self._table.dispatch(self._table.queue_of_worker[worker], now)

    def is_held_back(self, worker: str) -> bool:
        """Return whether a worker is ready and gets no requests, see ``hold_back``."""
        return self._table.slot_of(worker).held_back > 0

    def has_finished(self, worker: str) -> bool:
        """Return whether a worker that is held back has finished all its requests, and compiles nothing for others."""
        worker_slot = self._table.slot_of(worker)
        busy = worker_slot.running or self._table.queue_of_worker[worker].parked
        return worker_slot.held_back > 0 and not busy

    def lacks_worker(self, model: str) -> bool:
        """Return whether requests wait for a model of which no worker takes any now."""
        queue = self._table.queues[model]
        return queue.waiting > 0 and not queue.is_ready

    def waits_for(self, model: str, others: Awaited) -> None:
        """Note which models have to make room before the requests that wait for this model can be served."""
        self._table.queues[model].waits_for = others

    def refuse_new(self, worker: str, error: WireError, now: float) -> list[Effect]:
        """Let no requests wait for this worker, and give it no others. It finishes those it has.

        error  the error for new requests if none of the model's workers takes any
        """
        return self._stop_giving(worker, error, now)

    def _stop_giving(
        self, worker: str, refusal: WireError | None, now: float, *, unloaded: bool = False
    ) -> list[Effect]:
        worker_slot = self._table.slot_of(worker)
        worker_slot.refusal, worker_slot.capacity, worker_slot.unloaded = refusal, 0, unloaded
        worker_slot.held_back = 0
        # The worker may have been kept free for a request, which now goes to another worker.
        return self._table.dispatch(self._table.queue_of_worker[worker], now)

    def open(
        self, worker: str, generation: int, capacity: int, now: float, *, batch_size: int | None = None, gpu: str = ""
    ) -> list[Effect]:
        """Give requests that wait to a worker that is ready.

        generation  the number of the worker's process
        capacity    jobs that the worker takes at once
        batch_size  jobs that it computes at once; the others wait in the worker. None: all of them
        gpu         the GPUs that it is on, for people
        """
        queue = self._table.queue_of_worker[worker]
        queue.worker_slots[worker].open(generation, capacity, capacity if batch_size is None else batch_size, gpu)
        return self._table.dispatch(queue, now)

    # --- clients --------------------------------------------------------------------------------------------------

    def submit(
        self,
        channel: int,
        message: Generate,
        now: float,
        party: int | None = None,
        owner: Identity = OWNER,
        defaults: bytes = b"",
    ) -> list[Effect]:
        """Accept a new request: return ACCEPTED, and JOB if a worker has room. Or refuse it: return ERROR.

        party     the number of the key for which the request is; None: the connection. Parties take turns in the queue,
                  and when constraints are compiled
        owner     the identity that asks
        defaults  settings of the variant that the request names, see ``InFlight``
        """
        try:
            queue, request = self._admit(channel, message, now, channel if party is None else party, owner)
            request.defaults = defaults
        except WireError as e:
            runs = self.holds(channel, message.request)
            return [ToClient(channel, encode(refusal(e, message.kind, message.request, runs=runs)))]
        self._table.add(queue, request)
        body = pack_body({"model": message.model, "queue_position": request.reported})
        return [ToClient(channel, encode(Accepted(message.request, body))), *self._table.dispatch(queue, now)]

    def _admit(
        self, channel: int, message: Generate, now: float, party: int, owner: Identity
    ) -> tuple[ModelQueue, InFlight]:
        """Return a new request and the queue for it. Raises WireError for one that is refused."""
        if message.request == 0:
            raise RequestError("request is 0: ids start at 1 (0 is the connection itself)", field="request")
        if self.holds(channel, message.request):
            text = f"request {message.request} is in use on this connection and goes on: give each request its own id"
            raise WireError(ErrorCode.DUPLICATE_REQUEST, text, field="request")
        route = read_route(message.route)
        queues = self._table.queues
        queue = queues.get(message.model)
        if queue is None or queue.removed:
            known = (name for name, queue in queues.items() if not queue.removed and owner.may_use(name))
            raise unknown_model(message.model, known)
        if self._table.leaving is not None:
            raise self._table.leaving.again()
        if not queue.accepts:
            raise queue.refusal.again()
        cost = 1 + len(message.body) // BYTES_PER_TOKEN
        queue.check_room(cost)
        if self._poison.poisons(self._poison.find(message.model, message.body, now)):
            raise self._poison.error()
        request = InFlight(
            channel,
            message.request,
            message.model,
            route,
            message.body,
            cost,
            queue.fair_queue.account(party, route.priority),
            accepted=now,
            window=self._credit.window,
            held=SendBuffer(),
            party=party,
            owner=owner,
            verb=message.verb,
        )
        return queue, request

    def cancel(self, channel: int, request_id: int, now: float) -> list[Effect]:
        """End a request that its client wants no answer for any more. Cancelling it again does nothing."""
        request = self._table.live.get((channel, request_id))
        if request is None or request.phase is RequestPhase.ENDED or request.cancelled:
            return []
        if request.phase is RequestPhase.WAITING:
            queue = self._table.queues[request.model]
            withdrawn = self._table.withdraw(queue, request)
            # Other requests may have waited for this one, which had to be tried alone.
            return withdrawn + self._table.end(request, None, now) + self._table.dispatch(queue, now)
        # A client that cancels need not grant more credit. Held events and the terminal event are sent all the same.
        request.cancelled = True
        request.note(now, "cancelled")
        self._table.deadlines.add(now + CONFIRM_S, CANCEL, request)
        request.credit += UNLIMITED
        abandon = self._table.abandon(request) if request.phase is RequestPhase.RUNNING else []
        return self._table.release(request, now) + abandon

    def credit(self, channel: int, request_id: int, events: int, now: float) -> list[Effect]:
        """Grant a stream credit for events that its client has consumed. Send the held events that it now covers."""
        request = self._table.live.get((channel, request_id))
        if request is None:
            return []
        self._credit.grant(request, events)
        return self._table.release(request, now) if request.holds else []

    def pong(self, channel: int, nonce: int, now: float) -> list[Effect]:
        """Take note that a client has answered a PING, so it reads. Send the events that were held until then."""
        pings, waiting = self._credit.advances.answered(channel, nonce)
        effects: list[Effect] = list(pings)
        for request in waiting:
            self._credit.has_read(request)
            effects += self._table.release(request, now)
        return effects

    def reject(self, channel: int, error: WireError, now: float) -> list[Effect]:
        """End all requests of a connection that may not have requests any more."""
        return self._reject([r for r in self._table.live.values() if r.channel == channel], error, now)

    def reject_party(self, party: int, error: WireError, now: float) -> list[Effect]:
        """End all requests of a key that may not have requests any more, whatever connections they came through."""
        effects = self._reject([r for r in self._table.live.values() if r.party == party], error, now)
        for queue in self._table.queues.values():
            queue.fair_queue.forget(party)
        return effects

    def _reject(self, requests: list[InFlight], error: WireError, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request in requests:
            if request.phase is not RequestPhase.ENDED:
                effects += self._table.give_up(request, error, now)
        for queue in self._table.queues.values():
            effects += self._table.dispatch(queue, now)
        return effects

    def gone(self, channel: int, now: float) -> list[Effect]:
        """End all requests of a connection that has ended. Nobody reads their terminal events."""
        self._credit.advances.gone(channel)
        effects: list[Effect] = []
        touched = set()
        for request in [r for r in self._table.live.values() if r.channel == channel]:
            touched.add(request.model)
            self._table.left(request, now)
            if request.phase is RequestPhase.RUNNING:
                effects += self._table.abandon(request)
                request.phase = RequestPhase.ENDED
                self._credit.drop(request)
            elif request.phase is not RequestPhase.ENDED:
                if request.phase is RequestPhase.WAITING:
                    effects += self._table.withdraw(self._table.queues[request.model], request)
                self._table.leave(request)
        for queue in self._table.queues.values():
            queue.fair_queue.forget(channel)
            if queue.name in touched:  # other requests may have waited for one that had to be tried alone
                effects += self._table.dispatch(queue, now)
        return effects

    # --- time -----------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Effect]:
        """End requests whose time is over, whatever their worker is doing."""
        effects: list[Effect] = []
        for limit, request in self._table.deadlines.take(now):
            if request.phase not in (RequestPhase.WAITING, RequestPhase.RUNNING):
                continue
            if request.cancelled:
                effects += self._table.end(request, None, now, runs=True)
            elif not is_met(limit, request) or (limit == "queue_ms" and self._is_ahead(request)):
                effects += self._give_up(request, too_late(limit, request), now)
        return effects

    def end_stalled(self, now: float) -> list[Effect]:
        """End streams whose clients have stopped reading."""
        effects: list[Effect] = []
        for request, error in self._credit.stalled(now):
            effects += self._give_up(request, error, now)
        return effects

    def _give_up(self, request: InFlight, error: WireError, now: float) -> list[Effect]:
        queue = self._table.queues[request.model]
        return self._table.give_up(request, error, now) + self._table.dispatch(queue, now)

    def report_loading(self, model: str, progress: dict[str, Any]) -> list[Effect]:
        """Report how far the load of a model is to the clients that asked for it and wait."""
        return reports.loading(self._table.queues[model], progress)

    def report_positions(self) -> list[Effect]:
        """Report the place in the queue to each client that asked for reports, if its request has moved on."""
        return [effect for queue in self._table.queues.values() for effect in reports.positions(queue)]

    def _is_ahead(self, request: InFlight) -> bool:
        """Return whether a request has yet to be begun by any worker, although one has it."""
        if request.phase is not RequestPhase.RUNNING or request.resumes:
            return False
        return request in self._table.slot_of(request.worker).ahead
