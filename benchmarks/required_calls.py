"""Draw calls of tools under the worker's constraint, with random schemas, and parse and validate every one.

    python -m benchmarks.required_calls

For each format of calls, requests with one to three random tools and ``tool_choice: required`` are made. For each
request, several answers are drawn: random tokens that the constraint allows, from a vocabulary with the markers of all
formats. An answer is parsed piece by piece, as the gateway does it. Each call must name a tool of the request, its
arguments must be JSON, and jsonschema must find them valid. No text may stand beside the calls.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import jsonschema

from benchmarks.report import RESULTS, Result, write
from protocol.answer_formats.families import FAMILIES
from protocol.errors import RequestError
from tests.engines.random_calls import Walker, calls_of, request_of, write_vocabulary

CALLS = 10_000
ANSWERS = 4
"""Answers that are drawn for each request."""


def drawn(walker: Walker, format: str, wanted: int, counts: Counter[str]) -> int:
    """Draw answers in one format until they have ``wanted`` calls, and count what happens. Return the calls."""
    calls = seed = 0
    while calls < wanted:
        rng = random.Random(f"{format} {seed}")
        seed += 1
        request = request_of(rng)
        try:
            constraint = walker.constraint(format, request)
            for _ in range(ANSWERS):
                constraint.back_to(0)
                pieces, ended = walker.answer(constraint, format, rng)
                counts["answers"] += 1
                counts["cut"] += not ended
                if ended:
                    calls += len(calls_of(request, format, pieces))
        except RequestError as e:
            counts["refused"] += 1
            print(f"{format} {seed - 1}: {e.message}", flush=True)
        except (ValueError, AssertionError, jsonschema.ValidationError) as e:
            counts["wrong"] += 1
            print(f"{format} {seed - 1}: {e!r:.300} {json.dumps(''.join(pieces)):.600}", flush=True)
    counts["requests"] += seed
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few calls: tries the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    wanted = 110 if arguments.quick else CALLS
    counts: Counter[str] = Counter()
    calls = {}
    with tempfile.TemporaryDirectory() as scratch:
        walker = Walker(write_vocabulary(Path(scratch) / "model"))
        try:
            for format in FAMILIES:
                begun = time.perf_counter()
                calls[format] = drawn(walker, format, -(-wanted // len(FAMILIES)), counts)
                print(f"{format}: {calls[format]} calls in {time.perf_counter() - begun:.0f} s", flush=True)
        finally:
            walker.close()
    compiled = sorted(1000 * seconds for seconds in walker.seconds)
    results = [
        Result("required calls that parse and validate", sum(calls.values()), "calls", f">= {wanted}"),
        Result("answers with a call that does not parse or validate, or with text", counts["wrong"], "answers", "<= 0"),
        Result("answers that did not end", counts["cut"], "answers", "<= 0"),
        Result("requests that were refused", counts["refused"], "requests", "<= 0"),
        Result("requests, each with other schemas", counts["requests"], "requests"),
        Result("answers", counts["answers"], "answers"),
        Result("time until a constraint is compiled, median", statistics.median(compiled), "ms"),
        Result("time until a constraint is compiled, 99th percentile", compiled[len(compiled) * 99 // 100], "ms"),
        *(Result(f"calls in the format {format}", number, "calls") for format, number in calls.items()),
    ]  # fmt: skip
    write("required-calls", results, arguments.out)


if __name__ == "__main__":
    main()
