"""Random faults at random times: every request ends once, with its own tokens, and everything comes back.

A failure prints the seed; TEST_SEED repeats its choices (the times at which they meet the processes vary).
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from protocol.messages import Cancel
from tests.deterministic_engine import answer
from tests.raw_client import Heard, RawClient
from tests.serving import Serving, engine, wait_until

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
SECONDS = float(os.environ.get("CHAOS_SECONDS", 6))
STREAMS = 16
FAULTS = ("kill", "raise", "restart", "stop now", "drain", "cancel", "leave", "kill the guard", "nothing")
WORKERS = ("a:1", "a:2", "b")
ALLOWED_ENDS = {
    "stop now": {"draining", "model_not_running"},
    "drain": {"draining", "model_not_running"},
    "cancel": {"cancelled"},
}
"""Of a model's only worker. A death ends nothing, and what happens to one of two workers neither."""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    model = engine("RaisesAtToken", step_s=0.001, max_batch_size=5, context=10_000)
    models = {"a": model | {"replicas": 2}, "b": model}
    with Serving(models, restart={"limit": 1000, "initial": "10ms"}) as serving:
        yield serving


def inflict(serving: Serving, fault: str, worker: str, client: RawClient, chance: random.Random) -> None:
    match fault:
        case "kill":
            os.kill(serving.status(worker)["pid"], signal.SIGKILL)
        case "raise":
            client.generate(999, worker[0], f"bad {chance.random()}", max_tokens=100)
        case "restart":
            serving.order("restart", model=worker)
        case "stop now" | "drain":
            serving.order("stop", model=worker, now=fault == "stop now")
        case "cancel":
            for request in chance.sample(range(1, STREAMS + 1), 5):
                client.send(Cancel(request))
        case "kill the guard":
            wait_until(serving.guard).kill()


def check(request: int, heard: Heard, prompt: str, tokens: int, allowed: set[str]) -> str:
    assert len(heard.ends) == 1, (request, heard.ends)
    assert not heard.after_end
    assert heard.seqs == list(range(len(heard.seqs)))
    assert heard.text == answer(prompt, heard.tokens)
    if heard.error:
        assert heard.delivered == heard.tokens
    (end,) = heard.ends
    assert end in allowed | {"length"}, (request, end, allowed)
    assert (heard.tokens == tokens) == (end == "length") or end == "cancelled"
    return end


def test_every_request_ends_once_with_its_own_tokens(serving: Serving) -> None:
    print(f"TEST_SEED={SEED}")
    chance = random.Random(SEED)
    seen: Counter[str] = Counter()
    deadline = time.monotonic() + SECONDS
    episode = 0
    while time.monotonic() < deadline:
        episode += 1
        fault, victim = chance.choice(FAULTS), chance.choice(WORKERS)
        orders = {
            request: (chance.choice("ab"), f"{episode} asks {request}", chance.randrange(1, 250))
            for request in range(1, STREAMS + 1)
        }
        with RawClient(serving.runtime_dir) as client:
            for request, (model, prompt, tokens) in orders.items():
                client.generate(request, model, prompt, max_tokens=tokens)
            for _ in range(chance.randrange(60)):
                client.receive()
            inflict(serving, fault, victim, client, chance)
            if fault != "leave":
                client.read_until_ended(*orders, *([999] if fault == "raise" else []))
                assert fault != "raise" or client.heard[999].ends == ["poisoned"]
                for request, (model, prompt, tokens) in orders.items():
                    hit = model == victim or fault == "cancel"
                    allowed = ALLOWED_ENDS.get(fault, set()) if hit else set()
                    seen[check(request, client.heard[request], prompt, tokens, allowed)] += 1
        seen[fault] += 1
        if fault in ("stop now", "drain"):
            serving.order("start", model=victim)
        for worker in WORKERS:
            serving.wait_state(worker, "ready")
            serving.wait_idle(worker)
    print(f"{episode} episodes: {dict(seen)}")
    assert episode > 3
