"""The verb ``logs`` lets operators read logs from another machine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from tests.keyed import Keyed
from tests.serving import engine, wait_until


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    models = {"a": engine(), "two": engine(replicas=2), "never": engine(autostart=False)}
    with Keyed(models, {"boss": "admin", "viewer": "infer,status"}) as keyed:
        yield keyed


def logs(keyed: Keyed, **params: Any) -> dict[str, Any]:
    with keyed.client("boss") as boss:
        result: dict[str, Any] = boss.call("logs", **params)
        return result


def test_the_log_of_the_supervisor_and_of_a_worker(keyed: Keyed) -> None:
    own = logs(keyed, lines=1000)
    assert own["lines"]
    assert own["lines"] == keyed.serving.log().splitlines()[: len(own["lines"])], "more may be written meanwhile"
    assert logs(keyed, model="supervisor", lines=1000)["lines"][: len(own["lines"])] == own["lines"]
    worker = logs(keyed, model="a", lines=1)
    (line,) = worker["lines"]
    assert "a: loading -> ready" in line
    assert logs(keyed, model="a", after=worker["position"])["lines"] == []
    keyed.serving.worker("a").kill()
    wait_until(lambda: keyed.serving.status("a")["generation"] == 2 and keyed.serving.status("a")["state"] == "ready")
    new = logs(keyed, model="a", after=worker["position"])["lines"]
    assert "ready -> backoff" in new[1]
    assert "loading -> ready" in new[-1]


def test_each_worker_of_a_model_has_its_log(keyed: Keyed) -> None:
    assert logs(keyed, model="two") == logs(keyed, model="two:1")
    assert any("two:2: spawned" in line for line in logs(keyed, model="two:2")["lines"])


def test_a_log_that_is_not_there_is_empty(keyed: Keyed) -> None:
    assert logs(keyed, model="gateway")["lines"] == []
    assert logs(keyed, model="never")["lines"] == []


@pytest.mark.parametrize(
    "name",
    ["../run/logs/a", "a.log", "/etc/passwd", "a\0", "a/../a", "..", "", "a" * 5000, "server.json", "a~1", "two:3"],
)
def test_a_name_never_becomes_a_path(keyed: Keyed, name: str) -> None:
    with pytest.raises(WireError, match=r"no model .* is configured") as caught:
        logs(keyed, model=name)
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lines": 0}, "lines is 0: must be from 1 to 1000"),
        ({"lines": 1001}, "lines is 1001"),
        ({"lines": 2**64 - 1}, "lines is 1844"),
        ({"after": 5}, "after must be a string"),
        ({"after": "x" * 5000}, "after must be a position"),
        ({"model": ["a"]}, "model must be a string"),
        ({"since": "1h"}, "since must be a number"),
        ({"since": 1, "after": "0-0"}, "since are two places to begin at"),
        ({"path": "/etc/passwd"}, "unknown parameter 'path'"),
    ],
)
def test_parameters_are_checked(keyed: Keyed, params: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        logs(keyed, **params)
    assert len(caught.value.message) < 200


def test_logs_take_the_right_admin(keyed: Keyed) -> None:
    with keyed.client("viewer") as viewer, pytest.raises(WireError, match="takes the right admin") as caught:
        viewer.call("logs")
    assert caught.value.code is ErrorCode.FORBIDDEN


def test_a_key_for_some_models_reads_their_logs_only(keyed: Keyed) -> None:
    keyed.new("some", "admin", models=("tw*", "supervisor", "gateway"))
    wait_until(lambda: len(keyed.tcp()["keys"]) == 3, what="the new key on the list")
    with keyed.client("some") as some:
        assert some.call("logs", model="two")["lines"]
        for params in ({}, {"model": "a"}, {"model": "supervisor"}, {"model": "gateway"}):
            with pytest.raises(WireError) as caught:
                some.call("logs", **params)
            assert caught.value.code is ErrorCode.FORBIDDEN


def test_a_log_in_whose_place_something_else_stands_stops_nobody(keyed: Keyed) -> None:
    path = Path(keyed.serving.status("never")["log"])
    path.symlink_to("/dev/zero")
    with pytest.raises(WireError, match="it is no regular file"):
        logs(keyed, model="never")
    with keyed.client("viewer") as viewer:
        assert viewer.complete("a", "p", max_tokens=3).finish_reason == "length"
