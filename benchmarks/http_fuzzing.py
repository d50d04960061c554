"""Send requests drawn from the gateway's own OpenAPI document to a gateway, for longer than a test can.

    pip install schemathesis && nice python -m benchmarks.http_fuzzing [--seconds 600] [--seed N] [--out DIR]

Valid and invalid requests go to every endpoint. Counted are answers that are a 500, break the document or have another
content type, tracebacks in the gateway's log, and restarts of the gateway. The engine computes nothing.
"""

import argparse
import os
from pathlib import Path

from benchmarks.report import RESULTS, Result, write
from tests.fuzz_http import fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="how long to send requests")
    parser.add_argument("--seed", default=str(int.from_bytes(os.urandom(4), "big")), help="repeats a run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    fuzzed = fuzz(arguments.seconds, arguments.seed)
    print(fuzzed.output)
    if "Traceback" in fuzzed.log:
        print(fuzzed.log[max(0, fuzzed.log.index("Traceback") - 200) :][:10_000])
    results = [
        Result("seconds", arguments.seconds, "s"),
        Result("requests", fuzzed.requests, "count"),
        Result("kinds of answers that are wrong", fuzzed.output.count("Reproduce with"), "count", "<= 0"),
        Result("tracebacks in the gateway's log", fuzzed.log.count("Traceback"), "count", "<= 0"),
        Result("restarts of the gateway", fuzzed.restarts, "count", "<= 0"),
        Result("memory of the gateway grew by", fuzzed.grown_bytes / (1 << 20), "MiB"),
    ]
    write("http-fuzzing", results, arguments.out)
    if not fuzzed.passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
