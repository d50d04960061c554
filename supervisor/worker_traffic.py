"""Handle what comes from workers: their frames over each port, and the ends of their processes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypedDict

from protocol import __version__
from protocol.codec import decode, decode_events, is_events, pack_body, unpack_body
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.limits import MAX_U64
from protocol.messages import (
    WORKER_TO_SUPERVISOR,
    AnswerMessage,
    Compiled,
    Events,
    Hello,
    Parked,
    Prefill,
    ProgressMessage,
    Ready,
    Slept,
    Stats,
    Woke,
)
from protocol.values import ReadWith, Unfit, Within, hints_of, read, reader
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replicas import Replica
from supervisor.ports.authorizer import RequestAuthorizer
from supervisor.ports.worker_port import WorkerPort
from supervisor.reactor import Reactor
from supervisor.requests.queue import WorkerSlot
from supervisor.requests.request import EffectQueue, PendingQueries
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.worker_events import TOKENS_PER_MS
from supervisor.workers.launcher import Launcher
from supervisor.workers.life import IllegalTransition

LAST_FRAMES_TURNS = 16
"""How many times the frames of workers are drained before the requests of a dead worker are handled."""


@dataclass(eq=False, repr=False)
class WorkerTraffic:
    """Handles the ends of workers, and all of their frames that compiled code does not pass on by itself.

    dropped  frames that were not handled: those of a former generation, and those of a worker that was killed
    """

    _launcher: Launcher
    _fleet: Fleet
    _scheduler: Scheduler
    _queries: PendingQueries
    _authorizer: RequestAuthorizer
    _effects: EffectQueue

    def __post_init__(self) -> None:
        self.dropped = 0

    def watch(self, reactor: Reactor, ports: Sequence[WorkerPort], run: Callable[[], None]) -> None:
        """Name a handler for each socket and descriptor that the loop waits for.

        run  carries out what the handlers have decided
        """
        for port in ports:
            reactor.watch(port.socket, partial(self._on_workers, port, run), busy=True)
        reactor.watch(self._launcher.descriptor, partial(self._on_ends, ports, run))
        self._launcher.watch(reactor)

    def slot_of(self, routing_id: bytes) -> WorkerSlot | None:
        """Return the worker slot for the fast path; None if all frames of this worker must pass through Python."""
        replica = self._living(routing_id)
        return None if replica is None else self._scheduler.worker_slot(replica.name)

    def _on_workers(self, port: WorkerPort, run: Callable[[], None]) -> bool:
        """Handle the frames that workers have sent to a port. Return whether there may be more."""
        for routing_id, frame in port.receive():
            self.handle(routing_id, frame)
            run()  # before compiled code passes on what this worker has sent next
        return port.more

    def _on_ends(self, ports: Sequence[WorkerPort], run: Callable[[], None]) -> None:
        """Handle the ends of workers, after the last frames that they sent.

        A complete answer may lie in the socket. It must not turn into ``worker_died`` because the pidfd was read first.
        """
        if ended := self._launcher.ended():
            for _ in range(LAST_FRAMES_TURNS):
                more = [self._on_workers(port, run) for port in ports]
                if not any(more):
                    break
        for process in ended:
            self._end_queries(self._fleet.registry.worker_of(process))
            self._fleet.on_exit(process)
            run()

    def _end_queries(self, replica: Replica) -> None:
        """Tell the clients that wait for this worker's answers that its process has ended."""
        message = f"{replica.name}: the worker process ended before it could answer"
        body = pack_body({"error": WireError(ErrorCode.WORKER_DIED, message).to_wire()})
        self._effects.extend(asker.reply(body) for asker in self._queries.worker_gone(replica.name))

    def handle(self, routing_id: bytes, frame: bytes | None) -> None:
        """Handle one frame. None stands for a message of several parts, which no worker sends."""
        replica = self._living(routing_id)
        if frame is None or replica is None:
            self.dropped += 1
            return
        try:
            self._handle(replica, frame)
        except (FrameError, IllegalTransition) as e:
            # The frame may have held the last event of a request. Without that event the request would wait for ever.
            # Or the worker breaks the protocol (READY before HELLO). Its requests go on in other workers.
            self.dropped += 1
            self._fleet.kill(replica, f"it sent what cannot be: {e}")

    def _living(self, routing_id: bytes) -> Replica | None:
        replica = self._fleet.registry.replica_of(routing_id)
        return None if replica is None or replica.killed_for is not None else replica

    def _handle(self, replica: Replica, frame: bytes) -> None:
        worker, fleet, scheduler = replica.name, self._fleet, self._scheduler
        match decode_events(frame) if is_events(frame) else decode(frame, WORKER_TO_SUPERVISOR):
            case Events() as message:
                self._effects.extend(scheduler.events(worker, frame, message, time.monotonic()))
                fleet.after_events(replica)
            case Prefill(channel, request, done, total):
                self._effects.extend(scheduler.prefill(worker, (channel, request), done, total))
            case Parked(channel, request):
                self._effects.extend(scheduler.parked(worker, (channel, request), time.monotonic()))
                fleet.after_events(replica)
            case Compiled(channel, request, party, milliseconds):
                now = time.monotonic()
                self._effects.extend(scheduler.compiled(worker, (channel, request), party, milliseconds, now))
                self._authorizer.charge_party(party, TOKENS_PER_MS * milliseconds)
            case AnswerMessage(ask, body):
                unpack_body(body)  # a body that is no map is the worker's fault, and no client could read it
                if (asker := self._queries.answered(worker, ask)) is not None:
                    self._effects.append(asker.reply(body))
            case Stats() as message:
                replica.stats = report_of(message)
            case ProgressMessage() as message:
                replica.progress = report_of(message)
                self._effects.extend(scheduler.report_loading(replica.model, replica.progress))
            case Hello() as message:
                report_of(message)
                fleet.connected(replica)
            case Ready() as message:
                fleet.loaded(replica, report_of(message))
            case Slept() as message:
                fleet.sleepers.slept(replica, report_of(message))
                fleet.starts.memory_came_back(worker)
            case Woke() as message:
                fleet.sleepers.woke(replica, report_of(message))
            case message:
                raise FrameError(ErrorCode.UNSUPPORTED, f"{message.kind.name} from a worker")


# Check the reports of workers. The supervisor keeps the reports, shows them to people and packs them for clients.
#
# A worker is our own program, but it reads files of others. So no report of a worker may stop the supervisor.


MAX_KEYS = 64
MAX_TEXT = 1000


class _Hello(TypedDict):
    build: str


class _Ready(TypedDict):
    context: Annotated[int, Within(1, MAX_U64)]
    max_jobs: Annotated[int, Within(1, MAX_U64)]
    load_seconds: float
    device: str
    attention: str
    decoding: str
    chat: bool
    template: str
    end_tokens: str
    parallel_tool_calls: bool
    tool_format: str | None
    tools_tried: bool
    sleep_bytes: int | None
    no_sleep: str
    reasoning_start: str | None
    reasoning_end: str | None


class _Moved(TypedDict):
    seconds: float
    host_bytes: int


class _Slept(_Moved):
    refused: str


class _Progress(TypedDict):
    phase: str
    done: int
    total: int
    unit: str


_REPORTS: dict[type, Any] = {Hello: _Hello, Ready: _Ready, ProgressMessage: _Progress, Slept: _Slept, Woke: _Moved}
"""The class of message → the values that its report must have. Stats may have any values."""


def _plain(value: Any) -> Any:
    if type(value) not in (int, float, str, bool, type(None)):
        raise ValueError("a report holds something else than names and plain values")
    if type(value) is str and len(value) > MAX_TEXT:
        raise ValueError(f"a report's text has {len(value)} characters (at most {MAX_TEXT})")
    return value


_PLAIN = dict[str, Annotated[Any, ReadWith(_plain)]]


def report_of(message: Hello | Ready | ProgressMessage | Slept | Woke | Stats) -> dict[str, Any]:
    """Return the report in a message: a map that holds no containers. Raises FrameError.

    The codec could not pack a map that is nested a thousand levels deep. A report may have more values than it must.
    """
    report, kind = unpack_body(message.body), _REPORTS.get(type(message))
    if len(report) > MAX_KEYS or any(len(key) > MAX_TEXT for key in report):
        raise FrameError(ErrorCode.BAD_FRAME, f"a report of {len(report)} entries (at most {MAX_KEYS})")
    try:
        reader(_PLAIN)(report, False)
        if kind is not None:
            read(kind, {key: report[key] for key in hints_of(kind) if key in report})
    except Unfit as e:
        problem = e.flaws[0].problem
        why = problem if isinstance(problem, str) else f"a report without {e.flaws[0].path[0]}"
        raise FrameError(ErrorCode.BAD_FRAME, why) from None
    if kind is _Hello and (build := report["build"]) != __version__:
        raise FrameError(ErrorCode.BAD_VERSION, f"a worker of build {build}, the supervisor is {__version__}")
    return report
