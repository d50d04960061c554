"""Measure what a Ray cluster of three nodes costs its streams when a node is killed, suspended, or cut off the network.

    python -m benchmarks.cluster_cuts [--quick]

It needs root, ``ip`` and Ray. Each node but the head is in a network namespace, and its link is really cut: no packet
says goodbye. Each case has a supervisor of its own, with 64 streams on two workers on two nodes. Then one of the nodes

* is killed with everything that runs on it,
* is cut off for 5 s (less than the lease), 30 s or 120 s (more than the lease),
* or is cut off for 30 s with its agent and its worker stopped (SIGSTOP). These two come back when the network does, and
  have not noticed that the supervisor has given them up. A virtual machine that was suspended looks like that.

The engine needs no torch (``benchmarks.stamped_engine``). Each of its tokens says which letter it is, which process
made it, and when. So lost, doubled and wrong tokens show. Tokens also show that were made by a former worker after the
cut, and that a client got nevertheless. At the end of each case the supervisor is killed. Then processes of its workers
are looked for on all nodes.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import RESULTS, Result, write
from benchmarks.stamped_engine import Token, tokens_of
from modelctl import AsyncClient
from protocol.errors import ConnectionLost, WireError
from tests.deterministic_engine import answer
from tests.ray_cluster import RayCluster, can_make_namespaces
from tests.serving import Serving, engine, is_alive, wait_until

LEASE_S = 12.0
STEP_S = 0.04
"""Seconds of a step. Each stream gets a token in each step."""
BEFORE_S = 3.0
"""Seconds for which all streams run before the cut."""
AFTER_S = 25.0
"""Seconds of tokens that a stream asks for beyond the cut."""
SLACK_S = 5.0
"""Seconds beyond the lease within which every process must be gone. Agents look four times a second."""
COMES_BACK_S = 120.0
OURS = ("modelctl: ", "-m supervisor.cluster", "from multiprocessing")
"""Parts of the command lines of agents and workers, and of no process of Ray."""
STREAM_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Case:
    """What happens to the node ``one``.

    cut_s    seconds without network; 0 for a node that is killed
    stopped  whether its agent and its worker are stopped meanwhile
    """

    name: str
    cut_s: float = 0.0
    stopped: bool = False

    @property
    def is_short(self) -> bool:
        return 0 < self.cut_s < LEASE_S


CASES = (
    Case("node killed"),
    Case("partition of 5 s", 5.0),
    Case("partition of 30 s", 30.0),
    Case("partition of 120 s", 120.0),
    Case("node suspended for 30 s", 30.0, stopped=True),
)


@dataclass
class Answer:
    """One stream: the tokens that came, and the time when each came; and the error that has ended it, if one has."""

    prompt: str
    wanted: int
    tokens: list[Token] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def is_lost(self) -> bool:
        return bool(self.error) or len(self.tokens) < self.wanted

    @property
    def wrong(self) -> int:
        """Return the number of tokens that are not the expected ones, or are too many."""
        due = answer(self.prompt, self.wanted)
        letters = "".join(token.letter for token in self.tokens)
        differ = sum(a != b for a, b in zip(letters, due, strict=False))
        return differ + max(0, len(letters) - len(due))

    def pause_s(self, since: float) -> float:
        """Return the longest time between two tokens, of which the second one came after ``since``."""
        return max((b - a for a, b in pairwise(self.came) if b >= since), default=0.0)


@dataclass
class Found:
    """The figures of one case."""

    case: Case
    lost: int = 0
    wrong: int = 0
    stale: int = 0
    """Tokens that the former worker made after the cut, and that a client got."""
    dropped: int = 0
    """Frames of former workers that the supervisor has dropped."""
    left: int = 0
    pauses: list[float] = field(default_factory=list)
    """For each stream of the node, the seconds from its last token before the cut to the next one."""
    others: list[float] = field(default_factory=list)
    """The longest pause of each stream of the other node."""
    gone_s: float | None = None
    """Seconds from the cut, or from the return of a stopped node, until agent and worker of the node were gone."""
    killed_gone_s: float = 0.0


def processes(cluster: RayCluster, *nodes: str) -> list[psutil.Process]:
    """Return the living agents and workers, and their helpers, on these nodes, or on all."""
    found = []
    for pid in (pid for node in nodes or cluster.nodes for pid in cluster.pids(node)):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            line = " ".join(process.cmdline())
            if is_alive(process) and any(word in line for word in OURS):
                found.append(process)
    return found


async def one(client: AsyncClient, told: Answer) -> None:
    try:
        stream = client.generate("a", told.prompt, max_tokens=told.wanted, timeout=STREAM_TIMEOUT_S)
        async for delta in stream:
            found = tokens_of(delta.text)
            told.tokens += found
            told.came += [time.monotonic()] * len(found)
        if stream.finish_reason != "length":
            told.error = f"ended as {stream.finish_reason}"
    except (WireError, ConnectionLost, TimeoutError, ValueError) as e:
        told.error = f"{type(e).__name__}: {e}"


async def run(serving: Serving, cluster: RayCluster, case: Case, answers: list[Answer], found: Found) -> None:
    """Begin the streams, do what the case says, and read the streams to their ends."""
    old = processes(cluster, "one")
    if len(old) < 2:
        raise RuntimeError(f"an agent and a worker should run on the node: {old}")
    async with AsyncClient(runtime_dir=serving.runtime_dir) as client:
        tasks = [asyncio.create_task(one(client, told)) for told in answers]
        while not all(told.tokens or told.error for told in answers):
            await asyncio.sleep(0.05)
        await asyncio.sleep(BEFORE_S)
        pids = {process.pid for process in old}
        at = time.monotonic()
        if case.cut_s:
            if case.stopped:
                for process in old:
                    process.suspend()
            cluster.cut("one")
        else:
            cluster.kill("one")
        concerned = [told for told in answers if told.tokens and told.tokens[-1].pid in pids]
        healed, since = case.cut_s == 0, at
        until = at + case.cut_s
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.05)
            now = time.monotonic()
            if not healed and now >= until:
                healed = True
                cluster.heal("one")
                if case.stopped:
                    since = now
                    for process in old:
                        with suppress(psutil.NoSuchProcess):  # killed while it was stopped
                            process.resume()
            if found.gone_s is None and not any(map(is_alive, old)):
                found.gone_s = now - since
        if not healed:
            raise RuntimeError("the streams ended before the network was back")
    if not case.is_short:
        while found.gone_s is None and time.monotonic() < since + LEASE_S + SLACK_S:
            await asyncio.sleep(0.05)
            if not any(map(is_alive, old)):
                found.gone_s = time.monotonic() - since
        found.left += sum(map(is_alive, old))
    found.pauses = [told.pause_s(at) for told in concerned]
    found.others = [told.pause_s(at) for told in answers if told not in concerned]
    if not case.is_short:
        found.stale = sum(t.pid in pids and t.made > at + 1.0 for told in answers for t in told.tokens)


def measure(cluster: RayCluster, case: Case, streams: int) -> Found:
    found = Found(case)
    wanted = round((BEFORE_S + case.cut_s + LEASE_S + AFTER_S) / STEP_S)
    made = engine(step_s=STEP_S, context=10 * wanted, max_batch_size=streams, replicas=2)
    entry = made | {"engine": "benchmarks.stamped_engine:StampedEngine", "node": "others"}
    section: dict[str, Any] = {"ray": cluster.address, "advertise": cluster.advertise, "lease": f"{LEASE_S:g}s"}
    with (
        redirect_stdout(sys.stderr),
        Serving({"a": entry}, cluster=section, environment=cluster.environment) as serving,
    ):
        if sorted(m["node"] for m in serving.overview()["models"]) != ["one", "two"]:
            raise RuntimeError("the workers are not spread over the nodes")
        answers = [Answer(f"stream {number}", wanted) for number in range(streams)]
        begun = time.monotonic()
        asyncio.run(run(serving, cluster, case, answers, found))
        print(f"{case.name}: streams ended after {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        for told in answers:
            if told.is_lost:
                print(f"  {told.prompt}: {len(told.tokens)} of {told.wanted} tokens: {told.error}", file=sys.stderr)
        found.lost = sum(told.is_lost for told in answers)
        found.wrong = sum(told.wrong for told in answers)
        wait_until(
            lambda: all(m["state"] == "ready" for m in serving.overview()["models"]), COMES_BACK_S, "both workers ready"
        )
        found.dropped = serving.counters()["worker_frames_dropped"]
        at = time.monotonic()
        serving.kill()
        while (left := processes(cluster)) and time.monotonic() < at + LEASE_S + SLACK_S:
            time.sleep(0.02)
        found.killed_gone_s = time.monotonic() - at
        found.left += len(left)
        for process in left:
            print(f"  left: {process.cmdline()}", file=sys.stderr)
            process.kill()
    return found


def results_of(found: Sequence[Found], streams: int) -> list[Result]:
    results = [
        Result("streams of each case", streams, "streams"),
        Result("streams lost", sum(f.lost for f in found), "streams", "<= 0"),
        Result("tokens doubled or wrong", sum(f.wrong for f in found), "tokens", "<= 0"),
        Result("tokens heard that a former worker made after the cut", sum(f.stale for f in found), "tokens", "<= 0"),
        Result("processes left after their lease, on any node", sum(f.left for f in found), "processes", "<= 0"),
        Result(
            "supervisor killed: all its workers were gone, at the latest", max(f.killed_gone_s for f in found), "s",
            f"<= {LEASE_S + SLACK_S:g}",
        ),
        Result("the lease", LEASE_S, "s"),
    ]  # fmt: skip
    for f in found:
        name = f.case.name
        limit = f.case.cut_s + SLACK_S if f.case.is_short else LEASE_S + SLACK_S
        results += [
            Result(f"{name}: streams of the node", len(f.pauses), "streams"),
            Result(f"{name}: until its streams went on, median", statistics.median(f.pauses), "s"),
            Result(f"{name}: until its streams went on, the last one", max(f.pauses), "s", f"<= {limit:g}"),
            Result(f"{name}: longest pause of a stream of the other node", max(f.others), "s"),
            Result(f"{name}: frames of former workers that were dropped", f.dropped, "frames"),
        ]
        if f.gone_s is not None and not f.case.is_short:
            since = "the node's return" if f.case.stopped else "the cut" if f.case.cut_s else "the kill"
            results.append(Result(f"{name}: worker and agent were gone, after {since}", f.gone_s, "s"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 streams, two cases; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    if not can_make_namespaces():
        parser.error("this needs root, the command ip, and network namespaces")
    cases, streams = (CASES[:2], 4) if arguments.quick else (CASES, 64)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` must not leave a cluster behind
    found = []
    for case in cases:
        with (
            tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch,
            RayCluster(Path(scratch), {"one": 1, "two": 1}) as cluster,
        ):
            os.environ.update(cluster.environment)
            cluster.wait_for_nodes()  # before, both workers would start on the first one
            found.append(measure(cluster, case, streams))
        print(found[-1], file=sys.stderr, flush=True)
    if not arguments.quick:
        write("cluster-cuts", results_of(found, streams), arguments.out)


if __name__ == "__main__":
    main()
