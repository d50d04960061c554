"""Compare the ledger of usage with what clients have counted, while workers, the gateway and the supervisor are killed.

    python -m benchmarks.usage_ledger [--quick] [--seed N] [--out DIR]

Workers: REQUESTS mixed requests, from the Python client and over HTTP (streamed and whole, chats, several answers,
cancelled, constrained, with prompts that are cached). A random busy worker gets SIGKILL every EVERY_S seconds. The
counts by key and model must be equal.

Gateway and supervisor: STREAMS streams run over HTTP, and half as many in the Python client. The process gets SIGKILL,
and the clients count what still arrives. The ledger may have more. The difference is stated for each kill, in tokens
and in bytes, and beside it the most that can be in flight: clients grant credit for the events that they have read, so
a stream is at most WINDOW events ahead. A byte is one of the answer's events as the client reads them.
"""

import http.client
import os
import random
import signal
import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import arguments_for
from benchmarks.report import Result, write
from benchmarks.usage_requests import COUNTS, Mixed, NotServed, Tally, differences, events
from modelctl import Client
from protocol.codec import pack_event
from protocol.errors import ConnectionLost
from protocol.limits import STREAM_WINDOW as WINDOW
from tests.keyed import Keyed, free_port
from tests.serving import WITHIN, wait_until

REQUESTS, THREADS, EVERY_S = 1000, 24, 0.5
STREAMS, KILLS, BEGUN = 16, 5, 30
"""Streams over HTTP, kills of each process, and tokens that each stream has got before a kill."""
LETTERS = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 8}
SECTIONS: dict[str, Any] = {
    "restart": {"limit": 1000, "window": "1m", "initial": "10ms", "max": "100ms"},
    "poison": {"limit": 1000},
}
KEYS = {"operator": "status"}
"""A key over TCP, without which the supervisor would not open its port."""
EVENT_BYTES = len(pack_event([1], {"text": "x"}))
"""Bytes of an event of one token in the Python client's frames."""


def echo(step_s: float) -> dict[str, Any]:
    """Return the entry of models.yaml for a model that computes nothing. ``step_s``: seconds of a step."""
    return {
        "model_dir": ".", "engine": "benchmarks.caching_engine:CachingEngine", "replicas": 2, "max_batch_size": 32,
        "options": {"step_s": step_s, "context": 1 << 20},
    }  # fmt: skip


def kill_workers(keyed: Keyed, done: threading.Event, every_s: float, chance: random.Random, tally: Tally) -> int:
    """Kill a busy worker again and again until ``done`` is set. Return how many were killed.

    Between two kills a request ends: on a busy machine a worker may start so slowly that otherwise no answer would.
    """
    kills = ended = 0
    while not done.wait(every_s):
        if kills and tally.kinds.total() == ended:
            continue
        ended = tally.kinds.total()
        busy = [m["pid"] for m in keyed.serving.overview()["models"] if m["state"] == "ready" and m["active"]]
        if busy:
            os.kill(chance.choice(busy), signal.SIGKILL)
            kills += 1
    return kills


def compare_workers(
    requests: int, threads: int, every_s: float, seed: int, *, constrained: bool
) -> tuple[Tally, int, dict[str, int]]:
    """Return what the clients counted, the number of kills, and how far the ledger is from the clients' counts."""
    port, models = free_port(), {"echo": echo(0.003), **({"letters": LETTERS} if constrained else {})}
    with Keyed(models, KEYS, gateway={"listen": port}, **SECTIONS) as keyed:
        tokens = {name: keyed.new_http(name) for name in ("web", "phone")}
        mixed = Mixed(port, tokens, keyed.serving.client, "letters" if constrained else None)
        done = threading.Event()

        def ask() -> None:
            try:
                mixed.ask(requests, threads, seed)
            finally:
                done.set()

        wait_live(port)
        asking = threading.Thread(target=ask)
        asking.start()
        kills = kill_workers(keyed, done, every_s, random.Random(seed), mixed.tally)
        asking.join()
        with keyed.serving.client() as client:
            return mixed.tally, kills, differences(mixed.tally, client.usage()["rows"])


def wait_live(port: int) -> None:
    """Wait until the gateway answers."""

    def lives() -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            try:
                connection.request("GET", "/livez")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    wait_until(lives, what="the gateway answers")


class Streams:
    """Endless streams over HTTP and in the Python client, each in a thread. They count the tokens that they get."""

    def __init__(self, port: int, token: str, client: Client, count: int) -> None:
        self.over_http = [0] * count
        self.local = [0] * (count // 2)
        self._port, self._token = port, token
        self._streams = [client.generate("echo", f"local {i}", max_tokens=100_000) for i in range(count // 2)]
        self._threads = [
            *(threading.Thread(target=self._read_http, args=(i,)) for i in range(count)),
            *(threading.Thread(target=self._read_local, args=(i,)) for i in range(count // 2)),
        ]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: min(self.over_http + self.local) >= BEGUN, what="all streams have begun")

    def cancel(self) -> None:
        """End the streams of the Python client."""
        for stream in self._streams:
            stream.cancel()

    def join(self) -> None:
        """Wait until nothing more arrives."""
        for thread in self._threads:
            thread.join()

    def _read_http(self, number: int) -> None:
        body = {"model": "echo", "prompt": f"http {number}", "max_tokens": 100_000}
        try:
            for event in events(self._port, self._token, "/v1/completions", body):
                self.over_http[number] += sum(len(choice["text"]) for choice in event.get("choices", ()))
        except (NotServed, OSError, http.client.HTTPException):
            pass  # the gateway or the supervisor was killed

    def _read_local(self, number: int) -> None:
        try:
            for delta in self._streams[number]:
                self.local[number] += len(delta.token_ids)
        except ConnectionLost:
            pass  # the supervisor was killed


def by_key(client: Client) -> dict[str | None, int]:
    """Return the tokens of answers that the ledger has for each key."""
    found: dict[str | None, int] = {None: 0, "web": 0}
    for row in client.usage()["rows"]:
        found[row["key"]] += row["completion_tokens"]
    return found


def event_bytes(port: int, token: str) -> int:
    """Return the bytes of an event of one token over HTTP."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        body = '{"model": "echo", "prompt": "x", "max_tokens": 2, "stream": true}'
        connection.request("POST", "/v1/completions", body, {"authorization": f"Bearer {token}"})
        return len(connection.getresponse().read().split(b"\n\n")[0]) + 2


@dataclass(frozen=True)
class Difference:
    """What the ledger has beyond the tokens that clients got until a process was killed.

    over_http, local            tokens of streams over HTTP, and of streams of the Python client
    bytes, bytes_in_flight      the bytes of these tokens, and the most that can have been in flight
    """

    over_http: int
    local: int
    bytes: int
    bytes_in_flight: int


def compare_killed(which: str, streams: int, kills: int) -> list[Difference]:
    """Kill the gateway or the supervisor while streams run. Return the difference of each kill."""
    port, found, models = free_port(), [], {"echo": echo(0.0005)}
    with Keyed(models, KEYS, gateway={"listen": port}, **SECTIONS) as keyed:
        token, serving = keyed.new_http("web"), keyed.serving
        for _ in range(kills):
            wait_live(port)
            size = event_bytes(port, token)
            with serving.client() as client:
                before = by_key(client)
                running = Streams(port, token, client, streams)
                if which == "gateway":
                    for pid in serving.overview()["supervisor"]["gateway"]["pids"]:
                        os.kill(pid, signal.SIGKILL)
                    running.cancel()
                else:
                    serving.kill()
                running.join()
            if which == "supervisor":
                serving.start_again(models)
            wait_until(lambda: not any(m["active"] for m in serving.overview()["models"]), what="no request is left")
            with serving.client() as client:
                after = by_key(client)
            over_http = after["web"] - before["web"] - sum(running.over_http)
            local = after[None] - before[None] - sum(running.local)
            most = WINDOW * (len(running.over_http) * size + len(running.local) * EVENT_BYTES)
            found.append(Difference(over_http, local, over_http * size + local * EVENT_BYTES, most))
    return found


def results_of_kills(which: str, found: list[Difference]) -> list[Result]:
    """Return the figures of each kill."""
    results = []
    for number, each in enumerate(found, 1):
        name = f"kill {number} of the {which}"
        bound = f"<= {each.bytes_in_flight}"
        results += [
            Result(f"{name}: counted, not received over HTTP", each.over_http, "tokens"),
            Result(f"{name}: counted, not received by the Python client", each.local, "tokens"),
            Result(f"{name}: the bytes of both, beside the bytes in flight", each.bytes, "bytes", bound),
        ]
    least = min(min(each.over_http, each.local) for each in found)
    return [*results, Result(f"least difference of any kill of the {which}", least, "tokens", ">= 0")]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    requests, streams, kills = (200, 8, 1) if arguments.quick else (REQUESTS, STREAMS, KILLS)
    tally, killed, wrong = compare_workers(requests, THREADS, EVERY_S, arguments.seed, constrained=True)
    for problem in tally.problems:
        print(problem)
    total = sum((counts for counts in tally.counted.values()), Counter[str]())
    write(
        "usage-ledger",
        [
            Result("mixed requests", sum(tally.kinds.values()), "requests", f">= {requests}"),
            *(Result(f"of these: {kind.replace('_', ' ')}", n, "requests") for kind, n in sorted(tally.kinds.items())),
            Result("workers killed meanwhile", killed, "times"),
            Result("requests that ended with an error, or with a wrong text", len(tally.problems), "requests", "<= 0"),
            *(Result(f"{name.replace('_', ' ')} that the clients counted", total[name], "") for name in COUNTS),
            *(Result(f"{name.replace('_', ' ')}: ledger against clients", n, "", "<= 0") for name, n in wrong.items()),
            *results_of_kills("gateway", compare_killed("gateway", streams, kills)),
            *results_of_kills("supervisor", compare_killed("supervisor", streams, kills)),
        ],
        arguments.out,
    )


if __name__ == "__main__":
    main()
