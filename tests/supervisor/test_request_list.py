"""The list of unfinished requests shows every state, and every request in it can be cancelled."""

from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from protocol.messages import CancelJob, Events, Generate
from protocol.verbs import Right
from supervisor.keys.rights import NOBODY, OWNER, Identity
from supervisor.requests.credit import SendBufferLimits
from supervisor.requests.queue import QueueLimits
from supervisor.requests.scheduler import MOST, Scheduler
from supervisor.requests.stories import KEPT, RequestRecord, Stories
from tests.supervisor.test_scheduler import DOWN, FINISHED, NOW, deliver, frame, messages
from tests.supervisor.test_turns import reports

ADMIN = Identity("ops", "key of ops", frozenset({Right.ADMIN}))
STATUS = Identity("viewer", "key of viewer", frozenset({Right.STATUS}))
USER = Identity("user", "key of user", frozenset({Right.INFER}))


@pytest.fixture
def scheduler() -> Scheduler:
    """Return a scheduler with model ``m``, a worker of generation 1 with two jobs, and a window of four events."""
    made = Scheduler(window=4)
    made.add_model("m", QueueLimits(1000, 1_000_000))
    made.add_worker("m", "m", DOWN)
    made.accept_new("m")
    made.open("m", 1, 2, NOW)
    return made


def ask(scheduler: Scheduler, request: int, owner: Identity = USER, **route: Any) -> None:
    scheduler.submit(5, Generate(request, "m", route, b"x" * 400), NOW, owner=owner)


def listed(scheduler: Scheduler, identity: Identity = ADMIN, limit: int = MOST) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = scheduler.unfinished.describe(identity, limit, str.upper, NOW + 1.5)["requests"]
    return found


def states(scheduler: Scheduler) -> dict[str, str]:
    return {request["id"]: request["state"] for request in listed(scheduler)}


def test_every_state_is_shown(scheduler: Scheduler) -> None:
    for request in range(1, 6):
        ask(scheduler, request)
    scheduler.parked("m", (5, 1), NOW)
    scheduler.cancel(5, 2, NOW)
    for seq in range(5):
        deliver(scheduler, frame(5, (3, seq, FINISHED if seq == 4 else 0)))
    expected = {"5-1": "parked", "5-2": "cancelling", "5-4": "running", "5-5": "queued"}
    assert states(scheduler) == expected, "the end of request 3 needs no credit"


def test_what_is_shown_of_a_request(scheduler: Scheduler) -> None:
    ask(scheduler, 7, priority="batch")
    scheduler.prefill("m", (5, 7), 10, 99)
    deliver(scheduler, frame(5, (7, 0, 0)))
    ask(scheduler, 8, resume=False)
    deliver(scheduler, frame(5, (8, 0, 0), (8, 1, 0)))
    assert listed(scheduler)[1]["tokens"] == 2
    assert listed(scheduler, limit=1) == [
        {
            "id": "5-7", "model": "m", "worker": "M", "key": "user", "state": "running", "queue_position": None,
            "age_ms": 1500, "prompt_tokens": 99, "prompt_tokens_estimate": 101, "tokens": 1, "priority": "batch",
        }
    ]  # fmt: skip


def test_the_end_that_waits_for_credit_is_shown_as_delivering(scheduler: Scheduler) -> None:
    ask(scheduler, 1)
    for seq in range(6):
        deliver(scheduler, frame(5, (1, seq, FINISHED if seq == 5 else 0)))
    assert states(scheduler) == {"5-1": "delivering"}
    effects = messages(scheduler.cancel(5, 1, NOW))
    assert [type(message) for _, message in effects] == [Events], "what is held, with the end that the worker sent"
    assert states(scheduler) == {}


def test_a_parked_request_is_cancelled(scheduler: Scheduler) -> None:
    ask(scheduler, 1)
    scheduler.parked("m", (5, 1), NOW)
    (request,) = scheduler.unfinished.find(ADMIN, "5-1")
    effects = messages(scheduler.cancel(*request.key, NOW))
    assert [type(message) for _, message in effects] == [CancelJob, Events]
    assert listed(scheduler) == []


def test_what_waits_in_a_worker_is_queued(scheduler: Scheduler) -> None:
    """The worker computes two requests at once, and was given two more."""
    scheduler.open("m", 1, 4, NOW, batch_size=2)
    for request in range(1, 6):
        ask(scheduler, request, progress=request in (4, 5))

    def seen() -> list[tuple[str, int | None, str | None]]:
        return [(r["state"], r["queue_position"], r["worker"]) for r in listed(scheduler)]

    running = ("running", None, "M")
    assert seen() == [running, running, ("queued", 0, "M"), ("queued", 1, "M"), ("queued", 2, None)]
    assert (scheduler.computed("m"), scheduler.queued("m"), scheduler.counts("m")) == (2, 3, (4, 1))
    assert scheduler.figures("m", NOW + 7)["oldest_waiting_s"] == 7
    deliver(scheduler, frame(5, (3, 0, 0)))
    assert seen()[1:4] == [("queued", 0, "M"), running, ("queued", 1, "M")], "the engine began the third first"
    deliver(scheduler, frame(5, (1, 0, FINISHED)))
    assert seen() == [running, running, ("queued", 0, "M"), ("queued", 1, "M")]
    assert [body["queue_position"] for body in reports(scheduler)] == [0, 1]
    deliver(scheduler, frame(5, (3, 1, FINISHED)))
    assert seen() == [running, running, ("queued", 0, "M")]


def test_a_limit_of_the_wait_holds_in_the_worker_too(scheduler: Scheduler) -> None:
    scheduler.open("m", 1, 2, NOW, batch_size=1)
    for request in (1, 2):
        ask(scheduler, request, queue_ms=50)
    scheduler.expire(NOW + 1)
    assert states(scheduler) == {"5-1": "running"}


def test_places_in_the_queue_follow_cancels(scheduler: Scheduler) -> None:
    for request in range(1, 8):
        ask(scheduler, request)
    scheduler.cancel(5, 4, NOW)
    assert [(r["id"], r["queue_position"]) for r in listed(scheduler)[2:]] == [
        ("5-3", 0), ("5-5", 1), ("5-6", 2), ("5-7", 3),
    ]  # fmt: skip


def test_the_list_is_bounded_and_says_how_many_there_are(scheduler: Scheduler) -> None:
    for request in range(1, 701):
        ask(scheduler, request)
    result = scheduler.unfinished.describe(ADMIN, MOST, str, NOW)
    assert [request["id"] for request in result["requests"]] == [f"5-{n}" for n in range(1, MOST + 1)]
    assert result["total"] == 700


@pytest.mark.parametrize(
    ("identity", "sees", "cancels"),
    [
        (OWNER, ["5-1", "5-2"], ["5-1", "5-2"]),
        (ADMIN, ["5-1", "5-2"], ["5-1", "5-2"]),
        (STATUS, ["5-1", "5-2"], []),
        (USER, ["5-1"], ["5-1"]),
        (NOBODY, [], []),
        (Identity("user", "another key of the same name", frozenset({Right.INFER})), [], []),
        (Identity("user", USER.key_id, frozenset({Right.INFER}), max_in_flight=3), ["5-1"], ["5-1"]),
        (Identity("some", "key of some", frozenset({Right.ADMIN}), models=("x*",)), [], []),
    ],
)
def test_rights_and_models_decide(
    scheduler: Scheduler, identity: Identity, sees: list[str], cancels: list[str]
) -> None:
    ask(scheduler, 1)
    ask(scheduler, 2, OWNER)
    assert [request["id"] for request in listed(scheduler, identity)] == sees
    for name in ("5-1", "5-2"):
        if name in cancels:
            assert [found.key for found in scheduler.unfinished.find(identity, name)] == [(5, int(name[-1]))]
            continue
        with pytest.raises(WireError) as caught:
            scheduler.unfinished.find(identity, name)
        hidden = name not in sees
        assert caught.value.code is (ErrorCode.INVALID_REQUEST if hidden else ErrorCode.FORBIDDEN)


def test_a_trace_id_means_every_unfinished_request_of_it_that_may_be_cancelled(scheduler: Scheduler) -> None:
    for request, owner in ((1, USER), (2, USER), (3, OWNER), (4, USER)):
        ask(scheduler, request, owner, trace_ids=["req_a", f"chatcmpl-{request}"])
    boss = Identity("boss", "key of boss", frozenset({Right.STATUS, Right.INFER}))

    def found(identity: Identity, name: str) -> list[str]:
        return [request.id for request in scheduler.unfinished.find(identity, name)]

    assert found(ADMIN, "req_a") == ["5-1", "5-2", "5-3", "5-4"]
    assert found(USER, "req_a") == ["5-1", "5-2", "5-4"], "those of its own key"
    assert found(USER, "chatcmpl-2") == ["5-2"]
    with pytest.raises(WireError, match="takes the right admin"):
        found(boss, "req_a")
    with pytest.raises(WireError, match="never was"):
        found(USER, "chatcmpl-3")


def ended(scheduler: Scheduler, identity: Identity = ADMIN, after: int | None = None, limit: int = 10) -> Any:
    return scheduler.ended.since(after, limit, identity, 0.0)


def numbers(result: dict[str, Any]) -> list[int]:
    return [request["number"] for request in result["requests"]]


def test_ended_requests_have_numbers_behind_which_a_follower_goes_on(scheduler: Scheduler) -> None:
    assert ended(scheduler) == {"requests": [], "last": 0, "dropped": False}
    for request in range(1, 6):
        ask(scheduler, request)
        scheduler.cancel(5, request, NOW)
        deliver(scheduler, frame(5, (request, 0, FINISHED)))
    assert [request["id"] for request in ended(scheduler)["requests"]] == ["5-1", "5-2", "5-3", "5-4", "5-5"]
    assert numbers(ended(scheduler)) == [1, 2, 3, 4, 5]
    assert numbers(ended(scheduler, limit=2)) == [4, 5], "the newest ones"
    assert (numbers(ended(scheduler, after=3)), ended(scheduler, after=3)["dropped"]) == ([4, 5], False)
    assert (numbers(ended(scheduler, after=2, limit=2)), ended(scheduler, after=2, limit=2)["dropped"]) == (
        [4, 5],
        True,
    )
    assert ended(scheduler, after=5) == {"requests": [], "last": 5, "dropped": False}
    assert ended(scheduler, after=99)["last"] == 5, "a number of a supervisor before this one"


def test_a_bounded_number_of_ended_requests_is_kept(scheduler: Scheduler) -> None:
    for request in range(1, KEPT + 8):
        ask(scheduler, request, USER if request < 20 else OWNER)
        deliver(scheduler, frame(5, (request, 0, FINISHED)))
    result = ended(scheduler, after=0, limit=10_000)
    assert numbers(result) == [*range(8, KEPT + 8)]
    assert (result["last"], result["dropped"]) == (KEPT + 7, True)
    assert numbers(ended(scheduler, USER, after=7)) == [*range(10, 20)], "those of its key, the newest ten"
    assert ended(scheduler, USER, after=9)["dropped"] is False


@pytest.mark.parametrize(
    ("identity", "sees"),
    [
        (OWNER, [1, 2]), (ADMIN, [1, 2]), (STATUS, [1, 2]), (USER, [1]), (NOBODY, []),
        (Identity("some", "key of some", frozenset({Right.ADMIN}), models=("x*",)), []),
    ],
)  # fmt: skip
def test_rights_and_models_decide_about_ended_requests_too(
    scheduler: Scheduler, identity: Identity, sees: list[int]
) -> None:
    for request, owner in ((1, USER), (2, OWNER)):
        ask(scheduler, request, owner)
        deliver(scheduler, frame(5, (request, 0, FINISHED)))
    assert numbers(ended(scheduler, identity)) == sees


def test_every_face_tells_the_same_of_a_request_that_has_ended() -> None:
    """The end is under way to a client without credit, and comes in the frame with which it holds too much."""
    records: list[RequestRecord] = []
    scheduler = Scheduler(window=2, holds=SendBufferLimits(of_stream=100), stories=Stories(records.append))
    scheduler.add_model("m", QueueLimits(1000, 1_000_000))
    scheduler.add_worker("m", "m", DOWN)
    scheduler.open("m", 1, 2, NOW)
    scheduler.accept_new("m")
    ask(scheduler, 1)
    deliver(scheduler, frame(5, *((1, seq, FINISHED if seq == 9 else 0) for seq in range(10))))
    (request,) = ended(scheduler)["requests"]
    assert (request["error"], request["tokens"]) == ("slow_consumer", 2)
    assert [record.end.error for record in records] == ["slow_consumer"]
    figures = scheduler.figures("m", NOW)
    assert (figures["errors"], figures["ends"]) == ({"slow_consumer": 1}, {})
    assert figures["keys"] == [["user", 1, 0, 2]]
    assert (scheduler.totals("m")["errors"], scheduler.totals("m")["finished"]) == (1, 0)


def test_the_supervisors_own_error_is_kept_in_words(scheduler: Scheduler) -> None:
    for request in (1, 2, 3):
        ask(scheduler, request, queue_ms=50)
    for request in (4, 5):
        ask(scheduler, request, queue_ms=50)
    scheduler.expire(NOW + 1)
    (last, *_) = ended(scheduler)["requests"]
    assert (last["error"], last["finish_reason"], last["worker"]) == ("queue_timeout", None, None)
    assert last["error_message"] == "the request waited for a worker for 50 ms, which is its queue_ms"
    assert (last["queue_ms"], last["first_token_ms"], last["total_ms"]) == (None, None, 1000.0)
