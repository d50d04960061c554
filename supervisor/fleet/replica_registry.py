"""The registry of all workers: those that models.yaml asks for, and their successors during a surge."""

import os
import time
from collections import Counter
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from protocol.codec import encode
from protocol.messages import SetLogStyle
from supervisor import logs
from supervisor.config import Config, ModelSpec
from supervisor.fleet.replica import Replica
from supervisor.log_styles import LogStyles
from supervisor.placement.gpu_requests import watched_pins
from supervisor.placement.vram import Vram
from supervisor.placement.worker_memory import WorkerMemory
from supervisor.requests.in_flight import Awaited, ToWorker
from supervisor.requests.scheduler import Scheduler
from supervisor.workers.launcher import Launched
from supervisor.workers.lifecycle import WorkerState


class ReplicaRegistry:
    """The records of all workers. For each record it keeps a worker slot in the scheduler and the watch on its GPUs."""

    def __init__(self, config: Config, scheduler: Scheduler, vram: Vram, runtime_dir: Path) -> None:
        self._config = config
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
    def config(self) -> Config:
        """The configuration that was read last. During a reload, and after one that failed, some workers still run an
        older one."""
        return self._config

    @property
    def models(self) -> list[str]:
        """The names of the models that have workers, in the order of models.yaml."""
        return list(dict.fromkeys(replica.model for replica in self.replicas.values()))

    def log_orders(self, replicas: Iterable[Replica]) -> list[ToWorker]:
        """Return a message for each of these workers that writes its log otherwise than ``log_styles`` says. One that
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
        self._config = config
        for replica in self.replicas.values():
            replica.life.history.policy = config.supervisor.restart_policy
        self._sort()

    def add(self, label: str, spec: ModelSpec, *, replaces: Replica | None = None) -> Replica:
        """Add a worker of a known model.

        replaces  the worker whose place the new one will take, after a rollout by surge; None for one more worker
        """
        name = label if label not in self.replicas else f"{label}~{next(self._serial)}"
        log_path = logs.log_path(self._runtime_dir, label)
        replica = Replica(
            name,
            label,
            spec,
            self._config.supervisor.restart_policy,
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
        if replica.model not in self._config.models and not self.of_model(replica.model):
            self._scheduler.remove_model(replica.model)

    def relabel(self, replica: Replica, label: str) -> None:
        """Change the name that people see. The worker's log keeps its path until the worker is started again."""
        replica.label = label
        self._generations[label] = max(self._generations[label], replica.generation)

    def respec(self, replica: Replica, spec: ModelSpec) -> None:
        """Set the specification of a worker's next process."""
        replica.want_spec(spec)
        if replica.process is None:
            self._take_spec(replica)

    def hand_over(self, old: Replica, new: Replica) -> None:
        """Let the label of two workers mean the new one."""
        old.give_label_to(new)
        self._sort()

    def new_generation(self, replica: Replica) -> None:
        """Prepare the record of a worker, and its log, for its next process."""
        self._take_spec(replica)
        self._generations[replica.label] += 1
        replica.generation = self._generations[replica.label]
        replica.routing_id = b"W" + os.urandom(16)
        replica.memory = WorkerMemory()
        replica.info, replica.progress, replica.killed_for, replica.detector = {}, {}, None, None
        replica.log_begin = logs.prepare(replica.log_path)

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

    def lacks_worker(self, model: str) -> bool:
        """Return whether requests wait for a model of which no worker takes any now."""
        return self._scheduler.lacks_worker(model)

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
        order = {model: place for place, model in enumerate(self._config.models)}
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
        replica.log_path = logs.log_path(self._runtime_dir, replica.label)
        if replica.take_desired_spec():
            self._vram.unwatch(replica.name)
            self._watch_vram(replica)

    def _watch_vram(self, replica: Replica) -> None:
        if pins := watched_pins(replica.spec):
            self._vram.watch(replica.name, pins)
