"""``modelctl run`` sends its options correctly, and shows the position of a request that waits."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import pack_body, unpack_body
from protocol.messages import Call, Generate, Message, Reply, Report
from tests.cli.programs import Terminal, environment, modelctl
from tests.protocol.scripted_peer import ScriptedPeer, accepted, delta, events, finished

STATUS = {"models": [{"name": "m", "state": "ready", "chat": False, "context": 4096}]}


class Answering:
    """A supervisor with a model without a chat template. It sends progress reports, and then the answer."""

    def __init__(self, reports: list[dict[str, Any]]) -> None:
        self.reports = reports

    def __call__(self, peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Call):
            peer.send(client, Reply(message.call, pack_body({"result": STATUS})))
        elif isinstance(message, Generate):
            peer.send(client, accepted(message.request))
            for report in self.reports:
                time.sleep(0.4)  # long enough for the command to print a line
                peer.send(client, Report(message.request, pack_body(report)))
            if self.reports:
                time.sleep(0.4)
            peer.send(client, events(delta(message.request, 0, "fine", (1,)), finished(message.request, 1)))


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mctl-", dir="/tmp") as path:
        yield Path(path)


def test_options_become_route_and_body(runtime_dir: Path) -> None:
    schema = runtime_dir / "schema.json"
    schema.write_text('{"type": "object"}')
    with ScriptedPeer(runtime_dir / "front", Answering([])) as peer:
        options = (
            "--priority",
            "batch",
            "--deadline",
            "1.5s",
            "--json-schema",
            schema,
            "--choice",
            "a",
            "--choice",
            "b",
        )
        more = ("--regex", "[a-z]+", "--set", "affinity=me", "--set", "resume=false", "--set", "top_k=3")
        done = modelctl("run", "m", "hi", *options, *more, "--runtime-dir", runtime_dir)
        assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    (request,) = peer.of(Generate)
    assert request.route == {"priority": "batch", "deadline_ms": 1500, "affinity": "me", "resume": False}
    assert unpack_body(request.body) == {
        "prompt": "hi", "json_schema": '{"type": "object"}', "choice": ["a", "b"], "regex": "[a-z]+", "top_k": 3
    }  # fmt: skip


@pytest.mark.parametrize(("given", "sent"), [("1", 1000), ("0.5", 500), ("250ms", 250), ("2m", 120_000)])
def test_a_deadline_may_be_a_number_of_seconds(runtime_dir: Path, given: str, sent: int) -> None:
    with ScriptedPeer(runtime_dir / "front", Answering([])) as peer:
        done = modelctl("run", "m", "hi", "--deadline", given, "--runtime-dir", runtime_dir)
        assert (done.returncode, done.stderr) == (0, "")
    assert [request.route for request in peer.of(Generate)] == [{"deadline_ms": sent}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--deadline", "soon"), "must be a duration such as 250ms, 30s, 5m or 1h"),
        (("--deadline", "nan"), "must be a duration such as"),
        (("--deadline", "1s", "--set", "deadline_ms=5"), "--deadline is given as well"),
        (("--json-schema", "/nonexistent"), "does not exist"),
        (("--json-schema", __file__), "is not JSON"),
        (("--priority", "urgent"), "'urgent' is not one of"),
    ],
    ids=["deadline", "deadline nan", "twice", "no file", "no JSON", "priority"],
)
def test_options_that_are_wrong_are_named(runtime_dir: Path, options: tuple[str, ...], message: str) -> None:
    done = modelctl("run", "m", "hi", *options, "--runtime-dir", runtime_dir)
    assert message in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


REPORTS = [{"phase": "queued", "queue_position": 2}, {"phase": "prefill", "done": 512, "total": 1024}]


def test_a_terminal_shows_where_the_request_is(runtime_dir: Path) -> None:
    with (
        ScriptedPeer(runtime_dir / "front", Answering(REPORTS)) as peer,
        Terminal("run", "m", "hi", "--runtime-dir", runtime_dir, environment=environment()) as terminal,
    ):
        terminal.wait_for("waiting, 2 before this one")
        terminal.wait_for("reading the prompt [############------------]  50%")
        terminal.wait_for("\x1b[2Kfine\n")
        assert terminal.wait_for_exit() == 0
    assert peer.of(Generate)[0].route == {"progress": True}


def test_elsewhere_nothing_is_shown_nor_asked_for(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", Answering(REPORTS)) as peer:
        done = modelctl("run", "m", "hi", "--runtime-dir", runtime_dir)
        assert (done.stdout, done.stderr) == ("fine\n", "")
        done = modelctl("run", "m", "hi", "--json", "--runtime-dir", runtime_dir)
        assert json.loads(done.stdout.splitlines()[-1])["text"] == "fine"
    assert [request.route for request in peer.of(Generate)] == [{}, {}]
