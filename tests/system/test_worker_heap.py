"""A worker's garbage collector skips imported and loaded objects. Scanning them again and again would delay the first
token, and later pause every stream."""

import gc
import re

from model_worker.engine import Job, ProgressCallback
from tests.deterministic_engine import DeterministicEngine
from tests.serving import Serving

IMPORTED = [[number] for number in range(10_000)]
COLLECTED_AT_IMPORT = gc.isenabled()
LOADED = 100_000


class LoadsMuch(DeterministicEngine):
    """An engine that holds very many objects and garbage after its load, and logs what the collector scans."""

    def load(self, progress: ProgressCallback) -> None:
        super().load(progress)
        set_aside = gc.get_freeze_count() > len(IMPORTED)
        print(f"collected at import {COLLECTED_AT_IMPORT}, in the load {gc.isenabled()}, set aside {set_aside}")
        self.heap: list[list[object]] = [[self] for _ in range(LOADED)]
        for _ in range(LOADED):
            cycle: list[object] = []
            cycle.append(cycle)

    def before_token(self, job: Job, k: int) -> None:
        if k == 5:
            print(f"set aside {gc.get_freeze_count()}, looked through {len(gc.get_objects())}", flush=True)


def test_what_was_loaded_is_not_looked_through_again() -> None:
    model = {"model_dir": ".", "engine": f"{__name__}:{LoadsMuch.__name__}"}
    with Serving({"m": model}) as serving, serving.client() as client:
        client.generate("m", "x", max_tokens=10).complete()
        log = serving.log("m")
    assert "collected at import False, in the load True, set aside True" in log
    said = re.search(r"set aside (\d+), looked through (\d+)", log)
    assert said is not None
    set_aside, looked_through = map(int, said.groups())
    assert LOADED < set_aside < 2 * LOADED, "what was loaded, without the garbage"
    assert looked_through < LOADED / 10
