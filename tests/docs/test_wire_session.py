"""A real supervisor sends messages as ``protocol.bodies`` and ``protocol.verbs``, and so the page, describe them."""

import subprocess
import sys
from collections.abc import Iterator
from struct import pack
from typing import Any, get_type_hints

import pytest

from protocol import bodies
from protocol.bodies import APPEARS, Where
from protocol.codec import pack_body, split_events, unpack_body, unpack_event
from protocol.errors import ErrorCode
from protocol.messages import Call, Cancel, Error, EventFlag, Events, Generate, GoAway, Message, Ping, Pong, Reply
from protocol.results import result_of
from protocol.verbs import QUESTION_VERBS, VERBS
from tests.deterministic_engine import answer
from tests.docs.typed_maps import differences
from tests.keyed import Keyed
from tests.raw_client import RawClient
from tests.serving import ROOT, WITHIN, Serving, engine

MODELS = {
    "a": engine(step_s=0.001, context=5000),
    "narrow": engine(step_s=0.05, context=5000, max_batch_size=1),
    "late": engine("SlowLoad", load_s=0.5, lazy=True),
    "sleeper": {"model_dir": ".", "engine": "tests.sleeping_engine:Sleeper", "lazy": True, "autostart": True},
    "stopped": engine(autostart=False),
}


class Recorder(RawClient):
    """A client that compares everything it receives with its description.

    found   differences from the description
    errors_at  (code, place) of every error
    """

    def __init__(self, *where: Any, **options: Any) -> None:
        self.found: list[str] = []
        self.errors_at: set[tuple[ErrorCode, Where]] = set()
        self.kinds: set[str] = set()
        self.messages: list[Message] = []
        self.replies_to: dict[int, dict[str, Any]] = {}
        super().__init__(*where, **options)

    def _note(self, message: Message) -> None:
        super()._note(message)
        self.messages.append(message)
        name = type(message).__name__
        self.kinds.add(name)
        if isinstance(message, Events):
            for entry, event in split_events(message):
                self._note_event(entry.flags, unpack_event(entry, event)[1])
        elif (described := getattr(bodies, f"{name}Body", None)) is not None:
            body = unpack_body(message.body)  # type: ignore[union-attr]
            self.found += differences(body, described, name)
            if isinstance(message, Error):
                place = Where.FRAME if "refused" in body else Where.CONNECTION
                self._note_error(body, Where.REQUEST if message.request else place)
            elif isinstance(message, Reply):
                self.replies_to[message.call] = body
                if "error" in body:
                    self._note_error(body["error"], Where.REPLY)

    def _note_event(self, flags: int, fields: dict[str, Any]) -> None:
        described: type = bodies.DeltaEvent
        if flags & EventFlag.ERROR:
            described = bodies.ErrorEvent
            self._note_error(fields["error"], Where.EVENT)
        elif flags & EventFlag.FINISHED:
            described = bodies.FinishedEvent
        self.found += differences(fields, described, described.__name__)

    def _note_error(self, error: dict[str, Any], place: Where) -> None:
        self.errors_at.add((ErrorCode(error["code"]), place))

    def ask(self, number: int, verb: str, **params: Any) -> dict[str, Any]:
        """Send a CALL and return the body of its REPLY."""
        self.send(Call(number, verb, pack_body(params)))
        while number not in self.replies_to:
            self.receive()
        return self.replies_to[number]

    def check(self) -> None:
        """Fail if a received message differed from its description."""
        assert not self.found, self.found
        undescribed = {(code.name, place) for code, place in self.errors_at if place not in APPEARS[code]}
        assert not undescribed


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(MODELS) as serving:
        yield serving


def test_the_session_of_a_client(serving: Serving) -> None:
    with Recorder(serving.runtime_dir) as client:
        client.generate(1, "a", "p", max_tokens=5, logprobs=True, top_logprobs=1, prompt_logprobs=1)
        client.generate(2, "nobody", "p")
        client.generate(3, "stopped", "p")
        client.generate(4, "a", "p", route={"deadline_ms": 0})
        client.generate(5, "a", "p", max_tokens=-1)
        client.generate(6, "a", "p", max_tokens=6000)
        client.generate(7, "a", "p", logit_bias={"1": 1})
        client.generate(8, "a", "p", max_tokens=4000)
        client.generate(8, "a", "p")
        client.send(Cancel(8))
        client.generate(9, "late", "p", max_tokens=1, route={"progress": True})
        client.generate(10, "a", "p", max_tokens=4000, route={"deadline_ms": 1})
        client.send(b"\x93\x01\x03\xa1")
        client.send(b"\x93\x02\x03\x01")
        client.send(Generate(11, "a", {}, bytes(3 << 20)))
        client.read_until_ended(1, 5, 6, 7, 8, 9, 10)
        for number in range(20, 25):
            client.generate(number, "narrow", "p", max_tokens=10, route={"progress": True, "queue_ms": 60_000})
        client.read_until_ended(*range(20, 25))
        client.check()
        assert {"Welcome", "Accepted", "Events", "Error", "Report"} <= client.kinds
        assert {report["phase"] for reports in client.reports.values() for report in reports} >= {"queued", "loading"}
        assert len(client.errors_at) >= 11, client.errors_at


FIELDS: dict[str, Any] = {
    "rights": ["infer"], "models": ["a"], "expires": "30d", "max_in_flight": 1, "requests_per_minute": 2,
    "tokens_per_minute": 3, "tokens_per_day": None, "keep_alive_s": "2h",
}  # fmt: skip


def test_every_verb(serving: Serving) -> None:
    asked: dict[str, dict[str, Any]] = {
        "models": {},
        "status": {},
        "requests": {"limit": 5},
        "ended_requests": {"after": 0, "limit": 5},
        "story": {"id": ""},
        "events": {"after": 0, "limit": 500},
        "metrics": {"model": "a"},
        "usage": {"key": "", "model": "a", "since": "2026-01-31"},
        "tokenize": {"model": "a", "prompt": "p", "with_text": True, "with_pieces": True},
        "detokenize": {"model": "a", "token_ids": pack("<2I", 97, 98)},
        "chat_template": {"model": "a"},
        "start": {"model": "stopped"},
        "stop": {"model": "stopped", "now": True},
        "unload": {"model": "stopped"},
        "sleep": {"model": "sleeper"},
        "wake": {"model": "sleeper"},
        "restart": {"model": "stopped"},
        "reload": {},
        "config": {"all": True},
        "settings": {"model": "a"},
        "shutdown": {},
        "cancel_request": {"id": ""},
        "log_level": {"model": "a", "level": "debug"},
        "keys": {"after": "", "limit": 5},
        "new_key": {"name": "web", **FIELDS},
        "set_key": {"name": "web", **FIELDS},
        "revoke_key": {"name": "web"},
        "logs": {"model": "a", "lines": 5, "after": "0-0"},
    }
    assert asked.keys() == VERBS.keys()
    with Recorder(serving.runtime_dir) as user, Recorder(serving.runtime_dir, admin=True) as client:
        user.generate(1, "narrow", "p", max_tokens=4000)
        while 1 not in user.heard:
            user.receive()
        for number, (verb, params) in enumerate(asked.items(), 1):
            if verb == "shutdown":  # the last test sends it
                continue
            reply = client.ask(number, verb, **params)
            assert not list(differences(params, VERBS[verb].params, verb))
            assert not list(differences(reply["result"], result_of(VERBS[verb]), verb))
            if verb == "requests":
                asked["story"]["id"] = asked["cancel_request"]["id"] = reply["result"]["requests"][0]["id"]
        user.read_until_ended(1)
        assert user.heard[1].ends == ["cancelled"]
        client.ask(30, "stop", model="stopped", now=True)
        # again, since the reload has added entries
        assert not list(differences(client.ask(31, "status")["result"], result_of(VERBS["status"])))
        for number, verb in enumerate(VERBS.keys() - QUESTION_VERBS, 40):
            message = client.ask(number, verb, zzz=1)["error"]["message"]
            known = message.partition("known are ")[2]
            assert {*known.split(", ")} - {""} == get_type_hints(VERBS[verb].params).keys(), message
        client.check()


def test_the_status_of_a_port_over_tcp() -> None:
    with (
        Keyed({"a": engine()}, {"ops": "status", "user": "infer"}) as keyed,
        Recorder(keyed.endpoint, key=keyed.keys["ops"]) as client,
    ):
        result = client.ask(1, "status")["result"]
        assert result["supervisor"]["tcp"] is not None
        assert not list(differences(result, result_of(VERBS["status"])))
        client.generate(2, "a", "p")
        client.send(Cancel(2))
        client.send(Ping(1))
        while client.receive() != Pong(1):
            pass
        client.check()
        wanted = {(ErrorCode.FORBIDDEN, Where.REQUEST), (ErrorCode.FORBIDDEN, Where.FRAME)}
        assert client.errors_at == wanted


def test_goaway() -> None:
    with (
        Serving({"a": engine(step_s=0.05)}) as serving,
        Recorder(serving.runtime_dir) as client,
        Recorder(serving.runtime_dir, admin=True) as operator,
    ):
        client.generate(1, "a", "p", max_tokens=40)
        while 1 not in client.heard:
            client.receive()
        assert operator.ask(1, "shutdown")["result"] == {}
        while not any(isinstance(message, GoAway) for message in client.messages):
            client.receive()
        client.generate(2, "a", "p")
        while not client.errors:
            client.receive()
        while not client.heard[1].ends:
            client.receive()
        assert client.heard[1].ends == ["length"]
        assert client.errors_at == {(ErrorCode.DRAINING, Where.REQUEST)}
        client.check()
        serving.process.wait(WITHIN)


def run_example(serving: Serving, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / "examples/minimal_client.py"), *arguments],
        env={**serving.environment, "MODELCTL_RUNTIME_DIR": str(serving.runtime_dir)},
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )


def test_the_client_that_was_written_from_the_page_alone(serving: Serving) -> None:
    """The client grants credit for a long answer, and gets errors both as refusals and as events."""
    assert run_example(serving, "a", "p", "1000").stdout == f"{answer('p', 1000)}\n[length]\n"
    assert "no model 'nobody' is configured" in run_example(serving, "nobody", "p").stderr
    assert "max_tokens is -1" in run_example(serving, "a", "p", "-1").stderr
