"""Ctrl-C ends an answer of a model that hangs, and a conversation that has ended leaves nothing behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import Terminal
from tests.deterministic_engine import answer
from tests.serving import Serving, engine

HINT = "(the model does not react; Ctrl-C again leaves it)"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {"a": engine(), "hanging": engine("HangsAtToken"), "hanging-too": engine("HangsAtToken")}
    with Serving(models) as serving:
        yield serving


def test_an_answer_that_hangs(serving: Serving) -> None:
    """The supervisor confirms the cancel after a second, since a hung worker does not."""
    run = ("run", "hanging", "bad prompt", "--raw", "--runtime-dir", serving.runtime_dir)
    with Terminal(*run, environment=serving.environment) as terminal:
        terminal.wait_for(answer("bad prompt", 5))
        terminal.type("\x03")
        assert terminal.wait_for_exit() == 130


def test_an_answer_that_hangs_in_a_conversation(serving: Serving) -> None:
    run = ("run", "hanging-too", "--raw", "--runtime-dir", serving.runtime_dir)
    with Terminal(*run, environment=serving.environment) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("bad prompt\n")
        terminal.wait_for(answer("bad prompt", 5))
        terminal.type("\x03")
        terminal.wait_for("(cancelled)\n")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.wait_for_exit() == 0


def test_a_supervisor_that_hangs(serving: Serving) -> None:
    run = ("run", "a", "endless", "--raw", "--max-tokens", "4000", "--runtime-dir", serving.runtime_dir)
    with Terminal(*run, environment=serving.environment) as terminal:
        terminal.wait_for(answer("endless", 5))
        os.kill(serving.pid, signal.SIGSTOP)
        try:
            terminal.type("\x03")
            terminal.wait_for(HINT)
            terminal.type("\x03")
            assert terminal.wait_for_exit() == 130
        finally:
            os.kill(serving.pid, signal.SIGCONT)


def test_a_conversation_leaves_nothing_behind(serving: Serving, tmp_path: Path) -> None:
    run = ("run", "a", "--raw", "--max-tokens", "40", "--runtime-dir", serving.runtime_dir)
    home = {**serving.environment, "HOME": str(tmp_path)}
    with Terminal(*run, environment=home, cwd=tmp_path) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("the secret question\n")
        said = answer("the secret question", 40)
        terminal.wait_for(said)
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.wait_for_exit() == 0
    assert list(tmp_path.iterdir()) == [], "no history is written"
    logs = list((serving.runtime_dir / "logs").iterdir())
    assert len(logs) == 5
    for log in logs:
        assert "secret" not in log.read_text()
        assert said[:12] not in log.read_text()


@pytest.mark.parametrize(
    ("order", "seen", "said", "state"),
    [
        ("start slow", "slow +loading", "the start of slow goes on: ", "loading"),
        ("run lazy hi", "lazy +loading", "the load of lazy goes on: ", "loading"),
        ("stop busy", "busy +draining", "the stop of busy goes on: ", "draining"),
        ("restart busy", "busy +draining", "the restart of busy goes on: ", "draining"),
        ("reload busy --exchange", "busy +draining", "the reload goes on: ", "draining"),
        ("sleep sleeper", "sleeper +ready", "sleeper will still go to sleep: ", "ready"),
    ],
)
def test_what_goes_on_without_the_command(order: str, seen: str, said: str, state: str) -> None:
    models = {
        "slow": engine("SlowLoad", load_s=60, autostart=False),
        "lazy": engine("SlowLoad", load_s=60, lazy=True),
        "busy": engine(step_s=0.05),
        "sleeper": engine(step_s=0.05, lazy=True, autostart=True) | {"engine": "tests.sleeping_engine:Sleeper"},
    }
    model = order.split()[1]
    with Serving({model: models[model]}) as serving, serving.client() as client:
        if model in ("busy", "sleeper"):
            stream = client.generate(model, "endless", max_tokens=4000)
            next(stream)
        command = (*order.split(), "--runtime-dir", serving.runtime_dir)
        with Terminal(*command, environment=serving.environment) as terminal:
            terminal.wait_for_match(seen)
            terminal.type("\x03")
            terminal.wait_for(
                f"^C\nmodelctl: interrupted; {said}`modelctl ps --runtime-dir {serving.runtime_dir}` shows"
            )
            assert terminal.wait_for_exit() == 130
        assert serving.status(model)["state"] == state


def test_a_shutdown_goes_on_without_the_command() -> None:
    with Serving({"a": engine()}) as serving, serving.client() as client:
        stream = client.generate("a", "endless", max_tokens=2000)
        next(stream)
        with Terminal("shutdown", "--runtime-dir", serving.runtime_dir, environment=serving.environment) as terminal:
            serving.wait_state("a", "draining")
            terminal.type("\x03")
            terminal.wait_for(f"interrupted; the shutdown of the supervisor (pid {serving.pid}) goes on: `modelctl")
            assert terminal.wait_for_exit() == 130
        assert stream.complete().text == answer("endless", 2000)
        assert serving.process.wait(60) == 0
