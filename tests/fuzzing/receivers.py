"""For each direction, all the checks that the product makes before it trusts the fields of a frame.

A receiver must raise nothing but WireError, for any bytes.
"""

from collections.abc import Callable

from protocol.chat import QUESTIONS, parse_question
from protocol.client.session import ClientSession
from protocol.codec import decode, unpack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import (
    CLIENT_TO_SUPERVISOR,
    SUPERVISOR_TO_WORKER,
    WORKER_TO_SUPERVISOR,
    AnswerMessage,
    Ask,
    Call,
    Compiled,
    Events,
    Generate,
    Hello,
    JobMessage,
    Parked,
    Prefill,
    ProgressMessage,
    Ready,
    Slept,
    Stats,
    Woke,
)
from protocol.request import parse_generate
from supervisor.requests.queue import QueueLimits
from supervisor.requests.request import read_route
from supervisor.requests.scheduler import Scheduler
from supervisor.worker_traffic import report_of

Receiver = Callable[[bytes], None]
_DOWN = WireError(ErrorCode.MODEL_NOT_RUNNING, "down")


def from_client(frame: bytes) -> None:
    """Read a client's frame: the head as the supervisor does, the body as the worker does."""
    message = decode(frame, CLIENT_TO_SUPERVISOR)
    if isinstance(message, Generate):
        read_route(message.route)
        parse_generate(message.body)
    elif isinstance(message, Call):
        if message.verb in QUESTIONS:
            parse_question(message.verb, message.body)
        unpack_body(message.body)


def to_worker(frame: bytes) -> None:
    """Read a frame as a worker does."""
    message = decode(frame, SUPERVISOR_TO_WORKER)
    if isinstance(message, JobMessage):
        parse_generate(message.body)
    elif isinstance(message, Ask):
        parse_question(message.verb, message.body)


class FromWorker:
    """The supervisor's reading of a worker's frames. Channel 1 has two requests in a worker of generation 1."""

    def __init__(self) -> None:
        self._scheduler = _scheduler()

    def __call__(self, frame: bytes) -> None:
        message = decode(frame, WORKER_TO_SUPERVISOR)
        if isinstance(message, Events):
            effects = self._scheduler.events("m", frame, message, 0.0)
            if effects:  # the frame was believed: a new scheduler gives the next frame running requests again
                self._scheduler = _scheduler()
        elif isinstance(message, Prefill):
            self._scheduler.prefill("m", (message.channel, message.request), message.done, message.total)
        elif isinstance(message, Parked):
            if self._scheduler.parked("m", (message.channel, message.request), 0.0):
                self._scheduler = _scheduler()
        elif isinstance(message, Compiled):
            self._scheduler.compiled("m", (message.channel, message.request), message.party, message.milliseconds, 0.0)
        elif isinstance(message, AnswerMessage):
            unpack_body(message.body)
        else:
            assert isinstance(message, Hello | Ready | ProgressMessage | Slept | Woke | Stats)
            report_of(message)


def _scheduler() -> Scheduler:
    scheduler = Scheduler(window=8)
    scheduler.add_model("m", QueueLimits(8, 1000))
    scheduler.add_worker("m", "m", _DOWN)
    scheduler.accept_new("m")
    scheduler.open("m", 1, 2, 0.0)
    for request in (1, 2):
        scheduler.submit(1, Generate(request, "m", {"progress": True}, b"\x80"), 0.0)
    return scheduler


class ToClient:
    """A client's reading of frames, with two requests and two calls under way. The session's ``receive`` must never
    raise, not even WireError."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._session = ClientSession("fuzzed")
        self._streams = [self._session.generate("m", {"prompt": "p"}) for _ in range(2)]
        for _ in range(2):
            self._session.call("status", {})

    def __call__(self, frame: bytes) -> None:
        touched = self._session.receive(frame)
        if touched:
            for stream in self._streams:
                try:
                    while self._session.take(stream) is not None:
                        pass
                except WireError:
                    pass
            self._begin()
        elif self._session.broken or self._session.goaway is not None:
            self._begin()


def receiver(direction: str) -> Receiver:
    """Return a new receiver for frames of this direction."""
    made: dict[str, Callable[[], Receiver]] = {
        "client_to_supervisor": lambda: from_client,
        "worker_to_supervisor": FromWorker,
        "supervisor_to_client": ToClient,
        "supervisor_to_worker": lambda: to_worker,
    }
    return made[direction]()
