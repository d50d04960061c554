"""serve: the supervisor itself, in the foreground or detached."""

import os
import subprocess
import sys
import time
from pathlib import Path

import click

from protocol.errors import ConnectionLost
from supervisor.cli import exit_codes
from supervisor.cli.config_file import find_config
from supervisor.cli.options import connect, runtime_dir_option

DETACH_WAIT_S = 10.0


@click.command()
@click.option("-c", "--config", type=click.Path(path_type=Path), default=None, help="models.yaml to serve.")
@click.option("-d", "--detach", is_flag=True, help="Run in the background; returns when the models are loaded.")
@click.option("-q", "--quiet", is_flag=True, help="Log to the log file only.")
@runtime_dir_option
def serve(config: Path | None, detach: bool, quiet: bool, runtime_dir: Path) -> int:
    """Run the supervisor and start the models that are to start with it."""
    from supervisor.config import load_config
    from supervisor.yaml_source import ConfigError

    try:
        loaded = load_config(find_config(config))
    except ConfigError as e:
        for problem in e.problems:
            click.echo(str(problem), err=True)
        return exit_codes.CONFIG
    if detach:
        return _detach(loaded.file, runtime_dir, [n for n, m in loaded.models.items() if m.config.autostart])

    from protocol.runtime_paths import admin_endpoint
    from supervisor.logs import set_up_logging
    from supervisor.loop import Supervisor
    from supervisor.runtime_dir import AlreadyRunning, RuntimeDir, RuntimeDirError

    try:
        admin_endpoint(runtime_dir)  # the longest of the socket paths; too long is a ValueError that says so
        runtime = RuntimeDir(runtime_dir)
    except AlreadyRunning as e:
        click.echo(f"modelctl: {e}", err=True)
        return exit_codes.TEMPFAIL
    except (RuntimeDirError, ValueError) as e:
        click.echo(f"modelctl: {e}", err=True)
        return exit_codes.CONFIG
    log = set_up_logging(runtime_dir, quiet=quiet)
    code = exit_codes.SOFTWARE
    try:
        code = Supervisor(loaded, runtime, log).run()
    except BaseException:
        log.exception("the supervisor stops because of a fault of its own")
    # Not a return: an interpreter's own exit would wait for the workers (multiprocessing joins its children). Whoever
    # is still there after a fault is killed by the kernel and by the guard.
    sys.stderr.flush()
    os._exit(code)


def _detach(config: Path, runtime_dir: Path, autostart: list[str]) -> int:
    """Start a supervisor in a session of its own, and wait until its models are up (or are not going to be)."""
    from supervisor.cli.waiting import settled_up, wait_for
    from supervisor.logs import SUPERVISOR_LOG, log_path

    log = log_path(runtime_dir, SUPERVISOR_LOG)
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor", "serve", "-q", "-c", str(config), "--runtime-dir", str(runtime_dir)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + DETACH_WAIT_S
    while True:
        if process.poll() is not None:
            assert process.stderr is not None
            click.echo(process.stderr.read().decode(errors="replace"), err=True, nl=False)
            return process.returncode or exit_codes.SOFTWARE
        try:
            client = connect(runtime_dir, admin=True)
        except ConnectionLost:
            if time.monotonic() > deadline:
                process.kill()
                click.echo(f"modelctl: the supervisor does not answer; see {log}", err=True)
                return exit_codes.SOFTWARE
            time.sleep(0.02)
            continue
        with client:
            if client.status()["supervisor"]["pid"] != process.pid:
                process.wait()  # another supervisor holds the lock; ours is about to say so and leave
                continue
            models = wait_for(client, autostart, settled_up)
        click.echo(
            f"modelctl: supervisor pid {process.pid} serves {config}; log: {log}; `modelctl shutdown` ends it", err=True
        )
        return exit_codes.OK if all(m["state"] == "ready" for m in models) else exit_codes.FAILED
