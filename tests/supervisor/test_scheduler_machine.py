"""The scheduler against a model of its peers, in random orders: laws 1, 2 and 4, and every bound.

A failure prints the seed; TEST_SEED repeats it.
"""

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from protocol.codec import decode
from protocol.errors import ErrorCode, WireError
from protocol.messages import WORKER_TO_SUPERVISOR, EventEntry, EventFlag, Events, Generate
from supervisor import scheduler as scheduler_module
from supervisor.in_flight import Effect, ToClient
from supervisor.scheduler import HELD_EVENT_COST, Scheduler
from tests.supervisor.scheduler_model import FakeClient, FakeWorker

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
WINDOW, QUEUE_LIMIT, LONGEST_EVENT = 3, 4, 250
HELD_LIMIT, HELD_LIMIT_OF_CONNECTION = 1000, 1500
MODELS = ("m", "n")
GONE = WireError(ErrorCode.WORKER_DIED, "gone")
DOWN = WireError(ErrorCode.MODEL_NOT_RUNNING, "down")
TERMINALS = (EventFlag.FINISHED, EventFlag.ERROR)
steps = Counter[str]()
pick = st.integers(0, 10**6)
seldom = st.sampled_from([False, False, False, True])


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(window=WINDOW)
        self.clients: list[FakeClient] = []
        self.workers: dict[str, FakeWorker | None] = dict.fromkeys(MODELS)
        self.late: list[tuple[str, bytes]] = []  # frames of former generations that are still on their way
        self.generations = Counter[str]()
        self.accepting = dict.fromkeys(MODELS, False)
        for model in MODELS:
            self.scheduler.add_model(model, queue_limit=QUEUE_LIMIT, refusal=DOWN)
        self.connect()
        for model in MODELS:
            self.ready(model, 2)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToClient):
                self.clients[effect.channel - 1].take(effect.frame)
            else:
                worker = self.workers[effect.model]
                assert worker is not None, "a frame for a worker that is not there"
                worker.inbox.append(effect.frame)

    def client(self, n: int) -> FakeClient | None:
        connected = [client for client in self.clients if client.connected]
        return connected[n % len(connected)] if connected else None

    # --- clients

    @rule()
    def connect(self) -> None:
        if len(self.clients) < 12:
            self.clients.append(FakeClient(len(self.clients) + 1, WINDOW))

    @rule(n=pick, model=st.sampled_from(MODELS), request=st.integers(1, 6), size=st.integers(0, 9))
    def submit(self, n: int, model: str, request: int, size: int) -> None:
        if (client := self.client(n)) is None:
            return
        steps["submit"] += 1
        full = self.scheduler.counts(model)[1] >= QUEUE_LIMIT
        live = (client.channel, request) in self.scheduler._live
        refused = len(client.refused)
        self.perform(self.scheduler.submit(client.channel, Generate(request, model, {}, b"p" * size)))
        assert (len(client.refused) > refused) == (live or full or not self.accepting[model])

    @rule(n=pick, request=st.integers(1, 6), events=st.integers(0, 5))
    def grant(self, n: int, request: int, events: int) -> None:
        client = self.client(n)
        if client is not None:
            if request in client.heard:
                client.heard[request].granted += min(events, WINDOW)
            self.perform(self.scheduler.credit(client.channel, request, events))

    @rule(n=pick, request=st.integers(1, 6))
    def cancel(self, n: int, request: int) -> None:
        client = self.client(n)
        if client is not None:
            if request in client.heard:
                client.heard[request].cancelled = True
            self.perform(self.scheduler.cancel(client.channel, request))

    @rule(n=pick, really=seldom)
    def leave(self, n: int, really: bool) -> None:
        client = self.client(n) if really else None
        if client is not None:
            client.connected = False
            self.perform(self.scheduler.gone(client.channel))
            assert client.channel not in {r.channel for m in MODELS for r in self.scheduler._models[m].waiting}

    # --- workers

    @rule(model=st.sampled_from(MODELS), capacity=st.integers(1, 3))
    def ready(self, model: str, capacity: int) -> None:
        if self.workers[model] is None or not self.accepting[model]:
            self.die(model, True, False)
            steps["ready"] += 1
            self.generations[model] += 1
            self.accepting[model] = True
            self.scheduler.accept_new(model)
            self.workers[model] = FakeWorker(self.generations[model], capacity)
            self.perform(self.scheduler.open(model, self.generations[model], capacity))

    @rule(
        model=st.sampled_from(MODELS),
        reads=st.integers(0, 4),
        says=st.lists(st.tuples(pick, st.sampled_from([0, 0, 0, *TERMINALS]), pick), min_size=1, max_size=8),
    )
    def step(self, model: str, reads: int, says: list[tuple[int, int, int]]) -> None:
        worker = self.workers[model]
        if worker is None:
            return
        for _ in range(min(reads, len(worker.inbox))):
            worker.read()
        for n, flags, padding in says:
            if worker.jobs:
                channel, request = list(worker.jobs)[n % len(worker.jobs)]
                worker.say(channel, request, flags, tokens=n % 3, padding=padding % (LONGEST_EVENT - 60))
                steps["events"] += 1
        worker.flush()

    @rule(model=st.sampled_from(MODELS), n=pick, seq=st.integers(0, 9), end=st.sampled_from([0, EventFlag.FINISHED]))
    def say_nonsense(self, model: str, n: int, seq: int, end: int) -> None:
        """A worker that goes on about a job behind its end, or about one it never had."""
        worker = self.workers[model]
        if worker is None:
            return
        channel, request = n % len(self.clients) + 1, 100
        if worker.jobs:
            channel, request = list(worker.jobs)[n % len(worker.jobs)]
            worker.say(channel, request, EventFlag.FINISHED)
        worker.say_anything(channel, EventEntry(request, seq, int(end), 0, 0))
        worker.flush()

    @rule(model=st.sampled_from(MODELS), padding=st.integers(0, LONGEST_EVENT - 60), rounds=st.integers(1, 4))
    def flow(self, model: str, padding: int, rounds: int) -> None:
        """All is well for a while: a token for each job in each step."""
        for _ in range(rounds):
            worker = self.workers[model]
            if worker is not None:
                self.step(model, 100, [(n, 0, padding) for n in range(len(worker.jobs))])
                self.deliver(model, 100)

    @rule(model=st.sampled_from(MODELS), frames=st.integers(1, 5))
    def deliver(self, model: str, frames: int) -> None:
        worker = self.workers[model]
        while worker is not None and worker.outbox and frames:
            self._deliver(model, worker.outbox.popleft())
            frames -= 1

    @precondition(lambda self: self.late)
    @rule()
    def deliver_late(self) -> None:
        model, frame = self.late.pop(0)
        dropped = self.scheduler.dropped_frames
        self._deliver(model, frame)
        assert self.scheduler.dropped_frames == dropped + 1

    def _deliver(self, model: str, frame: bytes) -> None:
        message = decode(frame, WORKER_TO_SUPERVISOR)
        assert isinstance(message, Events)
        self.perform(self.scheduler.events(model, frame, message))

    @rule(model=st.sampled_from(MODELS), really=seldom, for_good=st.booleans())
    def die(self, model: str, really: bool, for_good: bool) -> None:
        if not really:
            return
        worker, self.workers[model] = self.workers[model], None
        if worker is not None:
            steps["die"] += 1
            self.late += [(model, frame) for frame in worker.outbox]
            self.perform(self.scheduler.end_running(model, GONE))
            assert self.scheduler.counts(model)[0] == 0
        if for_good:
            self._refuse(model)

    @rule(model=st.sampled_from(MODELS), really=seldom, expired=st.booleans())
    def drain(self, model: str, really: bool, expired: bool) -> None:
        if really and self.workers[model] is not None:
            steps["drain"] += 1
            self._refuse(model)
            if expired:
                self.perform(self.scheduler.cancel_running(model))

    def _refuse(self, model: str) -> None:
        self.accepting[model] = False
        self.scheduler.refuse_new(model, DOWN)
        self.perform(self.scheduler.end_waiting(model, DOWN))

    # --- what holds at all times

    @invariant()
    def bounds_hold(self) -> None:
        steps["steps"] += 1
        for model in MODELS:
            queue = self.scheduler._models[model]
            worker = self.workers[model]
            assert len(queue.running) <= (worker.capacity if worker else 0)
            assert len(queue.waiting) <= QUEUE_LIMIT
            assert queue.waiting_bytes == sum(len(request.body) for request in queue.waiting)
            if worker is not None and queue.waiting:
                assert len(queue.running) == worker.capacity, "a request waits although there is room"
        of_channel = Counter[int]()
        for request in self.scheduler._live.values():
            held = sum(len(event) + HELD_EVENT_COST for _, event in request.held)
            assert held == request.held_bytes <= HELD_LIMIT + LONGEST_EVENT + HELD_EVENT_COST
            of_channel[request.channel] += held
        assert +of_channel == +self.scheduler._held_bytes
        # a terminal event is always taken, and a connection has at most six requests here
        most = HELD_LIMIT_OF_CONNECTION + 6 * (LONGEST_EVENT + HELD_EVENT_COST)
        assert max(of_channel.values(), default=0) <= most

    def teardown(self) -> None:
        """Let everything that is on its way arrive, and workers finish what is wanted: nothing may be left."""
        for _ in range(200):
            for client in self.clients:
                for request in list(client.heard) if client.connected else ():
                    client.heard[request].granted += WINDOW
                    self.perform(self.scheduler.credit(client.channel, request, WINDOW))
            for model, worker in self.workers.items():
                if worker is None:
                    continue
                while worker.inbox:
                    worker.read()
                for channel, request in list(worker.jobs):
                    client = self.clients[channel - 1]
                    wanted = client.connected and not client.heard[request].ends
                    assert wanted, f"{channel, request} is computed for nobody"
                    worker.say(channel, request, EventFlag.FINISHED)
                worker.flush()
                while worker.outbox:
                    self._deliver(model, worker.outbox.popleft())
            if not any(w is not None and (w.inbox or w.jobs) for w in self.workers.values()):
                break
        for model in MODELS:
            if self.workers[model] is None:
                self._refuse(model)
            assert self.scheduler.counts(model) == (0, 0)
        for client in self.clients:
            for request in list(client.heard) if client.connected else ():
                for _ in range(50):
                    client.heard[request].granted += WINDOW
                    self.perform(self.scheduler.credit(client.channel, request, WINDOW))
        assert not self.scheduler._live
        assert not self.scheduler._held_bytes
        for client in self.clients:
            steps.update(client.codes)
        for client in self.clients:
            if client.connected:
                assert all(heard.ends == 1 for heard in client.heard.values()), "a request has not ended"


def test_every_request_ends_once_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"TEST_SEED={SEED}")
    monkeypatch.setattr(scheduler_module, "MAX_HELD_BYTES", HELD_LIMIT)
    monkeypatch.setattr(scheduler_module, "MAX_HELD_BYTES_OF_CONNECTION", HELD_LIMIT_OF_CONNECTION)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        seed(SEED)(SchedulerMachine),
        settings=settings(
            max_examples=150,
            stateful_step_count=120,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(dict(steps))
    assert steps["steps"] > 10_000
