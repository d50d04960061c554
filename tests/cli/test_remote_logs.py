"""``modelctl logs`` and ``modelctl events`` show what a supervisor on another machine has written."""

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.cli.programs import MODELCTL
from tests.keyed import Keyed
from tests.serving import engine


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    with Keyed({"a": engine(), "two": engine(replicas=2)}, {"boss": "admin", "viewer": "infer,status"}) as keyed:
        yield keyed


@pytest.mark.long
def test_the_command_shows_and_follows_a_log_of_another_machine(keyed: Keyed) -> None:
    serving = keyed.serving
    to = ("--connect", keyed.endpoint, "--key-file", str(keyed.file("boss")))
    here = serving.modelctl("logs", "two:2", "-n", "100").stdout
    assert "two:2: spawned" in here
    for more in ((), ("--since", "1h")):
        assert serving.modelctl("logs", "two:2", *more, *to).stdout == here
        assert serving.modelctl("logs", "two:2", *more).stdout == here
        assert serving.modelctl("logs", "two:2", "-n", "1", *more, *to).stdout == here.splitlines(True)[-1]
    assert serving.modelctl("logs", "two:2", "-n", "0", *to).stdout == ""
    assert serving.modelctl("logs", "two:2", "--since", "0s", *to).stdout == ""
    done = serving.modelctl("logs", "nosuch", *to)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no model 'nosuch' is configured" in done.stderr
    done = serving.modelctl("logs", "--connect", keyed.endpoint, "--key-file", str(keyed.file("viewer")))
    assert done.returncode == 77
    command = [*map(str, MODELCTL), "logs", "two:1", "--follow", "--json", "-n", "1", *to]
    with subprocess.Popen(command, env=serving.environment, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        try:
            assert "line" in json.loads(following.stdout.readline())
            with open(serving.status("two:1")["log"], "a") as file:
                file.write("".join(f"line {n}\n" for n in range(3000)))
            got = [json.loads(following.stdout.readline())["line"] for _ in range(3000)]
            assert got == [f"line {n}" for n in range(3000)]
        finally:
            following.send_signal(signal.SIGINT)
    assert following.returncode == 130


def test_the_command_shows_and_follows_the_events_of_another_machine(keyed: Keyed) -> None:
    serving = keyed.serving
    to = ("--connect", keyed.endpoint, "--key-file", str(keyed.file("viewer")))
    told = serving.modelctl("events", "two", "--since", "1h", *to).stdout
    assert "two:2: ready, " in told
    assert told == serving.modelctl("events", "two", "--since", "1h").stdout
    command = [*map(str, MODELCTL), "events", "a", "--follow", "--json", "-n", "1", *to]
    with subprocess.Popen(command, env=serving.environment, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        try:
            last = json.loads(following.stdout.readline())
            serving.order("restart", model="a")
            new = json.loads(following.stdout.readline())
            assert (last["state"], new["before"], new["model"]) == ("ready", "ready", "a")
        finally:
            following.send_signal(signal.SIGINT)
    assert following.returncode == 130
    serving.wait_state("a", "ready")
