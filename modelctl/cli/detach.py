"""The option serve --detach: start a supervisor in a session of its own, and return when its models are up."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from modelctl.cli import exit_codes
from modelctl.cli.options import connect, listener_of
from modelctl.cli.root import CommandFailure, say
from modelctl.cli.views import warn_of_troubles
from modelctl.cli.waiting import settled_up, wait_for, why_not_ready
from protocol.errors import ConnectionLost
from protocol.limits import SUPERVISOR_NAME
from protocol.process.paths import ENVIRONMENT_VARIABLE
from supervisor.config.report import how_to_ask
from supervisor.logs.logs import log_path
from supervisor.logs.phases import PhaseLines
from supervisor.workers.life import WorkerState

STALLED_S = 10.0
"""Seconds after which a new supervisor is given up that neither answers nor uses processor time. A supervisor that uses
processor time is only slow: on a busy machine its imports alone may take longer than that."""
SERVE = (sys.executable, "-P", "-m", "supervisor", "serve", "-q")  # -P: no module of the directory is imported
_DIRECTORIES = (ENVIRONMENT_VARIABLE, "XDG_RUNTIME_DIR", "XDG_STATE_HOME")


def start_detached(config: Path, runtime_dir: Path, autostart: list[str], options: Sequence[str] = ()) -> int:
    """Start a supervisor and wait until its models are up, or will not come up. Returns the exit code.

    Raises CommandFailure, with the reason of each model that is not ready.

    options  further options of ``serve``

    The supervisor runs in "/". If its directory were removed, the supervisor could start no more workers, because
    multiprocessing asks for the name of the current directory.
    """
    process = subprocess.Popen(
        [*SERVE, "--no-compile", "-c", config, "--runtime-dir", runtime_dir, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env=child_environment(),
    )
    try:
        return _see_up(process, config, runtime_dir, autostart)
    except KeyboardInterrupt:
        if process.poll() is None:
            message = f"interrupted; the supervisor (pid {process.pid}) goes on, `modelctl shutdown` ends it"
            raise CommandFailure(exit_codes.INTERRUPTED, "interrupted", message) from None
        return exit_codes.INTERRUPTED


def _see_up(process: "subprocess.Popen[bytes]", config: Path, runtime_dir: Path, autostart: list[str]) -> int:
    log = log_path(runtime_dir, SUPERVISOR_NAME)
    stall = _Stall(process.pid)
    phases = PhaseLines()
    answered = False
    while process.poll() is None:
        try:
            with connect(runtime_dir, admin=True) as client:
                answer = client.status()
                if listener_of(client) != process.pid:
                    process.wait()  # another supervisor holds the lock; ours is about to report that and end
                    break
                answered = True
                models = wait_for(client, autostart, settled_up, up=True)
        except ConnectionLost:
            if answered:
                process.wait()  # somebody has shut it down, or killed it
            elif stall.lasts(STALLED_S):
                process.kill()
                message = f"the supervisor does not answer; see {log}"
                raise CommandFailure(exit_codes.SOFTWARE, "no_answer", message) from None
            _say_later(phases, f"modelctl: supervisor pid {process.pid} starts")
            time.sleep(0.02)
            continue
        say(f"modelctl: supervisor pid {process.pid} serves {config}; log: {log}; `modelctl shutdown` ends it")
        warn_of_troubles(answer)
        loaded = [(m["model"], m["chat"], m["state"] == WorkerState.READY) for m in models or answer["models"]]
        for line in how_to_ask(answer["supervisor"].get("gateway"), loaded, config):
            say(line)
        if failed := [why_not_ready(m) for m in models if m["state"] != "ready"]:
            raise CommandFailure(exit_codes.FAILED, "not_ready", *failed)
        return exit_codes.OK
    return _account_for(process, log)


def _say_later(phases: PhaseLines, phase: str) -> None:
    """Print the phase when it has lasted for ten seconds, and then every ten seconds. Most often it is over by then."""
    line = phases.due("", phase, time.monotonic())
    if line not in ("", phase):
        say(line)


class _Stall:
    """The time for which a process has used no processor time."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._ticks = ""
        self._since = time.monotonic()

    def lasts(self, seconds: float) -> bool:
        """Return whether the process has used no processor time for ``seconds`` seconds."""
        now = time.monotonic()
        # These fields are utime and stime. Count from behind the program's name, because the name may hold spaces.
        ticks = " ".join(self._stat.read_text().rpartition(")")[2].split()[11:13])
        if ticks != self._ticks:
            self._ticks, self._since = ticks, now
        return now - self._since > seconds


def _account_for(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """Print the output of a supervisor that ended before its models were up. Return the exit code."""
    assert process.stderr is not None
    output = process.stderr.read().decode(errors="replace").rstrip()
    click.echo(output or f"modelctl: the supervisor ended with code {process.returncode}; see {log}", err=True)
    if process.returncode == 0:
        return exit_codes.UNAVAILABLE  # somebody ordered it to shut down
    return process.returncode if process.returncode > 0 else exit_codes.SOFTWARE


def child_environment() -> dict[str, str]:
    """Return the environment for an interpreter that is started with -P, perhaps in another directory.

    Its paths are absolute, so that the interpreter finds the modules and logs that this process finds.
    """
    environment = dict(os.environ)
    for name in _DIRECTORIES:
        if value := environment.get(name):
            environment[name] = os.path.abspath(value)
    given = environment.get("PYTHONPATH")
    path = [os.path.abspath(entry) for entry in given.split(os.pathsep)] if given else []
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = None
    if here is not None and sys.path[:1] in ([here], [""]):  # as with `python -m supervisor`
        path.insert(0, here)
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(path)
    return environment
