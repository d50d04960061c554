"""Of a group of models so many are loaded at once. A request makes an idle one leave, and an order does, too."""

import re
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.serving import Serving, engine, wait_until


def lazy(kind: str = "DeterministicEngine", **keys: Any) -> dict[str, Any]:
    return engine(kind, **{"lazy": True, **keys})


def group(*models: str, loaded: int = 1) -> dict[str, Any]:
    return {"coders": {"models": [*models], "loaded": loaded}}


def pids(serving: Serving) -> int:
    return sum(status["pid"] is not None for status in serving.overview()["models"])


@pytest.mark.long
def test_a_request_makes_the_idle_model_of_its_group_leave(serve: Serve) -> None:
    models = {"a": lazy(step_s=0.01), "b": lazy(), "free": lazy()}
    serving = serve(models, wait=False, groups=group("a", "b"))
    with serving.client() as client:
        assert client.complete("free", "x", max_tokens=3).text == answer("x", 3)
        busy = client.generate("a", "busy", max_tokens=200)
        serving.wait_state("a", "ready")
        waiting = client.generate("b", "waits", max_tokens=3)
        wait_until(lambda: "b: group coders has a loaded, and 1 may be at once" in serving.log(), 10, "b to wait")
        assert (serving.status("a")["state"], serving.status("b")["pid"]) == ("ready", None)
        assert busy.complete().text == answer("busy", 200), "a model that answers is not unloaded"
        assert waiting.complete().text == answer("waits", 3)
        assert serving.status("a")["reason"] == "evicted for b (group coders: 1 at once)"
        assert "evicted for b (group coders: 1 at once)" in serving.modelctl("ps").stdout
        assert "b: group coders: 1 at once: a makes room" in serving.modelctl("events").stdout
        streams = [client.generate(name, f"{name} {i}", max_tokens=3) for i in range(3) for name in "ab"]
        for stream, text in zip(streams, [f"{name} {i}" for i in range(3) for name in "ab"], strict=True):
            assert stream.complete().text == answer(text, 3)
    assert serving.status("free")["generation"] == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unloads", "sleeps"])
def test_requests_for_all_models_of_a_group_are_served_in_turns(serve: Serve, kind: str) -> None:
    """At no time more models of the group are loaded than it allows. None waits for ever."""
    keys: dict[str, Any] = {"engine": "tests.sleeping_engine:Sleeper", "model_dir": ".", "lazy": True}
    models = {name: lazy() if kind == "unloads" else dict(keys) for name in "abcd"}
    serving = serve(models, wait=False, groups={**group(*"abcd", loaded=2), "pair": {"models": ["a", "b"]}})
    with serving.client() as client:
        asked = [(name, f"{name} {turn}") for turn in range(3) for name in "abcd"]
        streams = [client.generate(name, text, max_tokens=3) for name, text in asked]
        for stream, (_, text) in zip(streams, asked, strict=True):
            assert stream.complete().text == answer(text, 3)
    moves = re.findall(r"(\w): \w+ -> (\w+) \(", serving.log())
    up: set[str] = set()
    for model, state in moves:
        up = up | {model} if state in ("loading", "ready") else up - {model} if state in ("asleep", "unloaded") else up
        assert len(up) <= 2, moves
        assert not up >= {"a", "b"}, moves
    assert ("a", "asleep" if kind == "sleeps" else "unloaded") in moves


def test_an_order_makes_a_lazy_model_leave_and_is_refused_beside_one_that_stays(serve: Serve) -> None:
    models = {"a": lazy(), "b": engine(autostart=False), "c": engine(autostart=False)}
    serving = serve(models, wait=False, groups=group("a", "b", "c"))
    with serving.client() as client:
        client.complete("a", "x", max_tokens=3)
        assert serving.modelctl("start", "b").returncode == 0
        assert serving.status("a")["state"] == "unloaded"
        done = serving.modelctl("start", "c")
        assert done.returncode != 0
        assert "group coders has b loaded, and 1 may be at once: `modelctl stop b` makes room" in done.stderr
        with pytest.raises(WireError, match="group coders has b loaded") as caught:
            client.complete("a", "x", max_tokens=3)
        assert (caught.value.code, caught.value.retry_after_ms) == (ErrorCode.MODEL_FAILED, 10_000)


def test_a_reload_changes_the_groups(serve: Serve) -> None:
    models = {name: lazy() for name in "abc"}
    serving = serve(models, wait=False)
    with serving.client() as client:
        for name in "abc":
            client.complete(name, "x", max_tokens=3)
        assert pids(serving) == 3
        serving.write_models(models, groups=group("a", "b", "c", loaded=2))
        serving.order("reload")
        wait_until(lambda: pids(serving) == 2, 30, "one to leave")
        gone = next(status for status in serving.overview()["models"] if status["pid"] is None)
        assert gone["reason"] == "evicted: group coders: 2 at once"
        assert gone["name"] == "a", "the one that was idle longest"
        assert client.complete("a", "x", max_tokens=3).text == answer("x", 3)
        assert pids(serving) == 2
    assert "applied groups" in serving.log()
