"""After kill -9 of the supervisor none of its processes is left, and every request has ended once.

``benchmarks.orphans`` measures how long that takes.
"""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from protocol.errors import ConnectionLost
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.serving import ROOT, WITHIN, Serving, describe, engine, is_alive, wait_until
from tests.system.test_worker_death import forked_child

LONG = 100_000


def kill_and_time(serving: Serving, least: int) -> float:
    """Kill the supervisor. Return the seconds until the last of its processes is gone."""
    processes = serving.processes()
    assert len(processes) >= least, describe(processes)
    began = time.monotonic()
    serving.kill()
    while left := [p for p in processes if is_alive(p)]:
        if time.monotonic() - began > WITHIN:
            break
        time.sleep(0.002)
    took = time.monotonic() - began
    print(f"{len(processes)} processes were gone after {took * 1000:.0f} ms")
    assert not left, describe(left)
    return took


def test_idle_with_a_grandchild(serve: Serve) -> None:
    serving = serve({"a": engine("ForksChild"), "b": engine()})
    forked_child(serving, "a")
    kill_and_time(serving, least=5)  # supervisor, guard, two workers, the child


def test_streaming(serve: Serve) -> None:
    serving = serve({"a": engine(context=2 * LONG), "b": engine(context=2 * LONG)})
    process = serving.spawn_client([["ab"[i % 2], f"long {i}", LONG] for i in range(6)])
    assert process.stdout is not None
    assert process.stdout.readline() == "streaming\n"
    with serving.client() as client:
        stream = client.generate("a", "mine", max_tokens=LONG)
        next(stream)
        processes = [p for p in serving.processes() if p.pid != process.pid]
        serving.kill()
        wait_until(lambda: not any(map(is_alive, processes)), what="the end of all its processes")
        with pytest.raises(ConnectionLost):
            stream.complete()
        assert stream.text == answer("mine", len(stream.token_ids))
        assert list(stream) == [], "the error came a second time"
        with pytest.raises(ConnectionLost):
            client.generate("a", "later", max_tokens=1)
    out, _ = process.communicate(timeout=60)
    answers = json.loads(out.splitlines()[-1])["answers"]
    assert [reason for _, reason in answers] == ["connection_lost"] * 6
    for i, (text, _) in enumerate(answers):
        assert text == answer(f"long {i}", len(text))


def test_while_a_worker_loads(serve: Serve) -> None:
    serving = serve({"a": engine("SlowLoad"), "b": engine()}, wait=False)
    serving.wait_state("a", "loading")
    wait_until(lambda: serving.status("a")["progress"], what="load progress")
    kill_and_time(serving, least=4)


@pytest.mark.parametrize("hangs", ["tests.deterministic_engine:HangsDeaf", "tests.orphan_engines:HangsWithTheLock"])
def test_while_a_worker_hangs(serve: Serve, hangs: str) -> None:
    """The worker hangs and ignores SIGTERM, or hangs and holds the interpreter's lock."""
    serving = serve({"a": engine() | {"engine": hangs}})
    with serving.client() as client:
        stream = client.generate("a", "bad", max_tokens=50)
        for _ in range(5):
            next(stream)
        kill_and_time(serving, least=3)


def test_with_children_and_theirs(serve: Serve) -> None:
    serving = serve({"a": engine() | {"engine": "tests.orphan_engines:ForksFamily"}})
    wait_until(lambda: len(serving.processes()) >= 5, what="a child and its child")
    kill_and_time(serving, least=5)  # supervisor, guard, worker, its child and grandchild


def test_while_a_worker_is_stopped(serve: Serve) -> None:
    serving = serve({"a": engine()})
    serving.worker("a").send_signal(signal.SIGSTOP)
    kill_and_time(serving, least=3)


def test_in_the_middle_of_a_spawn(serve: Serve) -> None:
    """The supervisor may die before the worker has asked the kernel to die with its parent."""
    for delay in (0.0, 0.02, 0.05):
        serving = serve({"a": engine(autostart=False), "b": engine(autostart=False)})
        serving.order("start", model="a")
        serving.order("start", model="b")
        time.sleep(delay)  # the test varies the moment of the kill
        kill_and_time(serving, least=3)


def test_a_new_supervisor_takes_over_the_directory(serve: Serve) -> None:
    serving = serve({"a": engine()})
    serving.kill()
    wait_until(lambda: not serving.processes(), what="the end of all its processes")
    assert (serving.runtime_dir / "front").exists()
    started = serving.modelctl("serve", "--detach", "-c", str(serving.config))
    assert started.returncode == 0, started.stderr
    assert serving.modelctl("run", "a", "--raw", "hello", "--max-tokens", "5").stdout == answer("hello", 5) + "\n"
    assert serving.modelctl("shutdown").returncode == 0


def test_the_next_supervisor_tells_of_an_end_without_an_order(serve: Serve) -> None:
    serving = serve({"a": engine()})

    def told() -> list[str]:
        events = serving.order("events", limit=512)["events"]
        return [event["message"] for event in events if event["kind"] == "supervisor"]

    def says(message: str) -> bool:
        return message.startswith("the former supervisor ended without an order: it was killed, or the machine stopped")

    assert not any(map(says, told()))
    serving.kill()
    serving.start_again({"a": engine()})
    assert [says(message) for message in told()] == [False, False, True]
    serving.order("shutdown")
    serving.process.wait(WITHIN)
    serving.start_again({"a": engine()})
    assert [says(message) for message in told()] == [False, False, True, False, False]


def test_what_was_left_behind_is_named_and_ended_by_the_next(serve: Serve) -> None:
    serving = serve({"a": engine("ForksDaemon"), "b": engine()})
    child = forked_child(serving, "a")
    command = " ".join(child.cmdline())
    guard = wait_until(serving.guard)
    serving.process.send_signal(signal.SIGSTOP)  # so that it cannot replace the guard, which would find the child
    guard.kill()
    serving.kill()
    wait_until(lambda: serving.processes() == [child], what="all but the child to be gone")
    assert serving.modelctl("serve", "--detach", "-c", str(serving.config)).returncode == 0
    assert not is_alive(child)
    line = next(line for line in serving.log().splitlines() if "left" in line)
    assert line.endswith(f"-: a former supervisor left pid {child.pid} ({command}) behind: killing it")
    second = forked_child(serving, "a")
    assert second != child
    assert serving.modelctl("shutdown").returncode == 0
    wait_until(lambda: not is_alive(second), what="its end with its worker")


def test_the_guard_is_replaced_and_its_successor_guards(serve: Serve) -> None:
    serving = serve({"a": engine("ForksChild")})
    guard = wait_until(serving.guard)
    child = forked_child(serving, "a")
    guard.kill()
    successor = wait_until(lambda: serving.guard() if not is_alive(guard) else None, what="another guard")
    with serving.client() as client:
        assert client.complete("a", "still serving", max_tokens=4).text == answer("still serving", 4)
    assert is_alive(successor)
    kill_and_time(serving, least=4)
    assert not is_alive(child)


def test_a_stopped_guard_is_replaced(serve: Serve) -> None:
    """A guard that was stopped with SIGSTOP cannot act, and would outlive a killed supervisor for ever."""
    serving = serve({"a": engine("ForksChild")})
    guard = wait_until(serving.guard)
    forked_child(serving, "a")
    guard.send_signal(signal.SIGSTOP)
    successor = wait_until(lambda: serving.guard() if not is_alive(guard) else None, what="another guard")
    assert successor.pid != guard.pid
    assert f"the guard process (pid {guard.pid}) was stopped: replacing it" in serving.log()
    kill_and_time(serving, least=4)


KILLED_AT_THE_NEXT_INSTRUCTION = """
import os, signal, subprocess, sys
from protocol.process.birth import helper_environment
from supervisor.workers.environment import directory_of_titles
from supervisor.workers import local

def popen(*args, real=subprocess.Popen, **keys):
    real(*args, **keys)
    os.kill(os.getpid(), signal.SIGKILL)

first = local.Guard(helper_environment(), directory_of_titles())
first.watch(int(sys.argv[1]))
first.kill()
subprocess.Popen = popen
first.restart()
"""


def test_a_new_guard_knows_the_groups_from_its_first_moment() -> None:
    """A supervisor may be killed right after it started a new guard, before it can tell the guard anything."""
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    try:
        script = [sys.executable, "-c", KILLED_AT_THE_NEXT_INSTRUCTION, str(left.pid)]
        assert subprocess.run(script, timeout=WITHIN).returncode == -signal.SIGKILL
        assert left.wait(WITHIN) == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()


def test_together_with_its_guard(serve: Serve) -> None:
    """Without a guard the kernel still kills the workers, since each has asked to die with its parent."""
    serving = serve({"a": engine(), "b": engine("HangsDeaf")})
    with serving.client() as client:
        stream = client.generate("b", "bad", max_tokens=50)
        for _ in range(5):
            next(stream)
        guard = wait_until(serving.guard)
        serving.process.send_signal(signal.SIGSTOP)  # so that it cannot replace the guard
        guard.kill()
        kill_and_time(serving, least=3)


def test_signals_to_the_whole_foreground_group_leave_the_guard(serve: Serve) -> None:
    """Ctrl-C in a terminal reaches every process of the group, and the guard must outlive the supervisor."""
    serving = serve({"a": engine()})
    guard = wait_until(serving.guard)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        guard.send_signal(number)
    assert os.getsid(guard.pid) != os.getsid(serving.pid)
    serving.overview()
    assert is_alive(guard)


def test_what_tests_have_started_ends_with_them() -> None:
    """This holds even if the process of the tests is killed."""
    program = (
        "import subprocess, sys, time\n"
        "from tests.orphans import end_with_us\n"
        "end_with_us()\n"
        "sleep = [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as tests:
        assert tests.stdout is not None
        started = psutil.Process(int(tests.stdout.readline()))
        assert is_alive(started)
        tests.kill()
    wait_until(lambda: not is_alive(started), what="its end")
