"""The history of events has numbers without gaps and a bounded memory, and states each fact once."""

import logging
from typing import Any

import pytest

from protocol.codec import pack_body
from supervisor.logs.events import FAILS, KEPT, MOST_CHARACTERS, EventHistory, EventKind, died_at, noted, shortened


def recorder(kept: int = KEPT) -> tuple[logging.Logger, EventHistory]:
    """Return a new logger and the history of its events."""
    log, history = logging.Logger("events"), EventHistory(kept)
    log.addHandler(history)
    return log, history


def everything(history: EventHistory, after: int | None = 0, limit: int = KEPT) -> dict[str, Any]:
    return history.since(after, limit, lambda model: True)


def numbers(result: dict[str, Any]) -> list[int]:
    return [event["number"] for event in result["events"]]


def test_a_record_that_is_not_noted_is_no_event() -> None:
    log, history = recorder()
    log.warning("a connection is ended")
    assert everything(history) == {"events": [], "last": 0, "newest": 0, "dropped": False}


def test_an_event_says_what_the_log_says() -> None:
    log, history = recorder()
    facts = {"before": "ready", "state": "draining", "reason": "stop ordered"}
    log.warning("%s: it is %d", "letters:2", 7, extra=noted(EventKind.STATE, "letters:2", **facts))
    log.error("all is lost", extra=noted(EventKind.VRAM))
    first, second = everything(history)["events"]
    assert first.pop("time") <= second.pop("time")
    assert first == {
        "number": 1, "kind": "state", "level": "warning", "model": "letters", "worker": "letters:2",
        "message": "letters:2: it is 7", **facts,
    }  # fmt: skip
    nobody = {"model": None, "worker": None}
    assert second == {"number": 2, "kind": "vram", "level": "error", "message": "all is lost", **nobody}


@pytest.mark.parametrize(
    ("after", "limit", "expected", "last", "dropped"),
    [
        (None, 3, [18, 19, 20], 20, False),
        (None, 100, [*range(11, 21)], 20, False),
        (0, 3, [11, 12, 13], 13, True),
        (9, 3, [11, 12, 13], 13, True),
        (10, 3, [11, 12, 13], 13, False),
        (13, 100, [*range(14, 21)], 20, False),
        (19, 1, [20], 20, False),
        (20, 1, [], 20, False),
        (2**64 - 1, 1, [], 20, False),
    ],
)
def test_a_reader_goes_on_where_it_was(
    after: int | None, limit: int, expected: list[int], last: int, dropped: bool
) -> None:
    log, history = recorder(kept=10)
    for _ in range(20):
        log.info("x", extra=noted(EventKind.KILL))
    result = everything(history, after, limit)
    assert (numbers(result), result["last"], result["newest"], result["dropped"]) == (expected, last, 20, dropped)


def test_what_a_reader_may_not_see_is_passed_over() -> None:
    log, history = recorder()
    for number in range(12):
        log.info("x", extra=noted(EventKind.KILL, "ab"[number % 2]))

    def only_b(after: int, limit: int) -> dict[str, Any]:
        return history.since(after, limit, lambda model: model == "b")

    assert numbers(only_b(0, 100)) == [2, 4, 6, 8, 10, 12]
    part = only_b(3, 2)
    assert (numbers(part), part["last"]) == ([4, 6], 6)
    rest = only_b(part["last"], 3)
    assert (numbers(rest), rest["last"]) == ([8, 10, 12], 12)


def test_a_flood_of_events_takes_bounded_memory() -> None:
    log, history = recorder()
    text = "x" * 100_000 + "\n"
    for _ in range(10 * KEPT):
        log.error("%s", text, extra=noted(EventKind.STATE, "m", reason=text))
    result = everything(history)
    assert numbers(result) == [*range(9 * KEPT + 1, 10 * KEPT + 1)]
    assert result["dropped"]
    for event in result["events"]:
        assert len(event["message"]) == len(event["reason"]) == MOST_CHARACTERS
        assert event["message"].endswith("x[...]")


@pytest.mark.parametrize(
    ("messages", "died"),
    [
        ([], None),
        (["modelctl 1, pid 7, serving"], 0),
        (["shutting down: SIGTERM", "modelctl 1, pid 7, serving", "a: stopped -> starting"], 2),
        (["modelctl 1, pid 7, serving", "shutting down now: ordered", "a: stopping -> stopped"], None),
        (["modelctl 1, pid 7, serving", f"{FAILS}"], None),
        (["a: stopped -> starting", "a: starting -> loading"], 1),  # it had more events than are read
        (["modelctl 1, pid 7, serving", "events lost here: 3", "usage: the disk is full"], 2),
    ],
)
def test_a_supervisor_that_ended_without_an_order_is_found(messages: list[str], died: int | None) -> None:
    kinds = ["state" if message.startswith("a: ") else "supervisor" for message in messages]
    earlier = [
        {"time": n, "kind": kind, "message": text} for n, (kind, text) in enumerate(zip(kinds, messages, strict=True))
    ]
    assert died_at(earlier) == died


def test_a_text_of_several_lines_becomes_one_line() -> None:
    log, history = recorder()
    log.error("one\ntwo\r\nthree\u2028four", extra=noted(EventKind.DEATH))
    assert everything(history)["events"][0]["message"] == "one two three four"


def test_a_name_of_a_file_that_is_no_text_goes_over_the_wire() -> None:
    assert pack_body({"message": shortened("/models/bad\udcff")}) == pack_body({"message": "/models/bad\\udcff"})
