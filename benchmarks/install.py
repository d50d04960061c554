"""Measure the time and disk space of a plain installation: ``pip install .`` into an empty environment.

    python -m benchmarks.install

pip takes downloads from its cache if it has them. So only the first run on a machine includes the network.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.report import RESULTS, Result, write
from tests.installing import install, tracked_copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch:
        installed = install(tracked_copy(Path(scratch, "source")), Path(scratch, "env"))
        results = [
            Result("pip install .: time", installed.seconds, "s", "<= 60"),
            Result("pip install .: what it adds", installed.brought / 1e6, "MB", "<= 60"),
            Result("pip install .: installed packages, pip among them", installed.size() / 1e6, "MB", "<= 80"),
        ]
    write("install", results, arguments.out)


if __name__ == "__main__":
    main()
