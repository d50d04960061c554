"""Send hostile frames for longer than a test can: guided by the branches that they reach, and to a live supervisor.

    pip install '.[fuzz]' && nice python -m benchmarks.fuzzing [--seconds 120] [--live 60]

--seconds  seconds of coverage-guided fuzzing (atheris) of the reader of each of the four directions
--live     seconds in which a hostile process uses a supervisor's sockets, beside a well-behaved client

A crash is kept in --crashes and fails the run.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import RESULTS, ROOT, Result, write
from tests.fuzzing.corpus import DIRECTIONS, corpus
from tests.fuzzing.live import attacked
from tests.fuzzing.mutating import TOKENS

_STATS = re.compile(r"stat::(\w+):\s+(\d+)")
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+)")
MOST_MB = 20


def guided(direction: str, seconds: int, seed: int, crashes: Path) -> list[Result]:
    """Fuzz one direction. Peak memory is reported as its growth during the run."""
    with tempfile.TemporaryDirectory() as scratch:
        seeds, words = Path(scratch) / "corpus", Path(scratch) / "words"
        seeds.mkdir()
        for number, frame in enumerate(corpus(direction)):
            (seeds / str(number)).write_bytes(frame)
        words.write_text("".join(f'"{"".join(f"{chr(92)}x{byte:02x}" for byte in token)}"\n' for token in TOKENS))
        options = [
            f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096", "-timeout=1", "-print_final_stats=1",
            f"-artifact_prefix={crashes}/{direction}-", f"-dict={words}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "tests.fuzzing.coverage_guided", direction, *options, str(seeds)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds * 2 + 120)
    report = done.stdout + done.stderr
    stats = {name: int(value) for name, value in _STATS.findall(report)}
    if "number_of_executed_units" not in stats:
        raise SystemExit(f"{direction}: {report[-4000:]}")
    branches, features = _COVERAGE.findall(report)[-1]
    loaded = int(re.findall(r"INITED.*rss: (\d+)Mb", report)[-1])
    if done.returncode:
        print(report[-4000:], file=sys.stderr)
    return [
        Result(f"{direction}: executions", stats["number_of_executed_units"], "frames"),
        Result(f"{direction}: branches reached", int(branches), "count"),
        Result(f"{direction}: features reached", int(features), "count"),
        Result(f"{direction}: crashes, or longer than a second", int(done.returncode != 0), "count", "<= 0"),
        Result(f"{direction}: slowest frame", stats["slowest_unit_time_sec"], "s (whole)", "<= 0"),
        Result(f"{direction}: memory grew by", stats["peak_rss_mb"] - loaded, "MB", f"<= {MOST_MB}"),
    ]


def live(seconds: float, seed: int) -> list[Result]:
    """Attack a live supervisor."""
    report = attacked(seconds, seed)
    counters = report["counters"]
    return [
        Result("live: frames and parts sent", report["frames"], "count"),
        Result("live: connections", counters["connections_accepted"], "count"),
        Result("live: frames refused", counters["bad_frames"] + counters["worker_frames_dropped"], "count"),
        Result("live: what the supervisor's audit hook saw", len(report["seen"].splitlines()), "count", "<= 0"),
        Result("live: supervisor's memory grew by", round(report["grown_bytes"] / 2**20, 1), "MiB", "<= 64"),
        Result("live: right answers of the client beside it", report["answers"], "count"),
        Result("live: wrong or failed answers", 0, "count", "<= 0"),  # attacked() raises at the first one
        Result("live: longest 1 % of its waits begins at", report["p99_ms"], "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--live", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31))
    parser.add_argument("--crashes", type=Path, default=Path("crashes"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    arguments.crashes.mkdir(exist_ok=True)
    results: list[Result] = []
    for direction in DIRECTIONS:
        results += guided(direction, arguments.seconds, arguments.seed, arguments.crashes.resolve())
    if arguments.live:
        results += live(arguments.live, arguments.seed)
    if not any(arguments.crashes.iterdir()):
        arguments.crashes.rmdir()
    write("fuzzing", results, arguments.out)
    if any(result.meets is False for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
