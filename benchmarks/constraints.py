"""Measure the effect on other requests of constraints that take long to compile.

    python -m benchmarks.constraints

The model is the demo model of letters on the embedded engine, on the CPU, with four jobs in a batch and a TCP port on
loopback. The slow constraints are schemas such as {"type": "integer", "multipleOf": 1000003}, each a different one. The
trial of each is ended after one second of processor time. These are measured alone and beside slow constraints:

* a known regex, beside a key (4 requests in flight, 2,000 tokens a minute) that sends such schemas as fast as it may,
  for SECONDS,
* a known regex, and a new one, beside six such schemas of one connection,
* plain requests beside twenty such schemas of one connection,
* one such schema: the seconds until it is refused, and until it is refused again.
"""

import argparse
import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.harness import arguments_for
from benchmarks.report import Result, write
from modelctl import Client
from protocol.errors import WireError
from tests.keyed import Keyed
from tests.serving import wait_until

PROMPT = "sort: d b a c ->"
REGEX = "[a-f]{3}-[0-9]{2}"
MODEL = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 4}
SECONDS, PLAIN = 20.0, 20
_numbers = itertools.count(1_000_003)


def costly() -> dict[str, Any]:
    return {"type": "integer", "multipleOf": next(_numbers)}


def seconds_of(client: Client, **fields: Any) -> float:
    """Return the seconds until a request has ended, in whatever way."""
    begun = time.perf_counter()
    with suppress(WireError):
        client.complete("letters", PROMPT, max_tokens=20, temperature=0, **fields)
    return time.perf_counter() - begun


def several(client: Client, **fields: Any) -> list[float]:
    """Return the seconds of PLAIN requests, one after the other."""
    return [seconds_of(client, **fields) for _ in range(PLAIN)]


@contextmanager
def beside(keyed: Keyed, schemas: int) -> Iterator[Client]:
    """Yield another client while schemas of one connection are accepted. At the end, cancel the remaining ones."""
    with keyed.serving.client() as hog, keyed.serving.client() as client:
        streams = [hog.generate("letters", PROMPT, json_schema=costly()) for _ in range(schemas)]
        wait_until(lambda: sum(keyed.serving.status("letters")[name] for name in ("active", "queued")) >= schemas)
        yield client
        for stream in streams:
            stream.cancel()
            with suppress(WireError):
                stream.complete()
    keyed.serving.wait_idle("letters")


def beside_key(keyed: Keyed, seconds: float) -> tuple[list[float], int, int]:
    """Measure known regexes while a key sends schemas.

    Returns the seconds of each regex, the number of schemas that were tried, and the number that were refused because
    of the key's tokens per minute.
    """
    over = threading.Event()
    codes: list[str] = []

    def send() -> None:
        with keyed.client("hog") as hog:
            while not over.is_set():
                try:
                    hog.complete("letters", PROMPT, json_schema=costly())
                except WireError as e:
                    codes.append(e.code.wire_name)
                    if e.retry_after_ms:
                        over.wait(min(1.0, e.retry_after_ms / 1000))

    threads = [threading.Thread(target=send) for _ in range(4)]
    found = []
    with keyed.serving.client() as client:
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found.append(seconds_of(client, regex=REGEX))
            time.sleep(0.1)
    over.set()
    for thread in threads:
        thread.join()
    keyed.serving.wait_idle("letters")
    return found, codes.count("invalid_request"), codes.count("rate_limited")


def measure(keyed: Keyed, arguments: argparse.Namespace) -> list[Result]:
    results: list[Result] = []

    def add(name: str, value: float, unit: str = "s", target: str | None = None) -> None:
        results.append(Result(name, round(value, 4), unit, target))

    with keyed.serving.client() as client:
        seconds_of(client, regex=REGEX)
        add("known regex, alone, median", statistics.median(several(client, regex=REGEX)))
        add("plain request, alone, median", statistics.median(several(client)))
        schema = costly()
        add("costly schema, until it is refused", seconds_of(client, json_schema=schema), target="<= 1.5")
        add("the same again", seconds_of(client, json_schema=schema), target="<= 0.1")
    found, tried, limited = beside_key(keyed, 3.0 if arguments.quick else SECONDS)
    add("known regex beside a key's schemas, median", statistics.median(found), target="<= 0.1")
    add("known regex beside a key's schemas, longest", max(found))
    add("schemas of the key that were tried", tried, "requests")
    add("schemas of the key that were refused for its tokens a minute", limited, "requests")
    with beside(keyed, 6) as client:
        add("known regex beside six schemas", seconds_of(client, regex=REGEX), target="<= 0.1")
    with beside(keyed, 6) as client:
        add("new regex beside six schemas", seconds_of(client, regex="[a-e]{3}-[0-9]{2}"))
    with beside(keyed, 20) as client:
        found = several(client)
    add("plain request beside twenty schemas, median", statistics.median(found), target="<= 0.1")
    add("plain request beside twenty schemas, longest", max(found))
    add("load average of the machine meanwhile", os.getloadavg()[0], "processes")
    return results


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    with Keyed({"letters": MODEL}, {"other": "infer"}, wait=False) as keyed:
        keyed.new("hog", tokens_per_minute=2000, max_in_flight=4)
        keyed.serving.wait_state("letters", "ready")
        write("constraints", measure(keyed, arguments), arguments.out)


if __name__ == "__main__":
    main()
