"""``modelctl events`` tells what happened, also to the supervisors before. ``requests`` and ``cancel``."""

import json
import signal
import subprocess
from collections.abc import Iterator

import pytest

from modelctl.cli.requests import requests_text
from supervisor.logs.events import NAME
from supervisor.logs.files import log_dir
from tests.cli.programs import MODELCTL, Terminal
from tests.serving import Serving, engine, wait_until


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving({"a": engine(), "b": engine(autostart=False)}) as serving:
        yield serving


def told(serving: Serving, *arguments: str) -> list[str]:
    """Return the messages of the events."""
    done = serving.modelctl("events", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["message"] for line in done.stdout.splitlines()]


def test_events_say_what_happened_and_why(serving: Serving) -> None:
    serving.modelctl("stop", "a")
    done = serving.modelctl("events")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert any("a: ready -> draining (stop ordered)" in line for line in lines), done.stdout
    assert all(line[4] == "-" and line[20:].startswith("INFO") for line in lines), done.stdout
    assert lines == sorted(lines, key=lambda line: line[:19])
    assert serving.modelctl("events", "-n", "2").stdout.splitlines() == lines[-2:]
    assert {message.split(":")[0] for message in told(serving, "b")} <= {"b"}
    assert told(serving, "--since", "1h") == told(serving)


def test_events_survive_the_supervisor(serving: Serving) -> None:
    before = told(serving)
    assert any("starting -> loading" in message for message in before)
    serving.kill()
    done = serving.modelctl("events", "--json")
    assert "no supervisor is running" in done.stderr
    assert [json.loads(line)["message"] for line in done.stdout.splitlines()] == before
    serving.start_again({"a": engine()})
    serving.wait_state("a", "ready")
    after = told(serving)
    assert after[: len(before)] == before
    assert sum("starting -> loading" in message for message in after) == 2
    numbers = [event["number"] for event in serving.order("events", limit=512)["events"]]
    assert numbers == list(range(1, len(numbers) + 1))


def test_broken_lines_of_the_file_are_left_out(serving: Serving) -> None:
    before = told(serving)
    serving.kill()
    with open(log_dir(serving.runtime_dir) / NAME, "a") as file:
        file.write('{"time": 1.0, "kind"\n\n[1]\n{"time": "x", "kind": "a", "level": "b", "message": "c"}\n')
        file.write('{"time": 1.0, "kind": "a", "level": "b", "message": "c", "model": 5}\n\x00\xff')
    assert told(serving) == before


def test_names_that_nothing_has_are_refused() -> None:
    with Serving({"a": engine(aliases=["gpt-4o"]), "gone": engine()}) as serving:
        serving.order("stop", model="gone")
        serving.wait_state("gone", "stopped")
        serving.write_models({"a": engine(aliases=["gpt-4o"])})
        serving.modelctl("reload")
        assert told(serving, "gone"), "the events still know the model"
        assert told(serving, "gpt-4o") == told(serving, "a"), "another name of the model"
        assert told(serving, "gon*") == told(serving, "gone")
        for name, says in (
            ("nosuch", "no model 'nosuch' is configured: there is a, gone"),
            ("gpt-4", "no model 'gpt-4' is configured; did you mean 'gpt-4o'?"),
            ("x*", "no model matches 'x*', now or in the events: there is a, gone"),
        ):
            done = serving.modelctl("events", name, "a")
            assert (done.returncode, done.stdout, says in done.stderr) == (1, "", True), done.stderr


@pytest.mark.long
def test_follow_goes_on_with_the_next_supervisor(serving: Serving) -> None:
    command = [*map(str, MODELCTL), "events", "--follow", "--json", "--runtime-dir", str(serving.runtime_dir)]
    with subprocess.Popen(command, env=serving.environment, stdout=subprocess.PIPE, text=True) as following:
        try:
            assert following.stdout is not None
            seen: list[str] = []

            def read_until(text: str) -> None:
                for line in following.stdout or ():
                    seen.append(json.loads(line)["message"])
                    if text in seen[-1]:
                        return

            read_until("a: ready, ")
            serving.order("start", model="b")
            read_until("b: ready, ")
            serving.kill()
            serving.start_again({"a": engine(), "b": engine(autostart=False)})
            read_until("serving")
            read_until("a: ready, ")
            assert len(seen) == len(told(serving)), "no event twice, none missing"
        finally:
            following.send_signal(signal.SIGINT)
        assert following.wait(timeout=30) == 130


def test_wrong_durations(serving: Serving) -> None:
    for wrong in ("5x", "-1s", "8d", "now"):
        done = serving.modelctl("events", f"--since={wrong}")
        assert done.returncode == 2
        assert "is no duration" in done.stderr


def test_requests_are_listed_and_cancelled(serving: Serving) -> None:
    with serving.client() as client:
        stream = client.generate("a", prompt="x" * 40, max_tokens=4000)
        deltas = iter(stream)
        next(deltas)
        (header, row) = serving.modelctl("requests").stdout.splitlines()
        assert header.split() == ["ID", "MODEL", "STATE", "KEY", "PROMPT", "ANSWER", "PRIORITY", "AGE", "WORKER"]
        name, model, state, *_ = row.split()
        assert (model, state) == ("a", "running")
        assert "xxx" not in row
        (shown,) = json.loads(serving.modelctl("requests", "--json").stdout)["requests"]
        assert shown["id"] == name
        done = serving.modelctl("cancel", name)
        assert (done.returncode, done.stdout) == (0, f"{name}: cancelled\n")
        for _ in deltas:
            pass
        assert stream.finish_reason == "cancelled"
        done = serving.modelctl("cancel", name)
        assert done.returncode == 1
        assert f"no request '{name}' is unfinished" in done.stderr
        wait_until(lambda: not json.loads(serving.modelctl("requests", "--json").stdout)["requests"])


def test_requests_of_some_models_are_listed(serving: Serving) -> None:
    def listed(*names: str) -> list[str]:
        return [each["model"] for each in json.loads(serving.modelctl("requests", *names, "--json").stdout)["requests"]]

    serving.modelctl("start", "b")
    with serving.client() as client:
        streams = [client.generate(model, prompt="x", max_tokens=4000) for model in ("a", "b", "a")]
        wait_until(lambda: sorted(listed()) == ["a", "a", "b"])
        assert (listed("a"), listed("[bc]"), sorted(listed("*"))) == (["a", "a"], ["b"], ["a", "a", "b"])
        assert "1 more; --limit shows up to 500" in serving.modelctl("requests", "a", "-n", "1").stdout
        for wrong, says in (("nosuch", "no model 'nosuch'"), ("no*", "no model matches 'no*'")):
            done = serving.modelctl("requests", wrong)
            assert (done.returncode, says in done.stderr) == (1, True), done.stderr
        for stream in streams:
            stream.cancel()
    reply = {"requests": [], "total": 0, "unread": 7}
    assert "the 7 youngest requests of all models were not looked at" in requests_text(reply, None)


def test_ended_requests_are_listed(serving: Serving) -> None:
    serving.modelctl("start", "b")
    with serving.client() as client:
        for model in ("a", "b", "a"):
            client.complete(model, "x" * 40, max_tokens=3)
        header, *rows = serving.modelctl("requests", "--ended", "-n", "2").stdout.splitlines()
        assert header.split()[4:9] == ["END", "PROMPT", "CACHED", "ANSWER", "WAITED"]
        assert [row.split()[3] for row in rows] == ["b", "a"]
        assert all(" length " in row and "xxx" not in row for row in rows)
        of_b = json.loads(serving.modelctl("requests", "b", "--ended", "--json").stdout)["requests"]
        assert {each["model"] for each in of_b} == {"b"}
        assert (of_b[-1]["prompt_tokens"], of_b[-1]["tokens"]) == (40, 3)
        done = serving.modelctl("requests", "-n", "501")
        assert (done.returncode, "501 is more than 500 unfinished requests" in done.stderr) == (2, True)
    with Terminal(
        "requests", "--ended", "--runtime-dir", serving.runtime_dir, environment=serving.environment, columns=60
    ) as terminal:
        assert terminal.wait_for_exit() == 0
        assert max(map(len, terminal.look().splitlines())) <= 60


def test_requests_fit_a_narrow_terminal(serving: Serving) -> None:
    command = ("requests", "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment, columns=60) as terminal:
        assert terminal.wait_for_exit() == 0
        assert max(map(len, terminal.look().splitlines())) <= 60
