"""The command serve: the supervisor itself, in the foreground or detached."""

import logging
import os
import sys
from pathlib import Path

import click

from protocol.process.log_style import LogStyle
from supervisor.cli import exit_codes
from supervisor.cli.command import Command
from supervisor.cli.compiling import compile_for
from supervisor.cli.config_file import find_config
from supervisor.cli.errors import CommandFailure
from supervisor.cli.hints import say
from supervisor.cli.options import config_file, runtime_dir_option


@click.command(
    cls=Command,
    examples={
        "modelctl serve": "Serve the models of ./models.yaml in this terminal",
        "modelctl serve --detach /etc/modelctl/models.yaml": "Serve in the background, and wait for the models",
    },
)
@config_file
@click.option("-d", "--detach", is_flag=True, help="Run in the background; return when the models are loaded.")
@click.option("-q", "--quiet", is_flag=True, help="Log to the log file only.")
@click.option("-w", "--watch", is_flag=True, help="Reload when the file changes.")
@click.option("--no-compile", is_flag=True, hidden=True, help="The caller has seen to it.")
@runtime_dir_option
def serve(file: Path | None, detach: bool, quiet: bool, watch: bool, no_compile: bool, runtime_dir: Path) -> int:
    """Run the supervisor with the models of a models.yaml (FILE)."""
    from supervisor.config import load_config
    from supervisor.listening import opening_of
    from supervisor.ports.descriptors import TooFewDescriptors, raise_limit
    from supervisor.yaml_source import ConfigError

    try:
        loaded = load_config(find_config(file, runtime_dir))
        opening = opening_of(loaded)
    except ConfigError as e:
        for problem in e.problems:
            say(str(problem))
        return exit_codes.CONFIG
    try:
        raise_limit(loaded.worker_count, ports=2 if opening is None else 3)
    except TooFewDescriptors as e:
        raise CommandFailure(exit_codes.CONFIG, "too_few_descriptors", str(e)) from None
    if not no_compile:
        try:
            compile_for(loaded.engines, quiet=quiet)
        except KeyboardInterrupt:
            return exit_codes.INTERRUPTED
    if detach:
        from supervisor.cli.detach import detach as start_detached

        return start_detached(
            loaded.file,
            runtime_dir,
            [w for m in loaded.models.values() if m.autostart for w in m.workers],
            ["--watch"] if watch else [],
        )

    from protocol.process.log_output import never_wait, write_rest
    from protocol.process.runtime_paths import admin_endpoint
    from supervisor.attempts import ListenError
    from supervisor.event_history import FAILS, EventKind, noted
    from supervisor.logs import set_up_logging
    from supervisor.loop import Supervisor
    from supervisor.runtime_dir import AlreadyRunning, RuntimeDir, RuntimeDirError
    from supervisor.workers.descendants import become_subreaper

    try:
        admin_endpoint(runtime_dir)  # raises ValueError if the longest socket path is too long
        runtime = RuntimeDir(runtime_dir)
    except AlreadyRunning as e:
        raise CommandFailure(exit_codes.TEMPFAIL, "already_running", str(e)) from None
    except RuntimeDirError as e:
        raise CommandFailure(exit_codes.CONFIG, "not_usable", str(e)) from None
    except OSError as e:
        what = f"{runtime_dir / e.filename}: {e.strerror}" if isinstance(e.filename, str) else e.strerror
        message = f"the runtime directory {runtime_dir} cannot be used: {what}"
        raise CommandFailure(
            exit_codes.CONFIG, "not_usable", f"{message}; repair it, or give another --runtime-dir"
        ) from None
    never_wait()  # from here on this process has a loop
    log = set_up_logging(
        runtime_dir, None if quiet else _screen(loaded.supervisor.log_style), loaded.supervisor.log_style
    )
    code = exit_codes.SOFTWARE
    become_subreaper()
    try:
        code = Supervisor(loaded, runtime, log, opening, watch=watch).run()
    except ListenError as e:
        log.error("%s", e)
        if quiet:  # otherwise the log goes to stderr, too
            say(f"modelctl: {e}")
        code = exit_codes.CONFIG
    except KeyboardInterrupt:  # before the supervisor handles SIGINT
        code = exit_codes.INTERRUPTED
    except BaseException:
        log.exception(FAILS, extra=noted(EventKind.SUPERVISOR))
    # Not a return: the interpreter's own exit would wait for the workers (multiprocessing joins its children). After a
    # fault the kernel and the guard kill workers that still run.
    write_rest()
    os._exit(code)


def _screen(style: LogStyle) -> logging.Handler:
    """Return the handler that writes the log to stderr."""
    if sys.stderr.isatty() and not style.is_json:
        from supervisor.cli.start_screen import StartScreen

        return StartScreen()
    return logging.StreamHandler(sys.stderr)
