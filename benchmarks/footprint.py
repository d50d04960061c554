"""Measure the memory that a serving supervisor takes, and the time that ``modelctl ps`` takes.

    python -m benchmarks.footprint [--gpu 0] [--quick] [--out DIR]

The models are the demo models of models.yaml, on the CPU, or with ``--gpu`` on a GPU. In that case a separate process
reads NVML for the supervisor. Memory is that of the supervisor's process when all models are ready and have answered:
resident memory (RSS), and its proportional share (PSS: a page that several processes map is divided among them). The
same is measured for the process that reads NVML, if there is one. ``ps`` runs many times, in turn with ``python -c
pass``, which is the lower limit for any program in Python. Without a GPU the script can be tried with ``--engine`` (an
import string) and a replacement for NVML.
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.harness import Server
from benchmarks.report import RESULTS, Result, write

RUNS = 21
MODELS = ("letters", "stories")
MB = 1e6


def memory(pid: int) -> tuple[float, float]:
    """Return (RSS, PSS) in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    rss, pss = (int(found[1]) * 1024 for key in ("Rss", "Pss") if (found := re.search(rf"^{key}:\s+(\d+)", text, re.M)))
    return rss, pss


def nvml_reader(supervisor: int) -> int | None:
    """Return the pid of the process that reads NVML; None if there is none."""
    children = psutil.Process(supervisor).children()
    return next((p.pid for p in children if " ".join(p.cmdline()).startswith("modelctl: NVML reader")), None)


def python_seconds() -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - begun


def reader_rows(rss: float, pss: float, supervisor_pss: float) -> list[Result]:
    """Return what the process that reads NVML adds. The arguments are in bytes."""
    return [
        Result("memory of the process that reads NVML (RSS)", rss / MB, "MB"),
        Result("its own share of it (PSS)", pss / MB, "MB"),
        Result("own shares of the two together (PSS)", (supervisor_pss + pss) / MB, "MB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="cpu", help="an index as nvidia-smi counts, or cpu")
    parser.add_argument("--engine", default="transformers", help="another than transformers, to try the script itself")
    parser.add_argument("--quick", action="store_true", help="tries the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    gpu = arguments.gpu if arguments.gpu == "cpu" else int(arguments.gpu)
    models = {
        name: {"model_dir": f"demo:{name}", "engine": arguments.engine, "gpu": gpu, "max_batch_size": 32}
        for name in MODELS
    }
    with Server(models) as server:
        pid = server.overview()["supervisor"]["pid"]
        idle, _ = memory(pid)
        with server.client() as client:
            for name in MODELS:
                client.complete(name, "count to 15: 10 ->", max_tokens=8, temperature=0)
        server.modelctl("ps")
        rounds = [(server.modelctl("ps"), python_seconds()) for _ in range(3 if arguments.quick else RUNS)]
        rss, pss = memory(pid)
        reader = nvml_reader(pid)
        if gpu != "cpu" and reader is None:
            raise RuntimeError("no process reads NVML, although models are on a GPU: see the supervisor's log")
        of_reader = [] if reader is None else reader_rows(*memory(reader), pss)
    write(
        "footprint" if gpu == "cpu" else "footprint-nvml",
        [
            Result("supervisor's memory (RSS), models ready", idle / MB, "MB"),
            Result("supervisor's memory (RSS), after requests", rss / MB, "MB", "<= 60"),
            Result("supervisor's own share of it (PSS)", pss / MB, "MB"),
            *of_reader,
            Result("modelctl ps", statistics.median(ps for ps, _ in rounds), "s", "<= 0.2"),
            Result("python -c pass", statistics.median(floor for _, floor in rounds), "s"),
            Result("modelctl ps, over python -c pass", statistics.median(ps / floor for ps, floor in rounds), "ratio"),
        ],
        arguments.out,
    )


if __name__ == "__main__":
    main()
