"""What is wrong with the supervisor as a whole is told in words, by ps, events and the metrics, and then no more."""

import json
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from protocol.metrics import exposition
from supervisor.keys.store import CLIENTS, KeyStore
from supervisor.status import LATELY_S, Lasting, Refusals
from tests.conftest import Serve
from tests.keyed import Keyed
from tests.nvml_box import Box
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until


def troubles(serving: Serving) -> dict[str, str]:
    found: dict[str, str] = serving.overview()["supervisor"]["troubles"]
    return found


def gauge(serving: Serving, kind: str) -> bool:
    with serving.client(admin=True) as client:
        text = exposition(client.status(), client.call("metrics")).decode()
    return f'modelctl_trouble{{kind="{kind}"}} 1.0' in text


def events(serving: Serving, kind: str) -> list[str]:
    done = serving.modelctl("events", "--json")
    return [event["message"] for event in map(json.loads, done.stdout.splitlines()) if event["kind"] == kind]


def told(serving: Serving, kind: str, words: str, event_kind: str, *, in_ps: bool = True) -> None:
    """Wait until each way of looking tells of a trouble."""
    wait_until(lambda: words in troubles(serving).get(kind, ""), 20, f"status to tell of {kind}")
    assert gauge(serving, kind)
    wait_until(lambda: any(words in message for message in events(serving, event_kind)), 20, "an event")
    assert not in_ps or words in serving.modelctl("ps").stderr


def over(serving: Serving, kind: str) -> None:
    wait_until(lambda: kind not in troubles(serving), 30, f"{kind} to be over")
    assert not gauge(serving, kind)


def test_a_faulty_models_yaml(serve: Serve) -> None:
    serving = serve({"a": engine()})
    assert troubles(serving) == {}
    text = serving.config.read_text()
    serving.config.write_text(text + "nonsense: 1\n")
    done = serving.modelctl("reload")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (78, "modelctl: nothing is changed")
    told(serving, "config", "nonsense: unknown key", "reload")
    serving.config.write_text(text)
    serving.order("reload")
    over(serving, "config")


def test_a_full_disk(serve: Serve) -> None:
    serving = serve({"a": engine()})
    before = resource.prlimit(serving.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(serving.pid, resource.RLIMIT_FSIZE, (1, before[1]))
    serving.order("restart", model="a")
    told(serving, "log", "cannot be written: File too large", "log")
    resource.prlimit(serving.pid, resource.RLIMIT_FSIZE, before)
    serving.order("restart", model="a")
    over(serving, "log")
    wait_until(lambda: "log: it is over" in events(serving, "log"), 20, "the end of it")


def test_a_driver_that_is_gone(serve: Serve, box: Box) -> None:
    serving = serve({"a": engine(gpu=0)})
    box.fails("GPU is lost")
    told(serving, "gpus", "GPU is lost", "vram")
    box.fails(None)
    over(serving, "gpus")


def test_a_full_queue(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.02, max_batch_size=1, max_queue=1)})
    with RawClient(serving.runtime_dir) as client:
        for number in range(1, 9):
            client.generate(number, "a", f"n {number}", max_tokens=200)
        told(serving, "queue", "because queues are full: a (", "queue")
        with serving.client() as asking, pytest.raises(WireError) as caught:
            asking.complete("a", "one more")
        assert caught.value.code is ErrorCode.OVERLOADED


def test_keys_that_were_revoked_and_a_list_that_cannot_be_read() -> None:
    with Keyed({"a": engine()}, {"ops": "status", "user": "infer"}) as keyed:
        store = KeyStore(keyed.store.directory)
        store.revoke("user")
        wait_until(lambda: any("gone: user" in message for message in events(keyed.serving, "keys")), 20, "an event")
        listed = keyed.store.directory / CLIENTS
        text = listed.read_text()
        listed.write_text("{")
        told(keyed.serving, "keys", "no key is admitted", "keys")
        listed.write_text(text)
        over(keyed.serving, "keys")


SOONER = """\
import runpy
from supervisor import status

if __name__ == "__main__":
    status.LASTING_S = 0.1
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
"""


def test_a_trouble_that_lasts_is_an_event_and_so_is_its_end(tmp_path: Path) -> None:
    script = tmp_path / "sooner.py"
    script.write_text(SOONER)
    keyed = Keyed({"a": engine()}, {"user": "infer"}, script=script)
    with socket.create_server(("127.0.0.1", keyed.port)) as taken, keyed:
        told(keyed.serving, "listen", f"cannot listen on {keyed.endpoint}", "trouble")
        taken.close()
        over(keyed.serving, "listen")
        wait_until(lambda: "listen: it is over" in events(keyed.serving, "trouble"), 20, "the end of it")


def test_a_trouble_lasts_after_five_minutes_without_a_pause() -> None:
    lasting = Lasting()
    assert lasting.look({"listen", "gpus"}, 0.0) == ([], [])
    assert lasting.look({"listen"}, 200.0) == ([], [])
    assert lasting.look({"listen", "gpus"}, 299.0) == ([], [])
    assert lasting.look({"listen", "gpus"}, 300.0) == (["listen"], [])
    assert lasting.look({"listen", "gpus"}, 400.0) == ([], [])
    assert lasting.look({"gpus"}, 401.0) == ([], ["listen"])
    assert lasting.look({"listen"}, 402.0) == ([], [])
    assert lasting.look({"listen"}, 702.0) == (["listen"], [])


def test_refusals_are_a_trouble_for_a_while() -> None:
    refusals = Refusals()
    look: Callable[[dict[str, int], float], Any] = refusals.words
    assert look({"a": 0, "b": 0}, 0.0) is None
    assert "a (3)" in look({"a": 3, "b": 0}, 1.0)
    both = look({"a": 5, "b": 1}, 5.0)
    assert "a (5)" in both
    assert "b (1)" in both
    assert look({"a": 5, "b": 1}, 5.0 + LATELY_S) is None
    assert "a (2)" in look({"a": 7, "b": 1}, 100.0), "earlier ones are another trouble"
