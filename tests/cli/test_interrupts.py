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
