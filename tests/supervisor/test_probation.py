"""After the death of a worker suspects are tried fairly, others wait only briefly, and the culprit is found.

Simple workers drive the scheduler. In a step each job with a slot gets one event. A poisonous job kills its worker in
place of one of its events.
"""

from collections import Counter
from math import isqrt

import pytest

from protocol.codec import decode
from protocol.errors import ErrorCode, WireError
from protocol.messages import WORKER_TO_SUPERVISOR, EventFlag, Events, Generate
from supervisor.requests.credit import SendBufferLimits
from supervisor.requests.poison import PoisonPolicy
from supervisor.requests.queue import QueueLimits
from supervisor.requests.request import PROBATION, Effect, ToClient, ToWorker
from supervisor.requests.scheduler import Scheduler
from tests.supervisor.scheduler_model import FakeClient, FakeWorker, Key

GONE = WireError(ErrorCode.WORKER_DIED, "gone")
DOWN = WireError(ErrorCode.MODEL_NOT_RUNNING, "down")
SLOTS, SLACK = 32, 2
TOKENS = 120
"""Number of events of a whole answer."""
POISON: Key = (1, 1000)


class Box:
    """One model with its workers, and one client.

    events   number of events so far, by request
    deaths   number of deaths of workers
    kills    number of the event in whose place the worker dies, by request
    reading  steps that the prompt takes in a worker, by request; 1 for requests that are not named
    """

    def __init__(self, workers: int = 1, *, batch_size: int = SLOTS, limit: int = 2, window: int = 10_000) -> None:
        self.scheduler = Scheduler(window=window, strikes=PoisonPolicy(limit=limit))
        self.scheduler.add_model("m", QueueLimits(requests=1000))
        self.client = FakeClient(1, window)
        self.names = [f"m:{n + 1}" for n in range(workers)]
        self.workers: dict[str, FakeWorker] = {}
        self.batch_size = batch_size
        self.generation, self.now = 0, 0.0
        self.events: Counter[Key] = Counter()
        self.deaths = self.steps = 0
        self.kills: dict[Key, int] = {}
        self.reading: dict[Key, int] = {}
        self.read: Counter[tuple[int, Key]] = Counter()
        for name in self.names:
            self.scheduler.add_worker("m", name, DOWN)
            self.scheduler.accept_new(name)
        for name in self.names:
            self.start(name)

    def start(self, name: str) -> None:
        self.generation += 1
        self.workers[name] = FakeWorker(self.generation, self.batch_size + SLACK)
        self.perform(
            self.scheduler.open(name, self.generation, self.batch_size + SLACK, self.now, batch_size=self.batch_size)
        )

    def ask(self, *requests: int, prefix: str = "prompt", **route: object) -> None:
        for request in requests:
            body = f"{prefix} {request}".encode()
            given = {"affinity": str(request), **route}  # without it, all would go to one worker
            self.perform(self.scheduler.submit(1, Generate(request, "m", given, body), self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ToClient):
                self.client.take(effect.frame)
            elif isinstance(effect, ToWorker):
                self.workers[effect.worker].inbox.append(effect.frame)

    @property
    def ended(self) -> dict[Key, str]:
        """Return how each finished request ended."""
        return {(1, request): heard.end for request, heard in self.client.heard.items() if heard.ends}

    def step(self, name: str = "m:1") -> None:
        """Run one step of a worker. A worker that dies is replaced at once."""
        worker = self.workers[name]
        self.steps += 1
        self.now += 0.01
        while worker.inbox:
            worker.read()
        computed = list(worker.jobs)[: self.batch_size]
        for key in computed:
            self.read[worker.generation, key] += 1
        answering = [key for key in computed if self.read[worker.generation, key] >= self.reading.get(key, 1)]
        if any(worker.jobs[key].seq == self.kills.get(key) for key in answering):
            self.die(name)
            return
        for key in answering:
            self.events[key] += 1
            worker.say(*key, EventFlag.FINISHED if self.events[key] == TOKENS else 0, tokens=1)
        worker.flush()
        while worker.outbox:
            frame = worker.outbox.popleft()
            message = decode(frame, WORKER_TO_SUPERVISOR)
            assert isinstance(message, Events)
            self.perform(self.scheduler.events(name, frame, message, self.now))

    def die(self, name: str = "m:1", *, struck: bool = True) -> None:
        self.deaths += struck
        del self.workers[name]
        self.perform(self.scheduler.worker_gone(name, GONE, self.now, struck=struck))
        self.start(name)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            for name in self.names:
                self.step(name)

    def run_until_all_ended(self, within: int = 10_000) -> None:
        for _ in range(within):
            if not any(self.scheduler.counts("m")):
                return
            self.run(1)
        raise AssertionError(f"not within {within} steps: {self.scheduler.counts('m')} are left")

    def steps_until_all_have_more(self, keys: list[Key], within: int) -> int:
        """Return the number of steps until each of these requests has another event."""
        before = dict(self.events)
        for step in range(within):
            if all(self.events[key] > before.get(key, 0) for key in keys):
                return step
            self.run(1)
        waiting = [key for key in keys if self.events[key] <= before.get(key, 0)]
        raise AssertionError(f"{len(waiting)} of {len(keys)} have got nothing for {within} steps")

    def strikes(self, request: int, prefix: str = "prompt") -> int:
        suspicion = self.scheduler._poison.find("m", f"{prefix} {request}".encode(), self.now)
        return suspicion.strikes if suspicion else 0

    def on_probation(self, name: str = "m:1") -> list[Key]:
        worker_slot = self.scheduler._table.slot_of(name)
        return [key for key, request in worker_slot.running.items() if request.on_probation]


def full(workers: int = 1, **settings: int) -> tuple[Box, list[Key]]:
    """Return a box with requests of ten events each in all slots of all workers."""
    box = Box(workers, **settings)
    numbers = range(1, workers * box.batch_size + 1)
    box.ask(*numbers)
    box.run(10)
    assert set(box.events.values()) == {10}
    return box, [(1, number) for number in numbers]


def test_after_a_death_no_stream_waits_for_the_answers_of_others() -> None:
    """All stream again after a few steps per group of suspects. Trying them one by one would take 3,500 steps."""
    box, keys = full()
    box.die()
    rounds = -(-SLOTS // isqrt(SLOTS))
    assert box.steps_until_all_have_more(keys, TOKENS) <= rounds * (PROBATION + 1)
    box.run_until_all_ended()
    assert set(box.ended.values()) == {"worker's own"}


def test_only_a_few_are_on_probation_at_once() -> None:
    box, _ = full()
    box.die()
    most = 0
    for _ in range(60):
        box.run(1)
        most = max(most, len(box.on_probation()))
    assert most == isqrt(SLOTS)
    assert not box.on_probation()


@pytest.mark.parametrize("resume", [True, False], ids=["resumed", "sent again by its client"])
@pytest.mark.parametrize("place", [0, 1, 50])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_request_that_kills_every_worker_is_found_by_its_third_death(place: int, resume: bool, workers: int) -> None:
    box, keys = full(workers)
    # one request for each slot, the poisonous one among them
    leaving = keys.pop()
    box.perform(box.scheduler.cancel(*leaving, box.now))
    box.run(1)
    attempt = POISON[1]
    box.ask(attempt, prefix="poison", resume=resume)
    for _ in range(10_000):
        box.kills[1, attempt] = place
        if not any(box.scheduler.counts("m")):
            break
        box.run(1)
        if box.ended.get((1, attempt)) == "worker_died":
            attempt += 1  # with the same payload, as ``ask`` shows
            box.perform(box.scheduler.submit(1, Generate(attempt, "m", {"resume": False}, b"poison 1000"), box.now))
    assert box.deaths <= 3
    if resume:
        assert box.ended[POISON] == "poisoned"
    else:
        assert attempt in box.client.refused or box.ended[1, attempt] == "poisoned"
    assert {box.ended[key] for key in keys} == {"worker's own"}, "the innocent are answered"
    assert max(box.events[key] for key in keys) == TOKENS


@pytest.mark.parametrize("steps", range(0, 60, 3))
def test_an_innocent_request_that_is_unlucky_once_is_not_refused(steps: int) -> None:
    """An operator kills the worker, and kills the next one a moment later."""
    box, keys = full()
    box.die()
    box.run(steps)
    box.die()
    box.run_until_all_ended()
    assert {box.ended[key] for key in keys} == {"worker's own"}


def test_a_worker_that_dies_whatever_it_computes_does_not_poison_what_was_not_tried_alone() -> None:
    """The cause may be the GPU. Until the model is given up, each death strikes a few requests."""
    box, keys = full()
    for _ in range(5):
        box.die()
        box.run(2)
    assert not box.ended
    assert sum(box.strikes(number) for _, number in keys) == 4 * isqrt(SLOTS)


def test_a_suspect_with_one_strike_left_is_tried_alone_and_after_the_others() -> None:
    box, keys = full()
    box.die()
    box.run(1)
    struck = box.on_probation()
    assert len(struck) == isqrt(SLOTS)
    box.die()
    seen: list[Key] = []
    for _ in range(200):
        box.run(1)
        tried = box.on_probation()
        alone = [key for key in tried if key in struck]
        assert not alone or len(tried) == 1
        if alone:
            assert all(box.events[key] > 12 for key in keys if key not in struck), "others wait for a suspect"
            seen += [key for key in alone if key not in seen]
    assert seen == sorted(struck)
    box.run_until_all_ended()
    assert set(box.ended.values()) == {"worker's own"}


def test_the_only_request_that_was_computed_is_blamed_at_once() -> None:
    box = Box()
    box.ask(1)
    box.kills[1, 1] = 5
    box.run_until_all_ended()
    assert (box.deaths, box.ended[1, 1]) == (2, "poisoned")


def test_a_death_that_makes_a_request_poisoned_is_known_as_such() -> None:
    box = Box()
    box.ask(1)
    box.run(1)
    assert not box.scheduler.finds_culprit("m:1", box.now), "the first one"
    box.die()
    box.run(1)
    assert box.scheduler.finds_culprit("m:1", box.now)
    box.ask(2)
    box.run(PROBATION)
    assert not box.scheduler.finds_culprit("m:1", box.now), "another request may be the reason"


def test_new_requests_are_served_while_suspects_are_tried_and_are_not_struck() -> None:
    box, keys = full(batch_size=16)
    for key in keys[8:]:
        box.perform(box.scheduler.cancel(*key, box.now))
    box.run(1)
    box.die()  # 8 suspects, tried 2 at a time
    box.ask(101, 102)
    box.run(1)
    assert box.events[1, 101] == box.events[1, 102] == 1, "there is room for all"
    assert box.on_probation()
    box.die()
    assert box.strikes(101) == box.strikes(102) == 0
    box.run_until_all_ended()
    assert {box.ended[key] for key in [*keys[:8], (1, 101), (1, 102)]} == {"worker's own"}


def test_new_requests_do_not_take_the_room_that_suspects_need() -> None:
    box, keys = full()
    box.ask(*range(201, 260))
    box.run(1)
    box.die()
    assert box.steps_until_all_have_more(keys, TOKENS) < 60
    assert not box.events[1, 201]


def test_a_new_request_that_kills_while_suspects_are_tried_is_found() -> None:
    box, keys = full(batch_size=16)
    for key in keys[8:]:
        box.perform(box.scheduler.cancel(*key, box.now))
    box.run(1)
    box.die()
    box.ask(POISON[1])
    box.kills[POISON] = 0
    box.run_until_all_ended()
    assert box.ended[POISON] == "poisoned"
    assert box.deaths == 4, "the one that was nobody's fault, and three of its own"
    assert {box.ended[key] for key in keys[:8]} == {"worker's own"}


def test_a_long_prompt_delays_nobody_but_itself() -> None:
    box = Box()
    long = [(1, number) for number in range(1, 8)]  # more than can be on probation at once
    short = [(1, number) for number in range(8, SLOTS + 1)]
    box.ask(*(number for _, number in long), prefix="x" * 5000)
    box.ask(*(number for _, number in short))
    box.run(10)
    box.reading = dict.fromkeys(long, 5000)
    box.die()
    assert box.steps_until_all_have_more(short, TOKENS) < 60
    box.run(60)
    assert set(box.on_probation()) <= set(long), "they are being read"
    assert len(box.on_probation()) == isqrt(SLOTS)


def test_while_the_prompt_of_a_suspect_with_one_strike_left_is_read_only_new_requests_wait() -> None:
    box, keys = full(batch_size=8)
    for key in keys[6:]:
        box.perform(box.scheduler.cancel(*key, box.now))
    box.run(1)
    box.die()
    box.run(1)
    guilty, *_ = box.on_probation()
    box.die()
    box.reading = {guilty: 50}
    box.run(40)
    assert box.on_probation() == [guilty]
    assert all(box.events[key] > 12 for key in keys[:6] if key != guilty and not box.strikes(key[1]))
    box.ask(100)
    box.run(1)
    assert not box.events[1, 100]
    box.run(40)
    assert box.events[1, 100]


def test_one_worker_is_kept_for_a_suspect_that_must_be_alone_and_the_others_take_new_requests() -> None:
    box = Box(2, batch_size=4)
    box.ask(1)
    (name,) = [name for name in box.names if box.scheduler.work(name)[0]]
    box.run(1)
    box.reading = {(1, number): 10 for number in (11, 12)}
    box.ask(11, 12)  # one request on each worker
    box.run(1)
    box.perform(box.scheduler.cancel(1, 11, box.now))
    box.perform(box.scheduler.cancel(1, 12, box.now))
    box.run(1)
    box.die(name)  # request 1 is to blame
    assert box.strikes(1) == 1
    box.run(1)
    assert box.on_probation(box.names[0]) + box.on_probation(box.names[1]) == [(1, 1)], "it found a worker for itself"
    tried = next(name for name in box.names if box.on_probation(name))
    box.ask(21, 22)
    box.run(1)
    other = next(name for name in box.names if name != tried)
    assert box.scheduler.work(other)[0] == 2, "the other worker has both"
    box.run(2 * PROBATION)
    box.ask(31, 32, 33)
    assert box.scheduler.work(tried)[0] > 1, "and after its probation, that one has others, too"


def test_nothing_else_is_given_to_a_worker_that_tries_a_suspect_alone() -> None:
    box = Box()
    box.ask(1)
    box.run(1)
    box.reading = {(1, 1): 20}
    box.die()
    box.ask(2)
    box.run(20)
    assert (box.events[1, 1], box.events[1, 2]) == (2, 0)
    box.run(PROBATION)
    assert box.events[1, 2], "it has passed"


def test_a_suspect_that_must_be_alone_comes_to_a_worker_although_new_requests_keep_coming() -> None:
    box = Box(batch_size=64)
    box.ask(1)
    box.run(1)
    box.die()
    box.perform(box.scheduler.cancel(1, 1, box.now))  # the tracker still remembers its payload
    box.run(1)
    box.ask(11, 12)
    box.run(1)
    again = 2
    box.perform(box.scheduler.submit(1, Generate(again, "m", {}, b"prompt 1"), box.now))
    for number in range(100, 130):
        box.ask(number)
        box.run(1)
        if box.events[1, again]:
            break
    assert box.events[1, again], "newcomers kept it out"
    assert box.on_probation() == [(1, again)]


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_a_suspect_that_is_given_up_makes_room_for_the_next(how: str) -> None:
    box, _ = full()
    box.die()
    box.run(1)
    first = box.on_probation()
    for key in first:
        if how == "cancel":
            box.perform(box.scheduler.cancel(*key, box.now))
        else:
            box.perform(box.scheduler.reject(99, GONE, box.now))
            box.perform(box.scheduler._table.give_up(box.scheduler._table.live[key], GONE, box.now))
    box.run(2)
    assert len(box.on_probation()) == isqrt(SLOTS)
    assert not set(box.on_probation()) & set(first)


def test_one_that_is_given_up_on_probation_is_blamed_all_the_same() -> None:
    box, _ = full()
    box.die()
    box.run(1)
    key, *_ = box.on_probation()
    box.perform(box.scheduler.cancel(*key, box.now))
    box.die()
    assert box.strikes(key[1]) == 1


def test_a_suspect_that_ends_on_probation_makes_room_for_the_next() -> None:
    box, keys = full()
    box.run(TOKENS - 11)
    box.die()  # each request lacks one event
    box.run_until_all_ended(within=20)
    assert {box.ended[key] for key in keys} == {"worker's own"}


def test_a_stream_whose_client_reads_nothing_passes_all_the_same() -> None:
    box, keys = full(window=12)
    box.die()
    assert box.steps_until_all_have_more(keys, TOKENS) < 60
    box.run(10)
    assert not box.on_probation()


def test_a_worker_that_was_ended_by_order_makes_no_suspects() -> None:
    box, keys = full()
    box.die(struck=False)
    assert box.steps_until_all_have_more(keys, TOKENS) <= 1, "all at once"
    assert not box.on_probation()


def test_suspects_stay_suspects_when_their_worker_is_ended_by_order() -> None:
    box, _ = full()
    box.die()
    box.run(1)
    tried = box.on_probation()
    box.die(struck=False)
    seen: set[Key] = set()
    for _ in range(60):
        box.run(1)
        seen |= set(box.on_probation())
    assert seen >= set(tried)


def test_each_of_several_workers_tries_suspects() -> None:
    box, keys = full(2, batch_size=16)
    own = list(box.scheduler._table.slot_of("m:1").running)
    for key in keys:
        if key not in own:
            box.perform(box.scheduler.cancel(*key, box.now))
    box.run(1)
    box.die("m:1")
    box.run(1)
    assert len(box.on_probation("m:1")) == len(box.on_probation("m:2")) == isqrt(len(own))


def test_a_request_that_waits_in_the_worker_is_not_on_probation() -> None:
    """Requests beyond the slots wait in the supervisor, since in the worker they would be blamed for other requests."""
    box, _ = full()
    box.ask(101, 102)
    box.die()
    for _ in range(60):
        box.run(1)
        assert len(box.scheduler._table.slot_of("m:1").running) <= SLOTS
    assert not box.on_probation()
    box.run_until_all_ended()
    assert len(box.ended) == SLOTS + 2


def test_with_a_limit_of_one_each_suspect_is_tried_alone() -> None:
    box, keys = full(batch_size=8, limit=1)
    box.die()
    for _ in range(100):
        box.run(1)
        assert len(box.on_probation()) <= 1
    assert all(box.events[key] > 12 for key in keys)
    box.run_until_all_ended()
    assert set(box.ended.values()) == {"worker's own"}


def test_the_last_strike_is_not_for_one_of_several() -> None:
    """A reload lowers the limit while suspects are tried together. Each of them lacks one strike to the new limit."""
    box, _ = full(limit=3)
    box.die()
    box.run(1)
    struck = box.on_probation()
    box.die()
    for _ in range(60):
        box.run(1)
        if set(struck) & set(box.on_probation()):
            break
    tried = box.on_probation()
    assert len(tried) > 1
    box.scheduler.set_policies(SendBufferLimits(), PoisonPolicy(limit=2))
    box.die()
    assert not box.ended
    assert {box.strikes(number) for _, number in set(tried) & set(struck)} == {1}


def test_a_death_while_another_request_is_new_makes_nobody_poisoned() -> None:
    """A repeated request has not reached the point of the death yet, and is not kept alone until then."""
    box = Box()
    box.kills = {(1, 1): 50, (1, 2): 50}
    body = b"kills at its fiftieth event"
    box.perform(box.scheduler.submit(1, Generate(1, "m", {"resume": False}, body), box.now))
    box.run(51)
    assert (box.deaths, box.ended[1, 1]) == (1, "worker_died")
    box.perform(box.scheduler.submit(1, Generate(2, "m", {}, body), box.now))
    box.run(2 * PROBATION)
    assert not box.on_probation()
    box.reading = {(1, 3): 200}
    box.ask(3)
    while box.deaths < 2:
        box.run(1)
    assert not box.ended.get((1, 2)), "the request that was being read may have been the reason"
    box.reading = {}
    box.run_until_all_ended()
    assert (box.ended[1, 2], box.ended[1, 3]) == ("poisoned", "worker's own")


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_the_limit_is_of_deaths_that_are_blamed_on_a_request(limit: int) -> None:
    box, keys = full(limit=limit)
    box.kills[keys[3]] = 30
    box.run_until_all_ended()
    assert box.ended[keys[3]] == "poisoned"
    assert box.deaths == limit + 1, "the first one makes it a suspect"
    assert {box.ended[key] for key in keys if key != keys[3]} == {"worker's own"}


def test_a_request_that_could_not_be_sent_is_not_blamed() -> None:
    """The connection of a dead worker ends before the supervisor learns of the death, most of all over a network."""
    box = Box()
    box.ask(1)
    for _ in range(3):
        box.scheduler.not_sent("m:1", (1, 1))
        box.die()
    assert box.strikes(1) == 0
    box.run_until_all_ended()
    assert box.ended == {(1, 1): "worker's own"}


def test_the_culprit_is_blamed_although_another_request_could_not_be_sent() -> None:
    box = Box()
    box.kills[POISON] = 0
    box.ask(POISON[1], 1)
    for _ in range(3):
        box.scheduler.not_sent("m:1", (1, 1))
        box.step()
    assert box.ended[POISON] == "poisoned"
    box.run_until_all_ended()
    assert box.ended[1, 1] == "worker's own"
