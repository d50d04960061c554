"""Without a terminal, commands and the supervisor's log report the phases of a slow load."""

import re
import signal
import subprocess
from pathlib import Path

import yaml

from tests.cli.programs import MODELCTL, environment, modelctl
from tests.serving import engine, wait_until

MOVING = r"loading \(([0-9]+)% after 1[0-9] s\)"


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
