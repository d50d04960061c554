"""A real worker applies its model's sampling defaults and limits. The test acts as the supervisor."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from protocol.codec import decode, encode, pack_body, split_events, unpack_event
from protocol.messages import TERMINAL, WORKER_TO_SUPERVISOR, Events, JobMessage, Message, Ready, Shutdown
from protocol.process.worker_spec import EXIT_ASKED, EXIT_CONFIG, LOAD_ERROR_PREFIX
from tests.deterministic_engine import answer

WITHIN_S = 20.0
PROGRAM = """
import json, sys
from model_worker import entry
from protocol.process.worker_spec import EngineSpec, WorkerSpec
endpoint, log, parent, sampling, limits, forced = json.loads(sys.argv[1])
engine = EngineSpec("m", "tests.deterministic_engine:DeterministicEngine", "/", options={"context": 64})
entry.main(WorkerSpec(engine, 1, "", endpoint, b"w", log, parent, sampling, limits, forced=forced))
"""


class Worker:
    """A worker process with these defaults, limits and forced values."""

    def __init__(
        self, directory: Path, sampling: dict[str, Any], limits: dict[str, Any], forced: dict[str, Any]
    ) -> None:
        self.log = directory / "worker.log"
        self.router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        endpoint = f"ipc://{directory}/back"
        self.router.bind(endpoint)
        given = json.dumps([endpoint, str(self.log), os.getpid(), sampling, limits, forced])
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, given])

    def receive(self, kind: type[Message]) -> Message:
        while self.router.poll(int(WITHIN_S * 1000)):
            message = decode(self.router.recv_multipart()[1], WORKER_TO_SUPERVISOR)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} within {WITHIN_S} s")

    def ask(self, request: int, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Return the text of an answer and the fields of its last event."""
        body = pack_body({"prompt": "p", **fields})
        self.router.send_multipart([b"w", encode(JobMessage(1, request, {}, body))])
        text = ""
        while True:
            message = self.receive(Events)
            assert isinstance(message, Events)
            for entry_, event in split_events(message):
                report = unpack_event(entry_, event)[1]
                text += report.get("text", "")
                if entry_.flags & TERMINAL:
                    return text, report

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.router.close(linger=0)


@pytest.fixture
def workers(runtime_dir: Path) -> Iterator[Any]:
    made: list[Worker] = []

    def make(sampling: dict[str, Any], limits: dict[str, Any], forced: dict[str, Any] | None = None) -> Worker:
        made.append(Worker(runtime_dir, sampling, limits, forced or {}))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def test_defaults_and_limits_of_the_spec_are_those_of_every_request(workers: Any) -> None:
    worker = workers({"preset": "steady", "max_tokens": 3}, {"max_tokens": 5, "prompt_tokens": 10})
    assert worker.receive(Ready)
    assert worker.ask(1)[0] == answer("p", 3)
    assert worker.ask(2, max_tokens=5)[0] == answer("p", 5)
    for request, fields, field in ((3, {"max_tokens": 6}, "max_tokens"), (4, {"prompt": "x" * 11}, "prompt")):
        _, report = worker.ask(request, **fields)
        assert report["error"]["field"] == field
        assert "this model allows at most" in report["error"]["message"]
    worker.router.send_multipart([b"w", encode(Shutdown())])
    assert worker.process.wait(WITHIN_S) == EXIT_ASKED


def test_a_forced_value_counts_and_the_events_say_so(workers: Any) -> None:
    worker = workers({"max_tokens": 9}, {"max_tokens": 5}, {"max_tokens": 3, "temperature": 0.5})
    assert worker.receive(Ready)
    text, report = worker.ask(1)
    assert (text, report.get("forced")) == (answer("p", 3), None)
    text, report = worker.ask(2, max_tokens=6, temperature=1)
    assert (text, report["forced"]) == (answer("p", 3), {"max_tokens": 3, "temperature": 0.5})
    _, report = worker.ask(3, min_tokens=4)
    assert "more than the 3 of this model's own max_tokens: ask for fewer" in report["error"]["message"]


def test_a_forced_value_that_the_engine_does_not_offer_is_told_before_any_request(workers: Any) -> None:
    worker = workers({}, {}, {"cfg_scale": 2.0})
    assert worker.process.wait(WITHIN_S) == EXIT_CONFIG
    assert f"{LOAD_ERROR_PREFIX}forced.cfg_scale is not offered" in worker.log.read_text()


def test_a_default_that_the_engine_does_not_offer_is_told_before_any_request(workers: Any) -> None:
    worker = workers({"cfg_scale": 2.0}, {})
    assert worker.process.wait(WITHIN_S) == EXIT_CONFIG
    assert f"{LOAD_ERROR_PREFIX}sampling.cfg_scale is not offered" in worker.log.read_text()
