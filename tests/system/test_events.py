"""The verb ``events`` returns the history of a running supervisor's workers."""

from typing import Any

import pytest

from protocol.errors import WireError
from tests.conftest import Serve
from tests.nvml_box import GIB, Box
from tests.serving import Serving, engine, wait_until


def events(serving: Serving, **params: Any) -> list[dict[str, Any]]:
    with serving.client() as client:
        found: list[dict[str, Any]] = client.call("events", **params)["events"]
        return found


def of_kind(serving: Serving, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(serving, limit=512) if event["kind"] == kind]


def steps(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(event["state"], event["reason"]) for event in found if event["kind"] == "state"]


def test_the_life_of_a_worker(serve: Serve) -> None:
    serving = serve({"a": engine()})
    with serving.client() as client:
        first = client.call("events")
        assert first["events"][0]["kind"] == "supervisor"
        assert [state for state, _ in steps(first["events"])] == ["starting", "loading", "ready"]
        assert first["last"] == first["newest"] == len(first["events"])
        assert first["session"] == serving.overview()["supervisor"]["session"] == client.server["session"]
        serving.worker("a").kill()
        wait_until(lambda: serving.status("a")["generation"] == 2 and serving.status("a")["state"] == "ready")
        second = client.call("events", after=first["last"])
        assert not second["dropped"]
        (death,) = [event for event in second["events"] if event["kind"] == "death"]
        assert death["level"] == "warning"
        assert (death["model"], death["worker"]) == ("a", "a")
        assert "next try in" in death["message"]
        assert [state for state, _ in steps(second["events"])] == ["backoff", "starting", "loading", "ready"]
        serving.order("stop", model="a")
        serving.wait_state("a", "stopped")
        third = client.call("events", after=second["last"])["events"]
        assert [state for state, _ in steps(third)] == ["draining", "stopping", "stopped"]
        assert steps(third)[0][1] == "stop ordered"
        numbers = [event["number"] for event in first["events"] + second["events"] + third]
        assert numbers == [*range(1, len(numbers) + 1)]
        log = serving.log()
        assert [event["message"] for event in third if event["message"] not in log] == []


def test_reloads(serve: Serve) -> None:
    serving = serve({"a": engine()})
    serving.write_models({"a": engine() | {"no such key": 1}})
    with pytest.raises(WireError, match="nothing is changed"):
        serving.order("reload")
    assert "nothing is changed" in of_kind(serving, "reload")[-1]["message"]
    serving.write_models({"a": engine(), "c": engine(autostart=False)})
    serving.order("reload")
    wait_until(lambda: len(of_kind(serving, "reload")) >= 2)
    assert "c added" in of_kind(serving, "reload")[1]["message"]


def test_room_for_models(serve: Serve, box: Box) -> None:
    box.becomes([40])
    large = {"gpu": 0, "vram": "30GiB", "autostart": False, "load_s": 0.5}
    serving = serve({name: engine("SlowLoad", **large, lazy=name == "idle") for name in ("idle", "a", "b")})

    def start(model: str) -> int:
        serving.order("start", model=model)
        pid: int = wait_until(lambda: serving.status(model)["pid"])
        box.holds(0, pid, 30 * GIB)
        serving.wait_state(model, "ready")
        return pid

    first = start("idle")
    serving.order("start", model="a")
    serving.wait_state("idle", "unloaded")
    box.gives_back(first)
    start("a")
    (eviction,) = of_kind(serving, "eviction")
    assert eviction["model"] == "a"
    assert eviction["message"].endswith("unloading idle")
    serving.order("start", model="b")
    serving.wait_state("b", "failed")
    (refusal,) = of_kind(serving, "refusal")
    assert (refusal["model"], refusal["level"]) == ("b", "warning")
    assert "needs 30.0 GiB" in refusal["message"]
    assert [event["model"] for event in of_kind(serving, "placement")] == ["idle", "a"]


def test_parameters_are_checked(serve: Serve) -> None:
    serving = serve({"a": engine(autostart=False)})
    for params, message in (
        ({"after": -1}, "after is -1"),
        ({"after": 2**64 - 1, "limit": 513}, "limit is 513: must be from 1 to 512"),
        ({"limit": 0}, "limit is 0"),
        ({"after": 1.0}, "after must be an integer"),
        ({"after": None}, "after must be an integer"),
        ({"since": 1}, "unknown parameter 'since'"),
    ):
        with pytest.raises(WireError, match=message):
            events(serving, **params)
    assert events(serving, after=2**64 - 1) == []
