"""The worker renews its progress lease before each action that may take long, with the time of that action."""

import os
from collections.abc import Sequence

import pytest

from model_worker.loop import WorkerLoop
from protocol.codec import pack_body
from protocol.messages import TERMINAL, Ask, JobMessage, Message
from protocol.process.worker_spec import Leases, ProgressLease, Reading, WatchedPage, WorkerPhase
from tests.model_worker.test_worker_loop import ScriptedLink, engine, job

LEASES = Leases(start_s=4.0, load_s=3.0, idle_s=1.0, step_s=2.0)


@pytest.fixture
def page() -> WatchedPage:
    return WatchedPage(LEASES.start_s)


def test_every_step_and_every_message_has_a_beat_of_its_own(page: WatchedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, Reading]] = []

    class Link(ScriptedLink):
        def receive(self, wait_ms: int, also: Sequence[int] = ()) -> list[Message]:
            found.append(("wait" if wait_ms else "look", page.read()))
            return super().receive(wait_ms, also)

    model = engine()
    for name in ("step", "encode", "encode_rendered"):
        original = getattr(model, name)

        def reported(*given: object, name: str = name, original: object = original) -> object:
            found.append((name, page.read()))
            return original(*given)  # type: ignore[operator]

        monkeypatch.setattr(model, name, reported)
    body = pack_body({"messages": [{"role": "user", "content": "c"}], "max_tokens": 4})
    chat = JobMessage(1, 3, {}, body)
    asked = [Ask(number, "tokenize", pack_body({"model": "m", "prompt": "some text"})) for number in (1, 2)]
    link = Link(
        [job(1, 1), job(1, 2), chat, *asked], done=lambda link: any(e.flags & TERMINAL for e, _ in link.of(1, 3))
    )
    WorkerLoop(model, link, lease=ProgressLease(LEASES, os.dup(page.descriptor))).run()  # type: ignore[arg-type]
    page.close()

    assert {name for name, _ in found} == {"wait", "look", "step", "encode", "encode_rendered"}
    for name, reading in found:
        if name == "wait":
            assert (reading.phase, reading.lease_s) == (WorkerPhase.IDLE, LEASES.idle_s)
        elif name != "look":
            assert (reading.phase, reading.lease_s) == (WorkerPhase.STEP, LEASES.step_s)
    words = [reading.word for name, reading in found if name != "look"]
    assert len(set(words)) == len(words)
