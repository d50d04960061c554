"""One worker on another machine, as the supervisor knows it from its agent."""

import signal
from collections.abc import Callable
from typing import Any

from protocol.process.progress_lease import Reading, read_word
from protocol.process.worker_spec import WorkerSpec
from supervisor.cluster.agent_messages import BEAT_S, Admitted, Beat, Gpus, Refused, Signal, Stacks, ToAgent
from supervisor.workers.machines import Elsewhere, is_name

SILENT_S = 4 * BEAT_S
"""Seconds without a beat after which the last one says nothing about the worker any more."""


class RemoteWorker:
    """A worker on another machine, see ``launcher.Launched``.

    spec      the specification, with the keys of its present try
    elsewhere  what it wants of the machine
    tell      sends a message to the agent; kill  ends the worker, whatever its agent does

    node      the name of the machine
    pid       the process's pid there; 0 until the agent has started it
    waits     why no agent could be started yet; "" once one was
    progress  how far its directories are copied; None at other times
    lost      why the worker counts as ended although nobody has seen its end; "" otherwise
    refusals  machine → why the worker was not started there, by this start
    passed    GPUs of the machine on which there was no room
    held      the numbers of the agents that hold the leases of these GPUs, so that Ray leases others
    """

    def __init__(
        self,
        spec: WorkerSpec,
        elsewhere: Elsewhere,
        tell: Callable[["RemoteWorker", ToAgent], None],
        kill: Callable[["RemoteWorker"], None],
    ) -> None:
        self.spec, self.elsewhere = spec, elsewhere
        self._tell, self._kill = tell, kill
        self.refusals: dict[str, Refused] = {}
        self.passed: set[int] = set()
        self.held: list[int] = []
        self.waits = self.lost = ""
        self.code: int | None = None
        self.refused: tuple[str, str, bool] | None = None
        self.admitted: Admitted | None = None
        self.gpus: Gpus | None = None
        self.begin(0, b"", spec)

    def begin(self, number: int, agent_id: bytes, spec: WorkerSpec) -> None:
        """Forget what an earlier agent has told. The next one has this number, routing id and keys."""
        self.number, self.agent_id, self.spec = number, agent_id, spec
        self.node = self.elsewhere.node if is_name(self.elsewhere.node) else ""
        self.pid = 0
        self.progress: dict[str, Any] | None = None
        self.up = False
        self.silent_s = 0.0
        """Seconds counted since the last message of the agent."""
        self.beat = Beat(_first_word(spec.leases.start_s), None, "its machine has not answered yet")

    def started(self, pid: int) -> None:
        """Take note that the agent has started the process."""
        self.pid, self.progress = pid, None
        self.beat = Beat(_first_word(self.spec.leases.start_s), None, "it was just started")

    @property
    def is_gone(self) -> bool:
        return self.code is not None

    def signal(self, number: int) -> None:
        """Send a signal to the worker. One whose agent is not up yet can only be killed."""
        if self.is_gone:
            return
        if self.up:
            self._tell(self, Signal(number))
        elif number == signal.SIGKILL or self.waits:
            self._kill(self)

    def read_lease(self) -> Reading | None:
        # A worker does not hang because its network is cut. ``RemoteLauncher.check`` counts how long it is silent. One
        # that waits for a machine, or for its directories, or whose machine sees whether it fits, has not begun.
        if self.waits or self.silent_s > SILENT_S or (self.up and not self.pid):
            return None
        return read_word(self.beat.word)

    def dump_stacks(self) -> None:
        if not self.is_gone:
            self._tell(self, Stacks())

    def condition(self) -> str:
        return self.beat.condition

    def memory(self) -> int | None:
        return self.beat.memory

    @property
    def placed_on(self) -> str:
        """The machine and the GPUs, for people."""
        gpus = ", ".join(map(str, self.admitted.gpus)) if self.admitted else ""
        return f"{self.node}: {gpus}" if gpus else self.node or "another machine"

    @property
    def leases(self) -> dict[str, int]:
        return {self.node: self.elsewhere.gpus}

    def describe(self) -> dict[str, Any]:
        """Return its machine, or ``node`` of models.yaml while it waits for one, and the fields of
        ``WorkerMemory.describe`` and ``Vram.describe`` that the machine has told."""
        told = self.admitted
        held = {} if self.gpus is None else {str(index): size for index, size in self.gpus.held}
        sizes = [size for size in held.values() if size is not None]
        return {
            "node": self.elsewhere.node if self.waits else self.node,
            "placed": told.gpus or None if told else None,
            "cpus": told.cpus if told else None,
            "numa_nodes": told.nodes if told else None,
            "vram_estimate_bytes": sum(told.parts.values()) or None if told else None,
            "vram_estimate": told.parts or None if told else None,
            "vram_loaded_bytes": self.gpus.loaded if self.gpus else None,
            "vram_bytes": sum(sizes) if sizes else None,
            "vram_by_gpu": held or None,
        }


def _first_word(start_s: float) -> int:
    """Return the word of a lease that a worker has before it writes its own: phase STARTING is 0."""
    return min(round(start_s * 1000), 0xFFFFFFF)
