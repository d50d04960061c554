"""Models that cannot be loaded together take turns, however many requests come for one of them."""

import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.client.answers import Progress
from protocol.messages import Cancel
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.gateway.running import Gateway
from tests.gateway.test_streams import post, read_until
from tests.nvml_box import Box
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until

QUICK = (
    "from modelctl import cli\nfrom supervisor.placement import eviction\n"
    "eviction.YIELD_AFTER_S, eviction.STAY_S = 0.5, 1.0\n"
    "if __name__ == '__main__':\n    raise SystemExit(cli.main())\n"
)


def lazy(**keys: Any) -> dict[str, Any]:
    return engine(step_s=0.01, lazy=True, **keys)


def sleeper(**options: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {"gpu": 0, "vram": "50GiB"} if options.get("gib") else {}
    options = {"step_s": 0.01, **options}
    return {"model_dir": ".", "engine": "tests.sleeping_engine:Sleeper", "lazy": True, "options": options, **keys}


def group(models: dict[str, Any], loaded: int = 1) -> dict[str, Any]:
    return {"one": {"models": [*models], "loaded": loaded}}


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """Return a script that serves with short turns."""
    script = tmp_path / "quick.py"
    script.write_text(QUICK)
    return script


@contextmanager
def steady(serving: Serving, *models: str, tokens: int = 60) -> Iterator[dict[str, int]]:
    """Have two clients for each model ask without a pause while the block runs. Yield the number of their answers."""
    over, served = threading.Event(), dict.fromkeys(models, 0)
    failures: list[BaseException] = []

    def ask(model: str, which: int) -> None:
        try:
            with serving.client() as client:
                while not over.is_set():
                    text = f"{model} {which} {served[model]}"
                    assert client.complete(model, text, max_tokens=tokens).text == answer(text, tokens)
                    served[model] += 1
                    if which == 0 and served[model] == 1:  # the two overlap
                        over.wait(tokens * 0.005)
        except BaseException as e:
            failures.append(e)
            raise

    threads = [threading.Thread(target=ask, args=(model, which)) for model in models for which in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield served
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures


def kinds(box: Box) -> dict[str, tuple[dict[str, Any], bool]]:
    """Return the models of each way to be in each other's way, and whether a group says so."""
    return {
        "group, unloads": ({name: lazy() for name in "ab"}, True),
        "group, sleeps": ({name: sleeper() for name in "ab"}, True),
        "memory, sleeps": ({name: sleeper(gib=50) for name in "ab"}, False),
        "memory, unloads": ({name: {**sleeper(gib=50), "sleep": "off"} for name in "ab"}, False),
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", ["group, unloads", "group, sleeps", "memory, sleeps", "memory, unloads"])
def test_a_request_is_served_however_many_come_for_another_model(serve: Serve, box: Box, kind: str) -> None:
    models, grouped = kinds(box)[kind]
    box.lists_the_living()
    serving = serve(models, wait=False, groups=group(models) if grouped else None)
    with serving.client() as client, steady(serving, "a") as served:
        serving.wait_state("a", "ready")
        for turn in range(2):
            told: list[Progress] = []
            stream = client.generate("b", f"waits {turn}", max_tokens=3, queue_ms=40_000, on_progress=told.append)
            wait_until(lambda: "waits for a to finish" in (serving.status("b")["reason"] or ""), 30, "the reason")
            assert stream.complete().text == answer(f"waits {turn}", 3)
            reasons = {report.waits_for for report in told if report.phase == "queued"}
            assert reasons & {"a to finish 2 requests", "a to finish 1 request"}, told
            before = served["a"]
            wait_until(lambda before=before: served["a"] > before + 4, 30, "the others to go on")  # type: ignore[misc]
    log = serving.log()
    assert log.count("b: waking -> ready" if "sleeps" in kind else "b: loading -> ready") >= 1
    assert re.search(r"a: takes no new requests, and finishes [012]: b waits for its place", log)
    assert "failed" not in log


@pytest.mark.long
def test_three_models_take_turns_in_the_order_in_which_they_were_asked_for(serve: Serve, quick: Path) -> None:
    models = {name: lazy() for name in "abc"}
    serving = serve(models, wait=False, groups=group(models), script=quick)
    with steady(serving, *models, tokens=20):
        turns_taken = 9
        wait_until(lambda: serving.log().count("loading -> ready") >= turns_taken, 60, "three turns each")
    order = re.findall(r"(\w): loading -> ready", serving.log())[:turns_taken]
    assert order == order[:3] * 3
    assert sorted(order[:3]) == [*models]


def test_a_model_goes_on_when_nobody_waits_for_its_place_any_more(serve: Serve, quick: Path) -> None:
    models = {name: lazy() for name in "ab"}
    serving = serve(models, wait=False, groups=group(models), script=quick)
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "long", max_tokens=3000, route={"keep_alive": -1})
        serving.wait_state("a", "ready")
        client.generate(2, "b", "waits", max_tokens=3)
        wait_until(lambda: serving.status("a")["reason"], 30, "it to yield")
        assert serving.status("a")["reason"] == "takes no new requests: b waits for its place"
        assert "queued: waits for a to finish 1 request" in serving.modelctl("ps").stdout
        client.generate(3, "a", "behind", max_tokens=3)
        wait_until(lambda: serving.status("a")["queued"] == 1, 30, "it to wait")
        client.send(Cancel(2))
        client.read_until_ended(3)
        assert client.heard[3].text == answer("behind", 3)
        assert serving.status("a")["reason"] is None
        client.send(Cancel(1))
        client.read_until_ended(1)


def test_an_order_to_start_a_model_makes_a_busy_one_yield(serve: Serve, quick: Path) -> None:
    models = {name: lazy() for name in "ab"}
    serving = serve(models, wait=False, groups=group(models), script=quick)
    with steady(serving, "a"):
        serving.wait_state("a", "ready")
        done = serving.modelctl("start", "b")
        assert "b: loading -> ready" in serving.log(), "nobody asks it, so it may make room again at once"
        assert done.returncode == 0 or "b: it was unloaded before a request came (evicted for a" in done.stderr


@pytest.mark.parametrize("stays", ["pinned", "not lazy"])
def test_models_that_never_leave_do_not_yield(serve: Serve, box: Box, quick: Path, stays: str) -> None:
    box.lists_the_living()
    first = {**sleeper(gib=50), **({"pinned": True, "autostart": True} if stays == "pinned" else {"lazy": False})}
    serving = serve({"a": first, "b": sleeper(gib=50)}, script=quick)
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "long", max_tokens=3000)
        client.generate(2, "b", "waits", max_tokens=3)
        client.read_until_ended(2)
        error = client.heard[2].error or {}
        assert (error["name"], error["retryable"], error["retry_after_ms"]) == ("model_failed", True, 10_000)
        assert serving.status("a")["reason"] is None
        client.send(Cancel(1))
        client.read_until_ended(1)


def test_streams_over_http_are_told_what_they_wait_for(serve: Serve) -> None:
    models = {name: lazy() for name in "ab"}
    serving = serve(models, wait=False, groups=group(models))
    with Gateway(serving, keepalive_s=0.1) as gateway:
        long = {"model": "a", "prompt": "long", "max_tokens": 3000, "stream": True}
        with closing(post(gateway.port, long)) as running:
            read_until(running, b"data: ")
            with closing(post(gateway.port, {"model": "b", "prompt": "x", "max_tokens": 5, "stream": True})) as waiting:
                read_until(waiting, b": queued: waits for a to finish 1 request\n\n")
                running.close()
                read_until(waiting, b"[DONE]")
