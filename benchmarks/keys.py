"""Measure the effect on a client with a key of attackers without a key at the same port.

    python -m benchmarks.keys

A deterministic engine without torch is served over a TCP port on loopback. Several times, in turn, a client with a key
works alone and beside attackers in a process of their own. These hold 120 half-finished handshakes and make ATTEMPTS
connections per second, in turn with NULL, PLAIN, an unknown key, a stolen public key, garbage, a CURVE greeting with
garbage behind it, and messages without end. The gaps between the deltas of a stream and the round trips of PING are
compared.

The cost of a message to the supervisor over TCP with a key (encryption, and the check of its rights) is compared with
ipc, too.
"""

import itertools
import multiprocessing
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

import psutil
import zmq

from benchmarks.harness import arguments_for, percentile
from benchmarks.report import Result, write
from protocol.client.transport import ClientKey
from protocol.codec import encode, pack_body
from protocol.messages import Hello, Ping, Pong
from tests.keyed import Keyed, misled, stolen, stranger
from tests.raw_client import RawClient
from tests.serving import engine
from tests.system.test_keys_matrix import endless, greeting

STEP_S = 0.01
ENGINE = engine(step_s=STEP_S, context=1_000_000, max_batch_size=16)
TOKENS, PINGS, ROUNDS = 600, 3000, 5
HALF, ATTEMPTS = 120, 100
MIB = 1 << 20


def outsiders(port: int, key: ClientKey, stop: Event) -> None:
    """Attack the port until ``stop`` is set."""
    chance = random.Random(6)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pairs = [None, stranger(key), stolen(key), misled(key)]

    def speak_zeromq(number: int) -> None:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        pair = pairs[number % len(pairs)]
        if pair is not None:
            dealer.curve_serverkey, dealer.curve_publickey = pair.server_key.encode(), pair.public_key.encode()
            dealer.curve_secretkey = pair.secret_key.encode()
        elif number % 2:
            dealer.plain_username = dealer.plain_password = b"admin"
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(encode(Hello(pack_body({}))))
        dealer.poll(5)
        dealer.close()

    def speak_nonsense(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
            if number % 3 == 2:
                endless(peer, threading.Event())
            else:
                peer.sendall((b"", greeting(b"CURVE"))[number % 3] + chance.randbytes(1000))

    half: list[socket.socket] = []
    for number in itertools.count():
        if stop.is_set():
            return
        begun = time.monotonic()
        try:
            if len(half) < HALF or number % 4 == 0:
                half.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                half[-1].sendall(greeting(b"CURVE")[: number % 65])
                if len(half) > HALF:
                    half.pop(0).close()
            elif number % 2:
                speak_zeromq(number // 2)
            else:
                speak_nonsense(number // 2)
        except OSError:
            pass  # the supervisor ended the connection while it was being used, as it should
        time.sleep(max(0.0, 1 / ATTEMPTS - (time.monotonic() - begun)))


def gaps(keyed: Keyed, tokens: int) -> list[float]:
    """Return the seconds between the deltas of one stream."""
    with keyed.client("good") as client:
        times = [time.perf_counter() for _ in client.generate("m", "good", max_tokens=tokens)]
    return [b - a for a, b in itertools.pairwise(times)]


def round_trips(raw: RawClient, count: int) -> list[float]:
    """Return the seconds from PING to PONG, at some 500 PINGs per second."""
    found = []
    for nonce in range(1, count + 1):
        begun = time.perf_counter()
        raw.send(Ping(nonce))
        while raw.receive() != Pong(nonce):
            pass
        found.append(time.perf_counter() - begun)
        time.sleep(0.002)
    return found


def cpu_of_pings(keyed: Keyed, raw: RawClient, count: int) -> float:
    """Return the supervisor's processor time for one of many PINGs and its PONG, in microseconds, of all threads."""
    process = psutil.Process(keyed.serving.pid)
    raw.barrier()
    before = sum(process.cpu_times()[:2])
    for begin in range(0, count, 500):
        for nonce in range(begin, begin + 500):
            raw.send(Ping(nonce + 1))
        while raw.receive() != Pong(begin + 500):
            pass
    return (sum(process.cpu_times()[:2]) - before) / count * 1e6


def with_outsiders(keyed: Keyed, act: Callable[[], Any]) -> Any:
    processes = multiprocessing.get_context("spawn")
    stop = processes.Event()
    attacker = processes.Process(target=outsiders, args=(keyed.port, keyed.keys["good"], stop))
    failed = keyed.serving.counters()["handshakes_failed"]
    attacker.start()
    try:
        while keyed.serving.counters()["handshakes_failed"] < failed + 50:
            time.sleep(0.05)
        return act()
    finally:
        stop.set()
        attacker.join()


def main() -> None:
    arguments = arguments_for(__doc__).parse_args()
    rounds, tokens, pings = (1, 100, 200) if arguments.quick else (ROUNDS, TOKENS, PINGS)
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    trips_alone: list[list[float]] = []
    trips_beside: list[list[float]] = []
    with Keyed({"m": ENGINE}, {"good": "infer"}) as keyed, keyed.raw("good") as raw:
        process = psutil.Process(keyed.serving.pid)
        gaps(keyed, 50)
        memory = process.memory_info().rss
        before = keyed.serving.counters()
        for _ in range(rounds):
            alone.append(gaps(keyed, tokens))
            trips_alone.append(round_trips(raw, pings))

            def both() -> tuple[list[float], list[float]]:
                return gaps(keyed, tokens), round_trips(raw, pings)

            found = with_outsiders(keyed, both)
            beside.append(found[0])
            trips_beside.append(found[1])
        after = keyed.serving.counters()
        grown = process.memory_info().rss - memory
        local = RawClient(keyed.serving.runtime_dir)
        costs = [[cpu_of_pings(keyed, each, 10 * pings) for each in (local, raw)] for _ in range(rounds)]
        local.close()
    tails = [percentile(b, 99) / percentile(a, 99) for a, b in zip(alone, beside, strict=True)]
    trips = [percentile(b, 99) / percentile(a, 99) for a, b in zip(trips_alone, trips_beside, strict=True)]
    middles = [statistics.median(b) / statistics.median(a) for a, b in zip(trips_alone, trips_beside, strict=True)]
    failed, read = (after[name] - before[name] for name in ("handshakes_failed", "bad_frames"))
    results = [
        Result("p99 of gaps between deltas, alone", 1000 * statistics.median(percentile(a, 99) for a in alone), "ms"),
        Result("p99 of gaps beside outsiders over alone", statistics.median(tails), "ratio", "<= 2.0"),
        Result("median round trip beside outsiders over alone", statistics.median(middles), "ratio", "<= 2.0"),
        Result("p99 of round trips beside outsiders over alone", statistics.median(trips), "ratio", "<= 2.0"),
        Result("p99 of round trips, alone", 1000 * statistics.median(percentile(a, 99) for a in trips_alone), "ms"),
        Result("attempts that failed in the handshake", failed, "attempts"),
        Result("messages of outsiders that were read", read, "messages", "<= 0"),
        Result("supervisor's memory grew by", grown / MIB, "MiB", "<= 20"),
        Result("PING and PONG over ipc, supervisor's CPU", statistics.median(c[0] for c in costs), "us"),
        Result("the same over TCP with a key", statistics.median(c[1] for c in costs), "us"),
    ]
    write("keys", results, arguments.out)


if __name__ == "__main__":
    main()
