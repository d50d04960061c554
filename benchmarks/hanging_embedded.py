"""The embedded engine with hangs or slow steps, for ``benchmarks.hangs``, which names it by an import string."""

import time
from dataclasses import replace

from model_worker.engine import EngineEvent, Job, ProgressCallback
from model_worker.engines.embedded.engine import TransformersEngine
from protocol.process.worker_spec import EngineSpec
from tests.hanging_engines import hang, once

STEPS_BEFORE = 8


class HangsEmbedded(TransformersEngine):
    """An engine that holds the GIL for ever in a step, once per model directory, if the option ``gil`` says so.

    step_s  seconds by which each step, and each part of the load, takes longer; not during warm-up
    """

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        self._gil = bool(options.pop("gil", False))
        self._slower_s = float(options.pop("step_s", 0.0))
        self._parts = int(options.pop("parts", 0))
        self._hanging, self._loaded, self._busy = spec, False, 0
        super().__init__(replace(spec, options=options))

    def load(self, progress: ProgressCallback) -> None:
        for part in range(self._parts):
            progress("loading", part, self._parts)
            time.sleep(self._slower_s)
        super().load(progress)
        self._loaded = True

    def submit(self, job: Job) -> None:
        self._busy = 0
        super().submit(job)

    def step(self) -> list[EngineEvent]:
        if self._loaded:
            self._busy += 1
            time.sleep(self._slower_s)
            if self._gil and self._busy == STEPS_BEFORE and once(self._hanging, "gil"):
                hang("gil")
        return super().step()
