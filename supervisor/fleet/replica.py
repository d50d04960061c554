"""The record of one worker of a configured model, and what people and clients are told of it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol.errors import ErrorCode, WireError
from supervisor.config import ModelSpec
from supervisor.requests.scheduler import Scheduler
from supervisor.timers import Timer
from supervisor.workers.exits import ExitReport
from supervisor.workers.hang_detector import HangDetector
from supervisor.workers.launcher import Launched
from supervisor.workers.lifecycle import GOING_DOWN, ModelLife, WorkerState
from supervisor.workers.restart import RestartHistory, RestartPolicy
from supervisor.workers.stop_ladder import LadderTimes

ROOM_RETRY_S = 10.0
"""How long requests for a lazy model are refused after it has found no room."""


class Replica:
    """One worker of a model: its state, and its present process if there is one.

    name    its own alone, for good: "letters", or "letters:2" (the second of several workers); "letters~2" where there
            was one of that name when it was made
    label   what people call it, "letters" or "letters:2", once it is ``current``; two workers share one while the
            one takes the other's place
    """

    def __init__(self, name: str, label: str, spec: ModelSpec, policy: RestartPolicy, log_path: Path) -> None:
        self.name = name
        self.label = label
        self.current = True
        self.spec = spec
        self.coming: ModelSpec | None = None
        """What its next process is to be, where that differs."""
        self.life = ModelLife(name)
        self.history = RestartHistory(policy)
        self.log_path = log_path
        self.log_begin = 0
        """Bytes that the log held before the present process."""
        self.wanted = False
        """An operator wants it up; a START that came while it went down is repeated when it is stopped."""
        self.on_demand = False
        """Once it is stopped it sleeps: a request may start it again."""
        self.unload_cause: str | None = None
        """Why it was sent to sleep, while it sleeps."""
        self.generation = 0
        self.process: Launched | None = None
        self.routing_id = b""
        self.killed_for: str | None = None
        """Why the supervisor itself killed the present process."""
        self.kill_reason = "killed"
        """The reason of its exit then."""
        self.detector: HangDetector | None = None
        """How the present process gets on; None if there is none, or it does not show that."""
        self.last_exit: ExitReport | None = None
        self.restarts = 0
        self.progress: dict[str, Any] = {}
        self.info: dict[str, Any] = {}
        """What READY said: context, max_jobs, device, attention, ..."""
        self.stats: dict[str, Any] = {}
        self.ladder: list[Timer] = []
        self.ladder_times: LadderTimes | None = None
        self.drain_timer: Timer | None = None
        self.backoff_timer: Timer | None = None
        self.last_active = 0.0
        self.tokens_per_s = 0.0
        self.tokens_seen = 0

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def shown(self) -> str:
        """What it is called in ``status``; no two at once are called the same."""
        return self.label if self.current else f"{self.label}~{self.generation}"

    @property
    def log_name(self) -> str:
        """The name of its log: its label when it was started last."""
        return self.log_path.stem

    @property
    def state(self) -> WorkerState:
        return self.life.state

    @property
    def comes_again(self) -> bool:
        """Whether requests may wait for it although it is on its way down."""
        return (self.wanted or self.on_demand) and self.state is not WorkerState.FAILED

    @property
    def lacks_room(self) -> bool:
        """It has failed for want of memory that others may give back: the next request but one may try again."""
        return self.spec.config.lazy and self.last_exit is not None and self.last_exit.reason == "no room"

    @property
    def chat(self) -> bool | None:
        """Whether the model has a chat template. None until a worker has loaded it."""
        return self.info.get("chat")

    @property
    def may_be_evicted(self) -> bool:
        """Whether it may be unloaded for another model: it comes back with its next request."""
        return self.spec.config.lazy and not self.spec.config.pinned

    @property
    def reason(self) -> str | None:
        """Why the worker is in its state, in one line: the end of its last process, or the reason for its sleep. None
        in states that need no reason."""
        ended = self.last_exit.message if self.last_exit is not None else None
        if self.state in (WorkerState.FAILED, WorkerState.BACKOFF):
            return ended
        if self.state is not WorkerState.UNLOADED:
            return None
        return self.unload_cause or (ended if self.lacks_room else "lazy: its first request starts it")

    def refusal(self) -> WireError:
        """What a new request is told if no worker of the model takes any."""
        name = self.model
        if self.state is WorkerState.FAILED:
            why = self.last_exit.message if self.last_exit else "unknown"
            if self.lacks_room:
                again = f"model {name!r} cannot be loaded now: {why}; a request may try again in {ROOM_RETRY_S:g} s"
                return WireError(ErrorCode.MODEL_FAILED, again, retry_after_ms=int(1000 * ROOM_RETRY_S))
            return WireError(
                ErrorCode.MODEL_FAILED, f"model {name!r} failed: {why}; mend that, then `modelctl start {name}`"
            )
        if self.state in GOING_DOWN:
            return WireError(ErrorCode.DRAINING, f"model {name!r} is being stopped", retry_after_ms=1000)
        return WireError(
            ErrorCode.MODEL_NOT_RUNNING, f"model {name!r} is stopped; start it with `modelctl start {name}`"
        )

    def describe(self, scheduler: Scheduler, now: float) -> dict[str, Any]:
        """The worker as ``status`` shows it. ``queued`` and ``totals`` are those of its model."""
        running, _ = scheduler.work(self.name)
        _, waiting = scheduler.counts(self.model)
        config = self.spec.config
        idle = self.state is WorkerState.READY and not running
        return {
            "name": self.shown,
            "model": self.model,
            "state": str(self.state),
            "reason": self.reason,
            "state_s": round(now - self.life.since, 1),
            "engine": config.engine,
            "gpu": self.spec.visible_devices or "cpu",
            "device": self.info.get("device"),
            "attention": self.info.get("attention"),
            "context": self.info.get("context") or config.max_seq_len,
            "max_batch_size": config.max_batch_size,
            "chat": self.chat,
            "active": running,
            "queued": waiting,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "idle_s": round(now - self.last_active, 1) if idle else None,
            "until_s": round(max(0.0, config.ttl - now + self.last_active), 1) if idle and config.ttl else None,
            "lazy": config.lazy,
            "unloaded": self.unload_cause,
            "pid": self.process.pid if self.process else None,
            **(self.detector.describe() if self.process and self.detector else {"phase": None, "beat_s": None}),
            "generation": self.generation,
            "restarts": self.restarts,
            "load_seconds": self.info.get("load_seconds"),
            "progress": self.progress or None,
            "engine_stats": self.stats,
            "totals": scheduler.totals(self.model),
            "last_exit": asdict(self.last_exit) if self.last_exit else None,
            "log": str(self.log_path),
        }
