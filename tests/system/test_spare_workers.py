"""A spare worker becomes the next worker of its engine, and whatever happens to it costs no start."""

import os
import signal
from typing import Any

import psutil
import pytest

from supervisor.workers.local import TRIES
from tests.conftest import Serve
from tests.serving import Serving, wait_until

LETTERS = {"engine": "transformers", "gpu": "cpu", "model_dir": "demo:letters"}
PROMPT = "reverse: abcdef"


def spare(serving: Serving) -> dict[str, Any]:
    """Wait for a spare that is ready."""

    def ready() -> dict[str, Any] | None:
        found: list[dict[str, Any]] = serving.overview()["supervisor"]["spares"]
        return next((one for one in found if one["ready"]), None)

    found: dict[str, Any] = wait_until(ready, 60, "a spare worker")
    return found


def answer(serving: Serving) -> str:
    with serving.client() as client:
        return str(client.complete("letters", PROMPT, max_tokens=20, temperature=0, timeout=60).text)


@pytest.mark.long
def test_it_becomes_the_next_worker_and_leaves_nothing(serve: Serve) -> None:
    serving = serve({"letters": LETTERS}, spare=1)
    expected, first = answer(serving), serving.status("letters")["pid"]
    before = spare(serving)
    assert before["engine"] == "transformers"
    assert before["pid"] != first
    assert psutil.Process(before["pid"]).cmdline()[0].startswith("modelctl: spare worker (transformers)")
    os.kill(first, signal.SIGKILL)
    assert answer(serving) == expected
    status = serving.status("letters")
    assert (status["pid"], status["generation"]) == (before["pid"], 2)
    assert psutil.Process(before["pid"]).cmdline()[0].startswith("modelctl: worker letters")
    after = spare(serving)
    assert after["pid"] not in (first, before["pid"])
    serving.order("restart", model="letters")
    wait_until(lambda: serving.status("letters")["generation"] == 3, 30, "the order")
    serving.wait_state("letters", "ready", 60)
    assert serving.status("letters")["pid"] == after["pid"]
    last = spare(serving)
    serving.kill()
    wait_until(lambda: not psutil.pid_exists(last["pid"]), 20, "its end with the supervisor")


@pytest.mark.long
def test_no_start_waits_for_one_that_was_stopped_or_has_ended(serve: Serve) -> None:
    serving = serve({"letters": LETTERS}, spare=1)
    found = spare(serving)
    os.kill(found["pid"], signal.SIGSTOP)
    serving.order("restart", model="letters")
    wait_until(lambda: serving.status("letters")["generation"] == 2, 30, "the order")
    serving.wait_state("letters", "ready", 60)
    assert serving.status("letters")["pid"] != found["pid"]
    assert "cannot be used: starting another process" in serving.log()
    wait_until(lambda: not psutil.pid_exists(found["pid"]), 20, "its end")
    found = spare(serving)
    os.kill(found["pid"], signal.SIGKILL)
    wait_until(lambda: f"(pid {found['pid']}) has ended: another one follows" in serving.log(), 20, "the word of it")
    text = serving.config.read_text()
    serving.config.write_text(text.replace("spare: 1", "spare: 0"))
    serving.order("reload")
    wait_until(lambda: not serving.overview()["supervisor"]["spares"], 20, "no spare")
    assert serving.status("letters")["generation"] == 2
    assert TRIES > 1
