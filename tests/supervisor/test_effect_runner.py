"""Effects happen in the order of the decisions, and no effect is carried out in the middle of another one."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from protocol.codec import encode
from protocol.errors import ErrorCode, WireError
from protocol.messages import JobMessage, Shutdown
from supervisor.loop import EffectRunner
from supervisor.requests.request import EffectQueue, EndConnection, LoadForRequests, ToClient, ToWorker, WorkerChanged
from tests.serving import ROOT

REVOKED = WireError(ErrorCode.UNAUTHORIZED, "this key was revoked")


class Box:
    """The objects that an EffectRunner acts on. ``done``: the actions, in order. ``then``: actions that one causes.

    A runner that is called while it runs fails the test.
    """

    def __init__(self) -> None:
        self.queue = EffectQueue()
        self.done: list[Any] = []
        self.then: dict[Any, Callable[[], object]] = {}
        self.gone: list[int] = []
        self.replica = SimpleNamespace(generation=1, routing_id=b"W1", process=SimpleNamespace())
        self.is_connected = True
        self._acting = False
        everything: Any = SimpleNamespace(
            send=self._send,
            end=lambda channel, error: self._note(("end", channel, error)),
            take_gone=self._take_gone,
            gone=self._scheduler_gone,
            not_sent=lambda worker, key: self._note(("not sent", worker, key)),
            registry=SimpleNamespace(replicas={"w": self.replica}),
            kill=lambda replica, why: self._note(("kill", why)),
            wake=lambda model: self._note(("wake", model)),
            advance_soon=lambda: self._note("advance"),
        )
        workers: Any = SimpleNamespace(send=self._send_to_worker)
        self.runner = EffectRunner(self.queue, everything, [workers], *[everything] * 4)

    def run(self, *effects: Any) -> list[Any]:
        self.queue.extend(effects)
        self.runner.run()
        assert not self.queue
        return self.done

    def _note(self, what: Any) -> None:
        assert not self._acting, "effects are carried out in the middle of another effect"
        self._acting = True
        self.done.append(what)
        self.then.pop(what, lambda: None)()
        self._acting = False

    def _send(self, channel: int, frame: bytes) -> None:
        self._note((channel, frame))

    def _send_to_worker(self, routing_id: bytes, frame: bytes) -> bool:
        self._note((routing_id, frame))
        return self.is_connected

    def _take_gone(self) -> list[int]:
        gone, self.gone = self.gone, []
        return gone

    def _scheduler_gone(self, channel: int, now: float) -> list[Any]:
        self.done.append(("gone", channel))
        return [ToWorker("w", 1, b"CANCEL")]


def test_what_an_effect_causes_comes_behind_what_was_decided_before() -> None:
    """A start unloads another model, which moves that model's requests. All these effects come after JOB."""
    box = Box()
    box.then["wake", "m"] = lambda: box.queue.extend(
        [WorkerChanged(), ToWorker("w", 1, b"MOVED"), LoadForRequests("other")]
    )
    done = box.run(ToClient(1, b"ACCEPTED"), LoadForRequests("m"), ToWorker("w", 1, b"JOB"))
    assert done == [
        (1, b"ACCEPTED"), ("wake", "m"), (b"W1", b"JOB"), "advance", (b"W1", b"MOVED"), ("wake", "other")
    ]  # fmt: skip


def test_a_client_found_gone_has_its_requests_ended_in_the_same_turn() -> None:
    box = Box()
    box.then[1, b"event"] = lambda: box.gone.append(1)
    done = box.run(ToClient(1, b"event"), ToWorker("w", 1, b"JOB"), ToClient(2, b"event"))
    assert done == [(1, b"event"), (b"W1", b"JOB"), (2, b"event"), ("gone", 1), (b"W1", b"CANCEL")]


def test_a_client_that_was_gone_before_has_its_requests_ended_without_an_effect() -> None:
    box = Box()
    box.gone.append(1)
    assert box.run() == [("gone", 1), (b"W1", b"CANCEL")]


def test_a_frame_for_a_process_that_has_ended_does_not_reach_its_successor() -> None:
    """The successor has not connected yet. Sending to it would fail, and the successor would be killed for that."""
    box = Box()
    box.replica.generation, box.replica.routing_id, box.is_connected = 2, b"W2", False
    assert box.run(ToWorker("w", 1, b"CANCEL"), ToWorker("removed", 1, b"CANCEL")) == []


def test_a_worker_that_cannot_be_reached_is_killed() -> None:
    box = Box()
    box.is_connected = False
    order = encode(Shutdown())
    assert box.run(ToWorker("w", 1, order)) == [(b"W1", order), ("kill", "it cannot be reached")]


def test_a_job_that_cannot_be_sent_is_no_reason_for_the_end_of_its_worker() -> None:
    box = Box()
    box.is_connected = False
    job = encode(JobMessage(5, 7, {}, b"body"))
    assert box.run(ToWorker("w", 1, job)) == [(b"W1", job), ("not sent", "w", (5, 7)), ("kill", "it cannot be reached")]


def test_a_connection_ends_after_its_requests() -> None:
    box = Box()
    assert box.run(ToClient(1, b"error"), EndConnection(1, REVOKED)) == [(1, b"error"), ("end", 1, REVOKED)]


def test_only_the_loop_can_carry_effects_out() -> None:
    """Code that an effect calls cannot run effects itself: it knows only the queue, and adds to it."""
    for path in sorted((ROOT / "supervisor").rglob("*.py")):
        if path.relative_to(ROOT) in (Path("supervisor/loop.py"), Path("supervisor/loop.py")):
            continue
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert "EffectRunner" not in names, path


def test_the_loop_wires_nothing_after_construction() -> None:
    """Objects get their dependencies when they are made: no line sets an attribute of an attribute of the loop."""
    for node in ast.walk(ast.parse((ROOT / "supervisor/loop.py").read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert isinstance(node.value, ast.Name), ast.unparse(node)
