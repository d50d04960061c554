"""The record of one worker of a configured model, and what ``status`` and errors say about the worker."""

import math
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol.errors import ErrorCode, WireError
from protocol.process.log_style import LogStyle
from supervisor.config import ModelSpec
from supervisor.placement import turns
from supervisor.placement.worker_memory import WorkerMemory
from supervisor.requests.scheduler import Scheduler
from supervisor.timers import Timer
from supervisor.workers.exits import ExitReport
from supervisor.workers.hang_detector import HangDetector
from supervisor.workers.launcher import Launched
from supervisor.workers.lifecycle import GOING_DOWN, WorkerState
from supervisor.workers.worker_life import Desired, RestartPolicy, WorkerLife

ROOM_RETRY_S = 10.0
"""Seconds for which requests for a lazy model are refused after a start that found no room."""

SPEEDS = 120
"""Values of ``tokens_per_s`` that are kept."""


class Replica:
    """The record of one worker of a model: its life, and its present process if there is one.

    ``life`` holds the state that is desired and the state that the worker is in. The specification of the next process
    and the right to the label are other facts: an order to start or stop changes neither. All three are written by
    methods of this class and of ``WorkerLife`` only.

    name   identifies the worker for good: "letters", or "letters:2" for the second of several workers. It is
           "letters~2" if another worker had the name "letters" when this one was made
    label  the name that people use, "letters" or "letters:2". During a surge two workers have the same label, and
           ``current`` says which of them the label means
    now    monotonic seconds
    """

    def __init__(
        self,
        name: str,
        label: str,
        spec: ModelSpec,
        policy: RestartPolicy,
        log_path: Path,
        now: float,
        *,
        current: bool = True,
        generation: int = 0,
    ) -> None:
        self.name = name
        self.label = label
        self.life = WorkerLife(name, now, policy)
        self._spec = self._desired_spec = spec
        self._current = current
        self.log_path = log_path
        self.log_begin: int | None = 0
        """Bytes that the log held before the present process."""
        self.generation = generation
        self.memory = WorkerMemory()
        """The GPU memory that the worker needs, and what its process holds."""
        self.process: Launched | None = None
        self.waits = ""
        """What a start or a wake waits for, for people; "" for nothing that takes long."""
        self.yields_to = ""
        """The model for whose load the worker takes no new requests; "" if it takes some."""
        self.routing_id = b""
        self.log_style = LogStyle()
        """How the present process writes its log."""
        self.killed_for: str | None = None
        """Why the supervisor killed the present process. None if it did not."""
        self.kill_reason = "killed"
        """The reason in the exit report of a process that the supervisor has killed."""
        self.detector: HangDetector | None = None
        """The progress of the present process. None if there is no process, or it does not show its progress."""
        self.last_exit: ExitReport | None = None
        self.last_exit_at = 0.0
        """The time of ``last_exit`` in seconds since 1970."""
        self.restarts = 0
        self.progress: dict[str, Any] = {}
        self._prepared: dict[str, Any] | None = None
        """``Launched.progress`` as ``prepared_further`` saw it last."""
        self.info: dict[str, Any] = {}
        """The contents of READY: context, max_jobs, device, attention, ..."""
        self.stats: dict[str, Any] = {}
        self.ladder: list[Timer] = []
        self.drain_timer: Timer | None = None
        self.backoff_timer: Timer | None = None
        self.last_active = 0.0
        self.stay_s: float | None = None
        """Idle seconds after which a request wants the worker to be unloaded; infinity for never, None for unset."""
        self.sleep_wanted: str | None = None
        """Why the worker is to sleep as soon as it has no request. None if nobody has ordered that."""
        self.host_bytes = 0
        """Host memory that the worker takes because it sleeps, or keeps for its next sleep."""
        self.wake_s: float | None = None
        """Seconds that its last wake took."""
        self.woken = 0
        """How many times the present process has been woken."""
        self.tokens_per_s = 0.0
        self.speeds: deque[float] = deque(maxlen=SPEEDS)
        """The newest values of ``tokens_per_s``, one for each second."""
        self.tokens_seen = 0

    @property
    def spec(self) -> ModelSpec:
        """The specification of the present process, or of the next one if there is none."""
        return self._spec

    @property
    def desired_spec(self) -> ModelSpec:
        """The specification of the next process. It differs from ``spec`` while a process of an older one runs."""
        return self._desired_spec

    def want_spec(self, spec: ModelSpec) -> None:
        """Set the specification of the next process. The caller calls ``take_desired_spec`` before it starts that."""
        self._desired_spec = spec

    def apply_settings(self, spec: ModelSpec) -> None:
        """Set a specification that differs only in keys that the supervisor reads. The present process goes on."""
        self._spec = self._desired_spec = spec

    def take_desired_spec(self) -> bool:
        """Make the desired specification the present one, before a process starts. Return whether it was another."""
        differs = self._desired_spec is not self._spec
        self._spec = self._desired_spec
        return differs

    @property
    def ttl(self) -> float | None:
        """The idle seconds after which the worker is unloaded; None for never."""
        config = self.spec.config
        if self.stay_s is None or not config.lazy or config.pinned:
            return config.ttl
        return None if self.stay_s == math.inf else self.stay_s

    @property
    def is_connected(self) -> bool:
        """Whether the process takes messages: it has said HELLO, and was not told to end."""
        return (
            self.process is not None
            and self.killed_for is None
            and self.state not in (WorkerState.STARTING, WorkerState.STOPPING)
        )

    @property
    def current(self) -> bool:
        """Whether the label means this worker, and not another one that has the same label."""
        return self._current

    def give_label_to(self, successor: "Replica") -> None:
        """Let the label mean another worker, which has been started to take this worker's place. It goes on with the
        speeds that the label has shown."""
        self._current, successor._current = False, True
        successor.speeds = self.speeds.copy()

    @property
    def model(self) -> str:
        return self.spec.name

    @property
    def shown(self) -> str:
        """The worker's name in ``status``. No two workers have the same one at the same time."""
        return self.label if self.current else f"{self.label}~{self.generation}"

    @property
    def log_name(self) -> str:
        """The name of the worker's log, which is the label that it had at its last start."""
        return self.log_path.stem

    @property
    def placed_on(self) -> str:
        """The GPUs of the present process, for people: their numbers where they are known, else as configured."""
        placed = self.memory.placed
        if self.process is not None and self.process.placed_on:
            return self.process.placed_on
        if placed is None:
            return self.spec.visible_devices or "cpu"
        return ", ".join(str(gpu.index) for gpu in placed.gpus) or placed.devices

    @property
    def state(self) -> WorkerState:
        return self.life.state

    @property
    def desired(self) -> Desired:
        """The state that the last order asked for."""
        return self.life.desired

    @property
    def lacks_room(self) -> bool:
        """Whether the last start found no room for a lazy model, or for one that was unloaded by an order. Others may
        make room, so it is tried again later."""
        comes_with_requests = self.spec.config.lazy or self.life.let_go
        return comes_with_requests and self.last_exit is not None and self.last_exit.reason == "no room"

    @property
    def is_away(self) -> bool:
        """Whether the model's files could not be read at the last start. It is tried again, perhaps for days."""
        away = self.last_exit is not None and self.last_exit.reason == "away"
        return away and self.state is WorkerState.BACKOFF

    @property
    def chat(self) -> bool | None:
        """Whether the model has a chat template. None until a worker has loaded it."""
        return self.info.get("chat")

    @property
    def tools(self) -> bool | None:
        """Whether the format of the model's calls of tools is known, and was tried with the chat template. None until a
        worker has loaded it."""
        return self.info.get("tools_tried")

    @property
    def reasoning(self) -> dict[str, str] | None:
        """The markers of the model's reasoning. None if it does not reason, or until a worker has loaded it."""
        start, end = self.info.get("reasoning_start"), self.info.get("reasoning_end")
        return None if start is None or end is None else {"start": start, "end": end}

    @property
    def may_be_evicted(self) -> bool:
        """Whether the worker may be unloaded to make room for another model. Its next request starts it again."""
        return self.spec.config.lazy and not self.spec.config.pinned

    def stays_s(self, now: float) -> float:
        """Return for how many seconds the worker need not make room for another model while it is busy. Infinity while
        it is on its way up."""
        if self.state is not WorkerState.READY:
            return math.inf
        came_up_s = self.wake_s if self.woken else self.info.get("load_seconds")
        return turns.stays_s(now - self.life.since, float(came_up_s or 0))

    @property
    def can_sleep(self) -> bool:
        """Whether the loaded worker can be put to sleep."""
        return self.info.get("sleep_bytes") is not None and self.spec.may_sleep

    @property
    def sleep_bytes(self) -> int:
        """The host memory that the worker takes while it sleeps; 0 if it cannot sleep, or was not loaded yet."""
        return self.info.get("sleep_bytes") or 0

    @property
    def reason(self) -> str | None:
        """Why the worker is in its state, in one line: how its last process ended, or why it was unloaded. None in
        states that need no reason."""
        ended = self.last_exit.message if self.last_exit is not None else None
        if self.state in (WorkerState.FAILED, WorkerState.BACKOFF):
            return ended
        if self.state is WorkerState.ASLEEP:
            return self.life.unload_cause
        if self.state in (WorkerState.STARTING, WorkerState.WAKING):
            return self.waits or (self.process.waits if self.process is not None else "") or None
        if self.state is WorkerState.READY and self.yields_to:
            return f"takes no new requests: {self.yields_to} waits for its place"
        if self.state is not WorkerState.UNLOADED:
            return None
        return self.life.unload_cause or (ended if self.lacks_room else "lazy: its first request starts it")

    def how_far(self) -> dict[str, Any] | None:
        """Return how far the load is, or what comes before it; None at other times."""
        return self.progress or (self.process.progress if self.process is not None else None) or None

    def prepared_further(self) -> dict[str, Any] | None:
        """Return how far the launcher is with what comes before the load, such as copying the model's directories. None
        if it is no further than at the last call."""
        before, self._prepared = self._prepared, self.process.progress if self.process is not None else None
        return self._prepared if self._prepared != before else None

    def refusal(self) -> WireError:
        """Return the error for new requests if no worker of the model takes any."""
        name = self.model
        if self.state is WorkerState.FAILED:
            why = self.last_exit.message if self.last_exit else "unknown"
            if self.lacks_room:
                again = f"model {name!r} cannot be loaded now: {why}; a request may try again in {ROOM_RETRY_S:g} s"
                return WireError(ErrorCode.MODEL_FAILED, again, retry_after_ms=int(1000 * ROOM_RETRY_S))
            return WireError(
                ErrorCode.MODEL_FAILED, f"model {name!r} failed: {why}; mend that, then `modelctl start {name}`"
            )
        if self.state is WorkerState.ASLEEP:
            again = f"model {name!r} cannot wake now: {self.life.unload_cause}"
            return WireError(ErrorCode.MODEL_FAILED, again, retry_after_ms=int(1000 * ROOM_RETRY_S))
        if self.state in GOING_DOWN:
            return WireError(ErrorCode.DRAINING, f"model {name!r} is being stopped", retry_after_ms=1000)
        return WireError(
            ErrorCode.MODEL_NOT_RUNNING, f"model {name!r} is stopped; start it with `modelctl start {name}`"
        )

    def describe(self, scheduler: Scheduler, now: float) -> dict[str, Any]:
        """Return what ``status`` shows about the worker. ``queued`` and ``totals`` are those of its model."""
        running, _ = scheduler.work(self.name)
        config = self.spec.config
        idle = self.state in (WorkerState.READY, WorkerState.ASLEEP) and not running
        return {
            "name": self.shown,
            "model": self.model,
            "state": str(self.state),
            "reason": self.reason,
            "state_s": round(now - self.life.since, 1),
            "folder": None if self.spec.folder is None else str(self.spec.folder),
            "engine": config.engine,
            "gpu": self.spec.visible_devices or "cpu",
            "device": self.info.get("device"),
            "attention": self.info.get("attention"),
            "decoding": self.info.get("decoding") or None,
            "context": self.info.get("context") or config.max_seq_len,
            "max_batch_size": config.max_batch_size,
            "chat": self.chat,
            "template": self.info.get("template") or None,
            "end_tokens": self.info.get("end_tokens") or None,
            "tool_format": self.info.get("tool_format"),
            "parallel_tool_calls": self.info.get("parallel_tool_calls"),
            "reasoning": self.reasoning,
            "active": scheduler.computed(self.name),
            "queued": scheduler.queued(self.model),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "idle_s": round(now - self.last_active, 1) if idle else None,
            "until_s": None
            if not idle or (ttl := self.ttl) is None
            else round(max(0.0, ttl - now + self.last_active), 1),
            "lazy": config.lazy,
            "can_sleep": self.can_sleep,
            "host_bytes": self.host_bytes,
            "wake_s": self.wake_s,
            "unloaded": self.life.unload_cause,
            "pid": self.process.pid if self.process else None,
            "node": self.spec.config.node if self.process is None else None,  # the process describes itself
            **(self.detector.describe() if self.process and self.detector else {"phase": None, "beat_s": None}),
            "generation": self.generation,
            "restarts": self.restarts,
            "load_seconds": self.info.get("load_seconds"),
            "progress": self.how_far(),
            "engine_stats": self.stats,
            "totals": scheduler.totals(self.model),
            "last_exit": asdict(self.last_exit) | {"time": round(self.last_exit_at, 3)} if self.last_exit else None,
            "log": str(self.log_path),
        }
