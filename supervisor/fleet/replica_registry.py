"""Which models and workers there are: the ones configured, and while one takes another's place, both."""

import time
from collections import Counter
from itertools import count
from pathlib import Path

from supervisor import logs
from supervisor.config import Config, ModelSpec
from supervisor.fleet.replica import Replica
from supervisor.placement.admission import Admission
from supervisor.placement.gpu_requests import watched_pins
from supervisor.requests.scheduler import Scheduler


class ReplicaRegistry:
    """The records of all workers. For each record it keeps a worker slot in the scheduler and the watch on its GPUs."""

    def __init__(self, config: Config, scheduler: Scheduler, admission: Admission, runtime_dir: Path) -> None:
        self._config = config
        self._scheduler = scheduler
        self.admission = admission
        self.vram = admission.vram
        self._runtime_dir = runtime_dir
        self.replicas: dict[str, Replica] = {}
        """By ``Replica.name``, in the order of models.yaml."""
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
        """Forget a worker that is at rest; with a model's last, the model, unless it is configured."""
        del self.replicas[replica.name]
        self.vram.unwatch(replica.name)
        self.admission.removed(replica.name)
        self._scheduler.remove_worker(replica.name)
        if replica.model not in self._config.models and not self.of_model(replica.model):
            self._scheduler.remove_model(replica.model)

    def relabel(self, replica: Replica, label: str) -> None:
        """Change the name that people see. The worker's log keeps its path until the worker is started again."""
        replica.label = label
        self._generations[label] = max(self._generations[label], replica.generation)

    def respec(self, replica: Replica, spec: ModelSpec) -> None:
        """What its next process is to be."""
        replica.want_spec(spec)
        if replica.process is None:
            self._take_spec(replica)

    def hand_over(self, old: Replica, new: Replica) -> None:
        """From now on, ``new`` is the one that goes by their name."""
        old.give_label_to(new)
        self._sort()

    def fits_surge(self, old: Replica, spec: ModelSpec) -> bool:
        """Whether a successor can be loaded while ``old`` is there."""
        return self.admission.fits_surge(old.name, old.spec, spec, self._config.supervisor.vram_limit)

    def shown(self, label: str) -> Replica | None:
        """The worker that people call so."""
        return next((replica for replica in self.replicas.values() if replica.shown == label), None)

    def of_model(self, model: str) -> list[Replica]:
        """A model's workers; empty if there is none of that name."""
        return [replica for replica in self.replicas.values() if replica.model == model]

    def _sort(self) -> None:
        order = list(self._config.models)
        ranked = sorted(
            self.replicas.items(),
            key=lambda item: (
                order.index(item[1].model) if item[1].model in order else len(order),
                len(item[1].label),
                item[1].label,
                not item[1].current,
            ),
        )
        self.replicas = dict(ranked)

    def _take_spec(self, replica: Replica) -> None:
        replica.log_path = logs.log_path(self._runtime_dir, replica.label)
        if replica.take_desired_spec():
            self.vram.unwatch(replica.name)
            self._watch_vram(replica)

    def _watch_vram(self, replica: Replica) -> None:
        if pins := watched_pins(replica.spec):
            self.vram.watch(replica.name, pins)
