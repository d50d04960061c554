"""The clients of an episode: what they ask, how they read, and when they leave. ``invariants`` checks their answers."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from modelctl import Client
from protocol.codec import decode, pack_body
from protocol.errors import ConnectionLost, WireError
from protocol.messages import (
    SUPERVISOR_TO_CLIENT,
    Accepted,
    Call,
    Cancel,
    Credit,
    Error,
    Events,
    Message,
    Ping,
    Pong,
    Welcome,
)
from tests.chaos.byte_proxy import ByteProxy
from tests.chaos.plan import GRANTS_EVERY_S, WINDOW, Ask, ClientPlan
from tests.raw_client import Heard, RawClient

LIBRARY_WAIT_S = 20.0
AGAIN_S = 1.0
AT_ONCE = 2
"""Unfinished requests of a client that keeps a model busy. While one ends, the other goes on."""
GRANTS = 7
"""Number of times that a slow client gives credit, for half a window each. That is enough for all of its events."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.chaos.load"])


@dataclass
class Answer:
    """One request and its result. ``asked_at``, ``accepted_at``, ...: monotonic times, None if that has not happened.

    lost      the client no longer listens: the connection was cut, or the client has left
    unread_s  longest time in seconds for which the client read nothing before the request ended
    """

    ask: Ask
    client: ClientPlan
    asked_at: float | None = None
    cancelled_at: float | None = None
    accepted_at: float | None = None
    ended_at: float | None = None
    heard: Heard = field(default_factory=Heard)
    accepted: int = 0
    refusals: list[dict[str, Any]] = field(default_factory=list)
    lost: bool = False
    unread_s: float = 0.0
    story: list[tuple[float, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.lost or self.asked_at is None or bool(self.heard.ends or self.refusals)

    @property
    def end(self) -> str:
        if self.heard.ends:
            return self.heard.ends[0]
        return str(self.refusals[0]["name"]) if self.refusals else "nothing"


class ChaosClient(RawClient):
    """A client that never blocks. ``reads``: whether it gives credit for the events that it has read."""

    def __init__(self, endpoint: Path, answers: dict[int, Answer], *, reads: bool = True, admin: bool = False) -> None:
        self.answers, self.reads = answers, reads
        self.pongs = 0
        self.greeted = False
        self._unpaid: dict[int, int] = {}
        super().__init__(f"ipc://{endpoint}", admin=admin)

    def ask(self, answer: Answer) -> None:
        ask = answer.ask
        answer.asked_at = time.monotonic()
        answer.story.append((answer.asked_at, f"GENERATE {ask.model} {ask.tokens} tokens {ask.route}"))
        self.generate(ask.request, ask.model, ask.prompt, max_tokens=ask.tokens, route=dict(ask.route))

    def cancel(self, answer: Answer) -> None:
        answer.cancelled_at = time.monotonic()
        answer.story.append((answer.cancelled_at, "CANCEL"))
        self.send(Cancel(answer.ask.request))

    def grant(self, request: int, events: int) -> None:
        self.send(Credit(request, events))

    def order(self, call: int, verb: str, params: dict[str, Any]) -> None:
        self.send(Call(call, verb, pack_body(params)))

    def ping(self) -> None:
        """Ask for a PONG. It arrives after everything that the supervisor sent before."""
        self.send(Ping(1))

    @property
    def is_open(self) -> bool:
        return not self.socket.closed

    def drain(self) -> None:
        """Read all frames that have arrived."""
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            message = decode(self.socket.recv(), SUPERVISOR_TO_CLIENT)
            if isinstance(message, Ping):
                self.send(Pong(message.nonce))
            elif isinstance(message, Pong):
                self.pongs += 1
            elif isinstance(message, Welcome):
                self.greeted = True
            else:
                self._note(message)
                self._tell(message)

    def _tell(self, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, Events):
            for entry in message.index:
                answer = self.answers.get(entry.request)
                if answer is None:
                    continue
                answer.heard = self.heard[entry.request]
                kind = {0: "", 2: " FINISHED", 4: " ERROR"}.get(entry.flags & 6, " FINISHED and ERROR")
                text = f" {answer.end} {answer.heard.error or ''}" if kind else ""
                answer.story.append(
                    (now, f"event {entry.seq}: {entry.tokens} tokens, generation {message.generation}{kind}{text}")
                )
                if kind and answer.ended_at is None:
                    answer.ended_at = now
                self._pay(entry.request)
        elif isinstance(message, Accepted) and message.request in self.answers:
            self.answers[message.request].accepted += 1
            self.answers[message.request].accepted_at = now
            self.answers[message.request].story.append((now, "ACCEPTED"))
        elif isinstance(message, Error) and message.request in self.answers:
            answer = self.answers[message.request]
            answer.refusals.append(self.errors[-1][1])
            answer.ended_at = now
            answer.story.append((now, f"refused: {self.errors[-1][1]}"))

    def _pay(self, request: int) -> None:
        if self.reads:
            self._unpaid[request] = self._unpaid.get(request, 0) + 1
            if self._unpaid[request] >= WINDOW // 4:
                self.grant(request, self._unpaid.pop(request))


class Party:
    """One client of an episode, in this process: a raw client, perhaps behind a proxy."""

    def __init__(self, plan: ClientPlan, runtime_dir: Path, directory: Path) -> None:
        self.plan = plan
        self._front, self._directory = runtime_dir / "front", directory
        self.answers = {ask.request: Answer(ask, plan) for ask in plan.asks}
        self.raw: ChaosClient | None = None
        self._has_begun = False
        self._proxy: ByteProxy | None = None
        self._read_since = self._read_at = 0.0

    def begin(self) -> None:
        self._has_begun = True
        endpoint = self._front
        if self.plan.kind in ("far", "cut"):
            endpoint = self._directory / f"proxy-{self.plan.number}"
            endpoint.unlink(missing_ok=True)
            self._proxy = ByteProxy(endpoint, self._front, self.plan.delay_s, self.plan.cut_after)
        self._read_since = self._read_at = time.monotonic()
        self.raw = ChaosClient(endpoint, self.answers, reads=self.plan.kind not in ("slow", "deaf"))
        self._ask(self.raw)

    def _ask(self, raw: ChaosClient) -> None:
        for answer in self.answers.values():
            raw.ask(answer)

    def try_again(self) -> None:
        """Connect anew if the supervisor has sent no WELCOME. It turns clients away while descriptors are scarce."""
        if self.raw is None or self.raw.greeted or time.monotonic() < self._read_since + AGAIN_S:
            return
        self.raw.close()
        if self._proxy is not None:
            self._proxy.close()
        self.begin()
        if self.plan.kind == "slow":  # the times at which it gives credit may be over
            for _ in range(GRANTS):
                self._grant()
        for answer in self.answers.values():
            if answer.cancelled_at is not None:
                self.raw.cancel(answer)

    @property
    def actions(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the actions of a client, each with its time in seconds from the beginning of the episode."""
        made: list[tuple[float, Callable[[], None]]] = [(self.plan.at, self.begin)]
        made += [
            (max(self.plan.at, answer.ask.cancel_at), lambda answer=answer: self._cancel(answer))
            for answer in self.answers.values()
            if answer.ask.cancel_at is not None
        ]
        if self.plan.leaves_at is not None:
            made.append((self.plan.leaves_at, self.close))
        if self.plan.kind == "slow":
            made += [(self.plan.at + GRANTS_EVERY_S * i, self._grant) for i in range(1, GRANTS + 1)]
        return made

    def _cancel(self, answer: Answer) -> None:
        if self.raw is not None:
            self.raw.cancel(answer)

    def _grant(self) -> None:
        if self.raw is not None:
            for request in self.answers:
                self.raw.grant(request, WINDOW // 2)

    def drain(self) -> None:
        if self.raw is not None:
            self._take_in(self.raw)
            if self._proxy is not None and self._proxy.was_cut:
                self.close()

    def _take_in(self, raw: ChaosClient) -> None:
        began, waiting = time.monotonic(), [answer for answer in self.answers.values() if not answer.is_over]
        raw.drain()
        passed_s = time.monotonic() - self._read_at
        self._read_at = began
        for answer in waiting:
            answer.unread_s = max(answer.unread_s, passed_s)

    @property
    def is_connecting(self) -> bool:
        """Return whether the supervisor may be about to accept its connection."""
        return self.raw is not None and not self.raw.greeted

    @property
    def is_over(self) -> bool:
        return self._has_begun and all(answer.is_over for answer in self.answers.values())

    def close(self) -> None:
        """Close the connection. Requests that have not ended by then are lost."""
        if self.raw is not None:
            self._take_in(self.raw)
            self.raw.close()
            self.raw = None
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None
        for answer in self.answers.values():
            answer.lost = answer.lost or not (answer.heard.ends or answer.refusals)


class SteadyParty(Party):
    """A client that has two unfinished requests at any time, until it has asked all."""

    has_enough: Callable[[], bool] = staticmethod(lambda: False)
    """Returns whether it need not ask any more."""

    def begin(self) -> None:
        for answer in self.answers.values():
            if not answer.is_over:  # the supervisor has turned the client away, which connects anew
                answer.asked_at = None
        super().begin()

    def _ask(self, raw: ChaosClient) -> None:
        asked = [answer for answer in self.answers.values() if answer.asked_at is not None]
        unfinished = sum(not answer.is_over for answer in asked)
        if unfinished < AT_ONCE and not self.has_enough():
            waiting = [answer for answer in self.answers.values() if answer.asked_at is None]
            for answer in waiting[: AT_ONCE - unfinished]:
                raw.ask(answer)

    def _cancel(self, answer: Answer) -> None:
        if answer.asked_at is not None:
            super()._cancel(answer)

    def drain(self) -> None:
        super().drain()
        if self.raw is not None:
            self._ask(self.raw)


class LibraryParty(Party):
    """The client library in a thread of its own. The thread reads its streams one after the other."""

    is_connecting = False

    def begin(self) -> None:
        self.is_connecting = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            client = Client(endpoint=f"ipc://{self._front}", timeout=LIBRARY_WAIT_S, reconnect=False)
        except WireError as e:  # the supervisor had ended by then
            self.is_connecting = False
            for answer in self.answers.values():
                answer.lost = True
                answer.story.append((time.monotonic(), f"not connected: {e}"))
            return
        self.is_connecting = False
        with client:
            streams = []
            for answer in self.answers.values():
                ask = answer.ask
                answer.asked_at = time.monotonic()
                try:
                    stream = client.generate(ask.model, ask.prompt, max_tokens=ask.tokens, **ask.route)
                except WireError as e:
                    answer.refusals.append(e.to_wire())
                    continue
                streams.append((answer, stream))
            for answer, stream in streams:
                self._read(answer, stream)
            try:
                client.status()  # events that followed an end arrive before this reply
            except WireError:
                pass
            if client._connection.session.ignored:
                next(iter(self.answers.values())).heard.after_end += client._connection.session.ignored

    def _read(self, answer: Answer, stream: Any) -> None:
        heard = answer.heard
        for last in (False, True):  # the second round must yield nothing and raise nothing
            try:
                for delta in stream:
                    heard.after_end += last
                    heard.text += delta.text
                if not last:
                    heard.ends.append(str(stream.finish_reason))
                    heard.usage = dict(stream.usage)
            except ConnectionLost as e:
                heard.ends.append("connection_lost")
                heard.error = e.to_wire()
            except WireError as e:
                heard.ends.append(e.code.wire_name)
                heard.error = e.to_wire()
            if answer.ended_at is None:
                answer.ended_at = time.monotonic()
                heard.tokens = len(stream.token_ids)
                answer.story.append((answer.ended_at, f"{heard.tokens} tokens, {heard.ends} {heard.error or ''}"))

    @property
    def is_over(self) -> bool:
        return hasattr(self, "_thread") and not self._thread.is_alive()

    def close(self) -> None:
        if hasattr(self, "_thread"):
            self._thread.join(LIBRARY_WAIT_S)


class KilledParty(Party):
    """A client in a process of its own, which is killed by SIGKILL in the middle of its answers."""

    @property
    def is_connecting(self) -> bool:
        return self._has_begun and self._process.is_alive() and not self._ready.poll(0)

    def begin(self) -> None:
        self._has_begun = True
        mine, its = _FORKS.Pipe()
        asks = [(ask.request, ask.model, ask.prompt, ask.tokens) for ask in self.plan.asks]
        self._process = _FORKS.Process(target=_ask_and_wait, args=(str(self._front), asks, its), daemon=True)
        self._process.start()
        its.close()
        self._ready = mine
        for answer in self.answers.values():
            answer.asked_at, answer.lost = time.monotonic(), True

    def close(self) -> None:
        if self._has_begun and not self._ready.closed:
            self._process.kill()
            self._process.join()
            self._ready.close()


def _ask_and_wait(front: str, asks: list[tuple[int, str, str, int]], ready: Connection) -> None:
    with RawClient(f"ipc://{front}") as client:
        client.receive()  # WELCOME
        for request, model, prompt, tokens in asks:
            client.generate(request, model, prompt, max_tokens=tokens)
        ready.send_bytes(b"asked")
        try:
            while True:
                client.receive()
        except AssertionError:
            pass


def warm_up() -> None:
    """Start the process from which killed clients are forked. Its start takes a second."""
    process = _FORKS.Process(target=_nothing)
    process.start()
    process.join()


def _nothing() -> None:
    pass


KINDS: dict[str, type[Party]] = {
    "library": LibraryParty, "killed": KilledParty, "steady": SteadyParty, "rival": SteadyParty,
}  # fmt: skip


def party(plan: ClientPlan, runtime_dir: Path, directory: Path) -> Party:
    return KINDS.get(plan.kind, Party)(plan, runtime_dir, directory)
