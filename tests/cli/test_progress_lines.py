"""A terminal shows how a slow load gets on. Without one, commands and the supervisor's log report its phases."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cli.programs import MODELCTL, Terminal, environment, modelctl
from tests.conftest import Serve
from tests.serving import engine, wait_until

MOVING = r"loading \(([0-9]+)% after 1[0-9] s\)"


@pytest.mark.long
def test_a_slow_load_is_told_every_ten_seconds_without_a_terminal(away: Path) -> None:
    config = away / "models.yaml"
    config.write_text(yaml.safe_dump({"models": {"a": engine("SlowLoad", load_s=120)}}))
    with subprocess.Popen(
        [*MODELCTL, "serve", "--detach", "-c", config, "--runtime-dir", away / "r"],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as serving:
        assert serving.stderr is not None
        lines = []
        while not (found := re.fullmatch(f"a: {MOVING}\n", line := serving.stderr.readline())):
            assert line, "the command has ended"
            lines.append(line)
        assert 0 < int(found[1]) < 100
        assert lines[-1] == "a: loading\n"
        assert len(lines) == len(set(lines)), "each phase has one line"
        log = away / "r" / "logs" / "supervisor.log"
        wait_until(lambda: re.search(f" a: {MOVING}\n", log.read_text()), what="a line of the supervisor's log")
        serving.send_signal(signal.SIGINT)
        serving.communicate()  # read the rest of its output
    assert serving.returncode == 130
    assert modelctl("shutdown", "--now", "--runtime-dir", away / "r").returncode == 0


def test_a_terminal_shows_bytes_their_rate_and_the_time_left_in_place(serve: Serve) -> None:
    serving = serve({"slow": engine("SlowLoad", autostart=False, load_s=2.5, load_bytes=6 << 30)})
    command = ("start", "slow", "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment, columns=100) as terminal:
        terminal.wait_for_match(
            r"slow +loading +\[#+-+\] +\d+%  \d\.\d GiB of 6\.0 GiB, (\d+ M|\d\.\d G)iB/s, \d+ s left\n"
        )
        assert terminal.wait_for_exit() == 0
        left = terminal.look()
    assert not re.search("\x1b\\[[0-9;]*m", left), "no colours"
    assert re.search("\x1b\\[1A\x1b\\[Jslow +ready +loaded in", left)


def test_serve_in_a_terminal_shows_starts_below_its_log(away: Path) -> None:
    config = away / "models.yaml"
    config.write_text(
        yaml.safe_dump({"models": {"a": engine("SlowLoad", load_s=2, load_bytes=6 << 30), "b": engine()}})
    )
    command = ("serve", config, "--runtime-dir", away / "r")
    with Terminal(*command, environment=environment(), columns=100) as terminal:
        terminal.wait_for_match(r"a +loading +\[#+-+\] +\d+%  \d\.\d GiB of 6\.0 GiB, .* left\n")
        terminal.wait_for_match(r"\x1b\[1A\x1b\[J\d{4}-\d\d-\d\d \S+ INFO +a: loading -> ready")
        terminal.type("\x03")
        assert terminal.wait_for_exit() == 0
        assert "GiB" not in terminal.look()
