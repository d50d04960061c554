"""Run random faults against real processes for a long time (``tests.chaos``), and keep the report.

    python -m benchmarks.chaos [--episodes 10000] [--minutes M] [--seed N] [--lanes 2] [--nodes [--lease 3]]

With ``--nodes`` most workers run on other machines, through agents, and the faults include those of machines, agents
and networks (``tests.chaos.node_plan``). Processes of this machine stand in for the machines, and for Ray.

The seed is printed. A violation is printed with all that is needed to replay it, and the run goes on. SIGTERM or SIGINT
ends the run early. The report then covers the episodes so far.
"""

import json
import os
import random
import signal
import subprocess
import sys

from benchmarks.harness import arguments_for
from benchmarks.report import ROOT, Result, write


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=24 * 60.0)
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--nodes", action="store_true", help="workers on other machines")
    parser.add_argument("--lease", default="3", help="seconds: the lease of other machines; longer on a busy machine")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    given = {
        "episodes": 20 if arguments.quick else arguments.episodes,
        "minutes": arguments.minutes,
        "lanes": arguments.lanes,
        "seed": arguments.seed,
    }
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.chaos", *options, "--keep-going", "--json"]
    command += ["--nodes"] if arguments.nodes else []
    # The last line of the output is the report. Progress is printed on stderr.
    environment = {**os.environ, "CHAOS_LEASE_S": arguments.lease}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True, start_new_session=True
    ) as run:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: run.terminate())
        output = run.communicate()[0].splitlines()
    report = json.loads(output[-1])
    results = [
        Result("violations of the invariants", len(report["violations"]), "times", "<= 0"),
        Result("episodes", report["episodes"], "episodes", None if arguments.quick else f">= {arguments.episodes}"),
        Result("faults inflicted, of supervisors' ends, of clients", sum(report["faults"].values()), "times"),
        Result("requests", report["requests"], "requests"),
        Result("tokens checked", report["tokens"], "tokens"),
        Result("answers that went on in another worker and were finished", report["resumed"], "requests"),
        Result("processes of a killed supervisor were gone, at the latest", max(report["gone_s"], default=0.0), "s"),
        Result("an episode took, mean", report["seconds"] / max(1, report["episodes"]), "s"),
        Result("an episode took, the longest", report["longest_s"], "s"),
        *(Result(f"fault: {name}", count, "times") for name, count in sorted(report["faults"].items())),
        *(Result(f"ended as {name}", count, "requests") for name, count in sorted(report["ends"].items())),
    ]
    write("chaos-nodes" if arguments.nodes else "chaos", results, arguments.out)
    print("\n".join(output[:-1]), flush=True)  # at the end, where it is seen; violations were printed in full before


if __name__ == "__main__":
    main()
