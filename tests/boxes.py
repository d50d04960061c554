"""Recorded GPUs of whole boxes (``tests/recorded_boxes/NAME.json``), on which placement decisions are tested.

``python -m tests.boxes`` prints such a record of the box that it runs on, without names of processes.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from supervisor.placement.gpu_reader import read_once
from supervisor.placement.gpus import Gpu

WHERE = Path(__file__).parent / "recorded_boxes"


def read_box(name: str, **held: dict[int, int]) -> list[Gpu]:
    """Return the GPUs of a recorded box. held: ``gpu1={4711: bytes}`` adds a process that holds memory of GPU 1."""
    box = []
    for report in json.loads((WHERE / f"{name}.json").read_text())["gpus"]:
        more = held.get(f"gpu{report['index']}", {})
        gpu = Gpu(
            report["index"], report["uuid"], report["total"], report["used"], report["free"],
            {int(pid): size for pid, size in report["processes"].items()},
            report["mig"], frozenset(report["cpus"]), frozenset(report["numa_nodes"]),
        )  # fmt: skip
        size = sum(more.values())
        box.append(replace(gpu, used=gpu.used + size, free=gpu.free - size, processes={**gpu.processes, **more}))
    return box


def main() -> None:
    gpus = [asdict(gpu) | {"cpus": sorted(gpu.cpus), "numa_nodes": sorted(gpu.numa_nodes)} for gpu in read_once()]
    json.dump({"about": f"recorded on {os.uname().machine}", "gpus": gpus}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
