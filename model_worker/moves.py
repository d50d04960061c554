"""Put the model of a worker to sleep, and wake it. The supervisor orders both, and only while the worker has no job."""

import time
from typing import TYPE_CHECKING, cast

from model_worker.engine import Engine, SleepRefused

if TYPE_CHECKING:
    from model_worker.engine import SleepingEngine
    from model_worker.link import SupervisorLink
    from protocol.process.progress_lease import ProgressLease


class Moves:
    """The moves of one model between the memory of its GPU and that of the host."""

    def __init__(self, engine: Engine, link: "SupervisorLink", lease: "ProgressLease") -> None:
        self._engine, self._link, self._lease = engine, link, lease
        self.preparing = engine.capabilities.sleep_bytes is not None
        """Whether there is more to do before the first sleep."""

    def prepare(self) -> None:
        """Do a part of the first sleep ahead, while there is nothing else to do."""
        self._lease.moving()
        self.preparing = cast("SleepingEngine", self._engine).prepare_sleep()

    def sleep(self) -> None:
        """Put the model to sleep, and tell the supervisor how that went."""
        begun, size = time.monotonic(), self._engine.capabilities.sleep_bytes
        if size is None:
            self._link.slept(0.0, 0, self._engine.capabilities.no_sleep)
            return
        self._lease.moving()
        self.preparing = False
        try:
            cast("SleepingEngine", self._engine).sleep(self._lease.moving)
        except SleepRefused as e:
            self._link.slept(0.0, 0, " ".join(str(e).split()) or "no reason was given")
            return
        self._link.slept(time.monotonic() - begun, size)

    def wake(self) -> None:
        """Wake the model, and tell the supervisor."""
        begun, size = time.monotonic(), self._engine.capabilities.sleep_bytes
        self._lease.moving()
        cast("SleepingEngine", self._engine).wake(self._lease.moving)
        self._link.woke(time.monotonic() - begun, size or 0)
