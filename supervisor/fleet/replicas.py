"""The record of one worker of a configured model, and what ``status`` and errors say about the worker."""

import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import InitVar, asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from protocol.codec import encode
from protocol.errors import ErrorCode, WireError
from protocol.messages import SetLogStyle
from protocol.process.shown import LogStyle
from supervisor.config.file import Config, ModelSpec
from supervisor.logs import files
from supervisor.logs.files import LogStyles
from supervisor.placement import eviction
from supervisor.placement.estimates import watched_pins
from supervisor.placement.memory import WorkerMemory
from supervisor.placement.vram import Vram
from supervisor.reactor import Timer
from supervisor.requests.request import Awaited, ToWorker
from supervisor.requests.scheduler import Scheduler
from supervisor.workers.exits import ExitReport
from supervisor.workers.launcher import Launched
from supervisor.workers.life import GOING_DOWN, Desired, HangDetector, RestartPolicy, WorkerLife, WorkerState

ROOM_RETRY_S = 10.0
"""Seconds for which requests for a lazy model are refused after a start that found no room."""

SPEEDS = 120
"""Values of ``tokens_per_s`` that are kept."""


@dataclass(eq=False, repr=False)
class Replica:
    """The record of one worker of a model: its life, and its present process if there is one.

    ``life`` holds the state that is desired and the state that the worker is in. The specification of the next process
    and the right to the label are other facts: an order to start or stop changes neither. ``ReplicaRegistry`` and
    ``Fleet.adopt_settings`` change them.

    name   identifies the worker for good: "letters", or "letters:2" for the second of several workers. It is
           "letters~2" if another worker had the name "letters" when this one was made
    label  the name that people use, "letters" or "letters:2". While a new worker starts beside
           an old one, both have the same label, and ``current`` says which of them the label means
    now    monotonic seconds
    """

    name: str
    label: str
    spec: ModelSpec
    """The specification of the present process, or of the next one if there is none."""
    policy: InitVar[RestartPolicy]
    log_path: Path
    now: InitVar[float]
    current: bool = True
    """Whether the label means this worker, and not another one that has the same label."""
    generation: int = 0
    log_begin: int | None = 0
    """Bytes that the log held before the present process."""
    memory: WorkerMemory = field(default_factory=WorkerMemory)
    """The GPU memory that the worker needs, and what its process holds."""
    process: Launched | None = None
    waits: str = ""
    """What a start or a wake waits for, for people; "" for nothing that takes long."""
    yields_to: str = ""
    """The model for whose load the worker takes no new requests; "" if it takes some."""
    routing_id: bytes = b""
    log_style: LogStyle = field(default_factory=LogStyle)
    """How the present process writes its log."""
    killed_for: str | None = None
    """Why the supervisor killed the present process. None if it did not."""
    kill_reason: str = "killed"
    """The reason in the exit report of a process that the supervisor has killed."""
    detector: HangDetector | None = None
    """The progress of the present process. None if there is no process, or it does not show its progress."""
    last_exit: ExitReport | None = None
    last_exit_at: float = 0.0
    """The time of ``last_exit`` in seconds since 1970."""
    restarts: int = 0
    progress: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    """The contents of READY: context, max_jobs, device, attention, ..."""
    stats: dict[str, Any] = field(default_factory=dict)
    ladder: list[Timer] = field(default_factory=list)
    drain_timer: Timer | None = None
    backoff_timer: Timer | None = None
    last_active: float = 0.0
    stay_s: float | None = None
    """Idle seconds after which a request wants the worker to be unloaded; infinity for never, None for unset."""
    sleep_wanted: str | None = None
    """Why the worker is to sleep as soon as it has no request. None if nobody has ordered that."""
    host_bytes: int = 0
    """Host memory that the worker takes because it sleeps, or keeps for its next sleep."""
    wake_s: float | None = None
    """Seconds that its last wake took."""
    woken: int = 0
    """How many times the present process has been woken."""
    tokens_per_s: float = 0.0
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=SPEEDS))
    """The newest values of ``tokens_per_s``, one for each second."""
    tokens_seen: int = 0

    def __post_init__(self, policy: RestartPolicy, now: float) -> None:
        self.life = WorkerLife(self.name, now, policy)
        self.desired_spec = self.spec
        """The specification of the next process. It differs from ``spec`` while an older process runs."""
        self._prepared: dict[str, Any] | None = None
        """``Launched.progress`` as ``prepared_further`` saw it last."""

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
    def makes(self) -> str | None:
        """What a model makes that writes no text: "vectors" or "scores". None until a worker has loaded it."""
        return {"embed": "vectors", "rerank": "scores"}.get(self.info.get("verb", ""))

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
        return eviction.stays_s(now - self.life.since, float(came_up_s or 0))

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
            "max_batch_size": config.together,
            "chat": self.chat,
            "makes": self.makes,
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


# The registry of all workers: those that models.yaml asks for, and their successors that start beside them.


class ReplicaRegistry:
    """The records of all workers. For each record it keeps a worker slot in the scheduler and the watch on its GPUs."""

    def __init__(self, config: Config, scheduler: Scheduler, vram: Vram, runtime_dir: Path) -> None:
        self.config = config
        """The configuration that was read last. During a reload, and after one that failed, some workers still run an
        older one."""
        self._scheduler = scheduler
        self._vram = vram
        self._runtime_dir = runtime_dir
        self.log_styles = LogStyles(config.supervisor.log_style)
        self.replicas: dict[str, Replica] = {}
        """By ``Replica.name``, in the order of models.yaml."""
        self._by_routing_id: dict[bytes, Replica] = {}
        self._generations: Counter[str] = Counter()
        """By label."""
        self._serial = count(2)
        for spec in config.models.values():
            scheduler.add_model(spec.name, spec.queue_limits)
            for label in spec.workers:
                self.add(label, spec)

    @property
    def models(self) -> list[str]:
        """The names of the models that have workers, in the order of models.yaml."""
        return list(dict.fromkeys(replica.model for replica in self.replicas.values()))

    def log_orders(self, replicas: Iterable[Replica]) -> list[ToWorker]:
        """Return a message for each of these workers that writes its log otherwise than ``styles`` says. One that
        is not connected yet is asked again when it is."""
        orders = []
        for replica in replicas:
            style = self.log_styles.of(replica.model)
            if replica.is_connected and replica.log_style != style:
                replica.log_style = style
                frame = encode(SetLogStyle(style.level, style.format))
                orders.append(ToWorker(replica.name, replica.generation, frame))
        return orders

    def adopt(self, config: Config) -> None:
        """Take over a new configuration. The caller starts, stops and exchanges the workers."""
        self.config = config
        for replica in self.replicas.values():
            replica.life.history.policy = config.supervisor.restart_policy
        self._sort()

    def add(self, label: str, spec: ModelSpec, *, replaces: Replica | None = None) -> Replica:
        """Add a worker of a known model.

        replaces  the worker whose place the new one will take, after a turnover; None for one more worker
        """
        name = label if label not in self.replicas else f"{label}~{next(self._serial)}"
        log_path = files.log_path(self._runtime_dir, label)
        replica = Replica(
            name,
            label,
            spec,
            self.config.supervisor.restart_policy,
            log_path,
            time.monotonic(),
            current=replaces is None,
            generation=self._generations[label] + (replaces is not None),  # tells it from the worker that it replaces
        )
        self.replicas[name] = replica
        self._sort()
        self._scheduler.add_worker(spec.name, name, replica.refusal())
        self._watch_vram(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Forget a worker that is at rest. Forget its model, too, if it has no other worker and is not configured."""
        del self.replicas[replica.name]
        self._vram.unwatch(replica.name)
        self._scheduler.remove_worker(replica.name)
        if replica.model not in self.config.models and not self.of_model(replica.model):
            self._scheduler.remove_model(replica.model)

    def relabel(self, replica: Replica, label: str) -> None:
        """Change the name that people see. The worker's log keeps its path until the worker is started again."""
        replica.label = label
        self._generations[label] = max(self._generations[label], replica.generation)

    def respec(self, replica: Replica, spec: ModelSpec) -> None:
        """Set the specification of a worker's next process."""
        replica.desired_spec = spec
        if replica.process is None:
            self._take_spec(replica)

    def hand_over(self, old: Replica, new: Replica) -> None:
        """Let the label of two workers mean the new one, which goes on with the speeds that the label has shown."""
        old.current, new.current, new.speeds = False, True, old.speeds.copy()
        self._sort()

    def new_generation(self, replica: Replica) -> None:
        """Prepare the record of a worker, and its log, for its next process."""
        self._take_spec(replica)
        self._generations[replica.label] += 1
        replica.generation = self._generations[replica.label]
        replica.routing_id = b"W" + os.urandom(16)
        replica.memory = WorkerMemory()
        replica.info, replica.progress, replica.killed_for, replica.detector = {}, {}, None, None
        replica.log_begin = files.prepare(replica.log_path)

    def launched(self, replica: Replica, process: Launched) -> None:
        """Store the new process of a worker."""
        replica.process = process
        self._by_routing_id[replica.routing_id] = replica

    def process_ended(self, replica: Replica) -> None:
        """Remove the process of a worker, because it has ended."""
        replica.process = replica.memory.holding = None
        replica.host_bytes, replica.woken, replica.sleep_wanted = 0, 0, None
        self._by_routing_id.pop(replica.routing_id, None)

    def replica_of(self, routing_id: bytes) -> Replica | None:
        """Return the worker whose present process has this routing id; None if there is none."""
        return self._by_routing_id.get(routing_id)

    def worker_of(self, process: Launched) -> Replica:
        """Return the worker whose present process this is."""
        return next(replica for replica in self.replicas.values() if replica.process is process)

    def is_idle(self, replica: Replica) -> bool:
        """Return whether a worker is ready and has nothing to do."""
        running, _ = self._scheduler.work(replica.name)
        _, waiting = self._scheduler.counts(replica.model)
        return replica.state is WorkerState.READY and not running and not waiting

    def may_leave(self, replica: Replica) -> bool:
        """Return whether a worker is idle, or yields to another model and has finished the requests that it had."""
        return self.is_idle(replica) or (
            replica.state is WorkerState.READY and self._scheduler.has_finished(replica.name)
        )

    def awaited(self, workers: Iterable[str]) -> Awaited:
        """Return the models of these workers, each with the number of requests that they have."""
        counted: Counter[str] = Counter()
        for worker in workers:
            counted[self.replicas[worker].model] += self._scheduler.work(worker)[0]
        return tuple(counted.items())

    def shown(self, label: str) -> Replica | None:
        """Return the worker that ``status`` shows under this name. None if there is none."""
        return next((replica for replica in self.replicas.values() if replica.shown == label), None)

    def of_model(self, model: str) -> list[Replica]:
        """Return the workers of a model. Empty if no model has that name."""
        return [replica for replica in self.replicas.values() if replica.model == model]

    def _sort(self) -> None:
        order = {model: place for place, model in enumerate(self.config.models)}
        ranked = sorted(
            self.replicas.items(),
            key=lambda item: (
                order.get(item[1].model, len(order)),
                len(item[1].label),
                item[1].label,
                not item[1].current,
            ),
        )
        self.replicas = dict(ranked)

    def _take_spec(self, replica: Replica) -> None:
        replica.log_path = files.log_path(self._runtime_dir, replica.label)
        if replica.spec is not replica.desired_spec:
            replica.spec = replica.desired_spec
            self._vram.unwatch(replica.name)
            self._watch_vram(replica)

    def _watch_vram(self, replica: Replica) -> None:
        if pins := watched_pins(replica.spec):
            self._vram.watch(replica.name, pins)
