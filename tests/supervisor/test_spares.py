"""When a spare worker is made: in a quiet moment, and not again and again if spares cannot live."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from supervisor.workers.local import LEAST_FREE, PAUSE_S, QUIET_S, TRIES, SparePlan
from tests.serving import ROOT, is_alive, wait_until

WANTED = ("transformers", "exllamav2", "mine:Engine")


def missing(plan: SparePlan, now: float, *there: str, starting: bool = False) -> list[str]:
    return plan.missing(WANTED, there, now, starting=starting)


def test_each_built_in_engine_gets_one_in_a_quiet_moment() -> None:
    plan = SparePlan()
    assert missing(plan, 0.0, starting=True) == []
    assert missing(plan, QUIET_S - 0.1) == []
    assert missing(plan, QUIET_S) == ["exllamav2", "transformers"]
    assert missing(plan, QUIET_S, "exllamav2") == ["transformers"]
    assert missing(plan, 10.0, starting=True) == []


def test_spares_that_end_by_themselves_are_not_made_for_ever() -> None:
    plan, now = SparePlan(), 100.0
    for number in range(1, TRIES + 1):
        assert "transformers" in missing(plan, now)
        assert plan.ended("transformers", now) is (number < TRIES)
        assert "transformers" not in missing(plan, now + PAUSE_S - 0.1)
        now += PAUSE_S
    assert missing(plan, now + 1e6) == ["exllamav2"]
    plan.used("transformers")
    assert "transformers" in missing(plan, now)


SPARE_AGENT = """
import pathlib, sys
from supervisor.cluster import agent
from supervisor.workers import local

directory = pathlib.Path(sys.argv[2])

def free_bytes():
    with open(directory / "asked", "a") as asked:
        asked.write("?")
    return int((directory / "free").read_text())

local.PAUSE_S = 0.1
agent.free_bytes = free_bytes
sys.exit(agent.main())
"""
"""A spare agent, to which a file tells the free memory. Whenever the agent asks, a letter is added to another file."""


def test_a_spare_agent_keeps_a_spare_worker_until_its_order_comes(tmp_path: Path) -> None:
    free, asked = tmp_path / "free", tmp_path / "asked"
    free.write_text("1")
    asked.touch()
    agent = subprocess.Popen(
        [sys.executable, "-P", "-c", SPARE_AGENT, "transformers", str(tmp_path)],
        stdin=subprocess.PIPE, cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip

    def worker() -> psutil.Process | None:
        for process in psutil.Process(agent.pid).children():
            with suppress(psutil.NoSuchProcess):
                if is_alive(process) and " ".join(process.cmdline()).startswith("modelctl: spare worker"):
                    return process
        return None

    with agent:
        wait_until(lambda: len(asked.read_text()) > 1, what="the second question for memory")
        assert worker() is None, "the machine has too little memory"
        free.write_text(str(LEAST_FREE))
        first = wait_until(worker, what="a spare worker")
        first.kill()
        second = wait_until(lambda: (found := worker()) != first and found, what="another spare worker")
        agent.communicate(b"")
    wait_until(lambda: not is_alive(second), what="its end with the agent")
