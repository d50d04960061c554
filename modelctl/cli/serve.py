"""The commands serve, gateway and metrics. serve is the supervisor itself, in the foreground or detached."""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from modelctl.cli import exit_codes
from modelctl.cli.options import (
    config_file,
    connect,
    end,
    ending_by,
    find_config,
    listener_of,
    runtime_dir_option,
    supervisor_options,
    way_to,
)
from modelctl.cli.root import CommandFailure, command, drop_unwritten, say
from modelctl.cli.waiting import LiveLines, Shown, check_ready, settled_up, ticking, wait_for
from protocol.errors import ConnectionLost, WireError
from protocol.limits import SUPERVISOR_NAME
from protocol.process.logs import OUTSIDE
from protocol.process.paths import ENVIRONMENT_VARIABLE
from protocol.process.shown import FORMATS, LEVELS, LogStyle
from protocol.process.worker_spec import install_command, not_installed
from supervisor.config.server import Address, parse_address
from supervisor.config.spelling import PhaseLines
from supervisor.workers.environment import EXTENSION_BUILD

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from protocol.client.sync_client import Client
    from supervisor.config.server import GatewayConfig


# Compile ExLlamaV2's CUDA code before serving, once and visibly, in a process of its own.
#
# Workers would compile the code, too, under the same lock. But then one worker would compile for minutes while all
# models seem to hang in loading. The module that the process runs (``EXTENSION_BUILD``) describes its output.
#
# The builder has a session of its own. So Ctrl-C and a hangup of the terminal reach only ``serve``, which then ends
# the builder. If ``serve`` is killed (SIGKILL), the kernel sends the builder a signal.


ENGINE = "exllamav2"
END_S = 0.5
"""Seconds that the builder has to end its compilers. After that all of them are killed."""


def compile_for(engines: Iterable[str], *, quiet: bool) -> None:
    """Compile the extension if one of the engines needs it. Show the steps on stderr, and wait until it is done.

    A failure is reported, but does not end serving: models of other engines are served, and ``status`` says why those
    of this engine cannot be. Ctrl-C ends the builder (KeyboardInterrupt). SIGTERM and SIGHUP end the builder, and then
    this process, as always before serving. Call this in the main thread only (ValueError).
    """
    if ENGINE not in engines:
        return
    with ending_by(signal.SIGTERM, signal.SIGHUP):
        _compile(quiet)


def _compile(quiet: bool) -> None:
    shown: dict[str, Shown] = {}
    # From the main thread, because the builder ends with the thread that starts it (PR_SET_PDEATHSIG).
    with (
        subprocess.Popen(
            [*EXTENSION_BUILD, str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment(), start_new_session=True,
        ) as builder,
        ticking(shown),
    ):  # fmt: skip
        assert builder.stdout is not None
        assert builder.stderr is not None
        try:
            for line in builder.stdout:
                if quiet or (step := _step_of(line.split())) is None:
                    continue
                if sys.stderr.isatty():
                    shown[""] = step[1]
                else:
                    _say(f"{step[0]}\n")
            code = builder.wait()
        except BaseException:
            end(builder, END_S)
            raise
        why = builder.stderr.read().strip().rpartition("\n")[2] or f"exit code {code}"
    if code:
        _say(f"modelctl: ExLlamaV2's CUDA code is not compiled, its models will not load: {why}\n")


def _step_of(words: list[str]) -> tuple[str, Shown] | None:
    """Return what the builder has printed as a line of a log, and as one that is redrawn; None for other words."""
    what, done, total = "compiling ExLlamaV2's CUDA code", 0, 0
    match words:
        case ["build", *numbers]:
            done, total = map(int, numbers)
        case ["waiting"]:
            what = f"another process is {what}"
        case _:
            return None
    return f"{what}: {done} of {total}" if total else what, Shown(
        what, what, {"done": done, "total": total, "unit": "steps"}
    )


def _say(text: str) -> None:
    try:
        click.echo(text, err=True, nl=False)
    except OSError:  # nobody reads stderr any more; that is no reason to give up a build of minutes
        drop_unwritten()


@command(
    ("modelctl serve --detach /etc/modelctl/models.yaml", "Serve in the background, and wait for the models"),
)
@config_file
@click.option("-d", "--detach", is_flag=True, help="Run in the background; return when the models are loaded.")
@click.option("-q", "--quiet", is_flag=True, help="Log to the log file only.")
@click.option("-w", "--watch", is_flag=True, help="Reload when the file changes.")
@click.option("--no-compile", is_flag=True, hidden=True, help="The caller has seen to it.")
@runtime_dir_option
def serve(file: Path | None, detach: bool, quiet: bool, watch: bool, no_compile: bool, runtime_dir: Path) -> int:
    """Run the supervisor with the models of a models.yaml (FILE)."""
    from supervisor.config.file import load_config, opening_of
    from supervisor.config.yaml_source import ConfigError
    from supervisor.ports.descriptors import TooFewDescriptors, raise_limit

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
        return start_detached(
            loaded.file,
            runtime_dir,
            [w for m in loaded.models.values() if m.autostart for w in m.workers],
            ["--watch"] if watch else [],
        )

    from protocol.process.logs import never_wait, write_rest
    from protocol.process.paths import admin_endpoint
    from supervisor.logs.events import FAILS, EventKind, noted, set_up_logging
    from supervisor.loop import Supervisor
    from supervisor.ports.sockets import ListenError
    from supervisor.runtime import AlreadyRunning, RuntimeDir, RuntimeDirError
    from supervisor.workers.orphans import become_subreaper

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
        return StartScreen()
    return logging.StreamHandler(sys.stderr)


# The log of ``serve`` on a terminal, with a line below it for each model that starts, which is redrawn in place.


class StartScreen(logging.StreamHandler[TextIO]):
    """Writes records to stderr, which has to be a terminal. ``supervisor.fleet.fleet`` calls ``show_starts``.

    Make one after ``logs.never_wait``.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lines = LiveLines(for_people=False)
        self._drawn = False

    def show_starts(self, starts: Mapping[str, tuple[str, Mapping[str, Any] | None]]) -> None:
        """Draw a line for each worker that starts: name → (phase, progress). Remove the lines of before.

        Draw nothing while the terminal takes no output (Ctrl-S): the lines would take the room of the log's lines.
        """
        shown = {name: Shown(f"{name:<16} {phase:<9}", phase, progress) for name, (phase, progress) in starts.items()}
        if (shown or self._drawn) and not OUTSIDE[2].is_behind:
            self._lines.show(shown)
            self._drawn = bool(shown)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record where the lines are. The next look draws them below it."""
        self._lines.clear()
        super().emit(record)


# The option serve --detach: start a supervisor in a session of its own, and return when its models are up.


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
    from modelctl.cli.views import warn_of_troubles
    from supervisor.config.report import how_to_ask
    from supervisor.logs.files import log_path

    log = log_path(runtime_dir, SUPERVISOR_NAME)
    lines = PhaseLines()

    def tell() -> None:
        """Print that it starts when that has lasted for ten seconds, and then every ten. Most often it is over."""
        phase = f"modelctl: supervisor pid {process.pid} starts"
        if (line := lines.due("", phase, time.monotonic())) not in ("", phase):
            say(line)

    if (client := client_of(process, runtime_dir, log, tell)) is not None:
        with suppress(ConnectionLost), client:  # somebody has shut it down, or killed it
            answer = client.status()
            models = wait_for(client, autostart, settled_up, LiveLines(), up=True)
            say(f"modelctl: supervisor pid {process.pid} serves {config}; log: {log}; `modelctl shutdown` ends it")
            warn_of_troubles(answer)
            loaded = [(m["model"], m["makes"] or m["chat"], m["state"] == "ready") for m in models or answer["models"]]
            for line in how_to_ask(answer["supervisor"].get("gateway"), loaded, config):
                say(line)
            check_ready(models)
            return exit_codes.OK
        process.wait()
    return _account_for(process, log)


def client_of(
    process: "subprocess.Popen[bytes]", runtime_dir: Path, log: Path, tell: Callable[[], None] = lambda: None
) -> "Client | None":
    """Wait for a supervisor that was started. Return a client of it; None if it has ended before it answered.

    tell  is called while the supervisor starts

    Raises CommandFailure for a supervisor that neither answers nor uses processor time. It is killed.
    """
    ticks, since = "", time.monotonic()
    while process.poll() is None:
        with suppress(ConnectionLost):
            client = connect(runtime_dir)
            if listener_of(client) == process.pid:
                return client
            client.close()  # of another supervisor: ours is about to report that and end, or takes its place
        if (now := _processor_time(process.pid)) != ticks:
            ticks, since = now, time.monotonic()
        elif time.monotonic() - since > STALLED_S:
            process.kill()
            raise CommandFailure(exit_codes.SOFTWARE, "no_answer", f"the supervisor does not answer; see {log}")
        tell()
        time.sleep(0.02)
    return None


def _processor_time(pid: int) -> str:
    """Return the fields utime and stime of a process, in ticks."""
    # Count from behind the program's name, because the name may hold spaces.
    return " ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])


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


# The command gateway: serve OpenAI's API over HTTP for a supervisor, usually one on another machine.


PATIENCE_S = 35.0
"""Seconds that answers may take to complete after the first signal. A second signal ends them at once."""


@command(
    ("modelctl gateway --connect tcp://192.168.1.5:5570 --key-file web.key", "Serve another machine's models"),
)
@click.option("--listen", metavar="ADDRESS:PORT", help="Address and port to listen on.  [default: 127.0.0.1:8000]")
@click.option("--auth", metavar="keys|none", help="none: requests need no token; for loopback only.  [default: keys]")
@click.option("--processes", type=int, help="Processes that share the port.  [default: 1]")
@click.option("--allowed-host", "allowed_hosts", multiple=True, help="A name by which clients may call the gateway.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="An origin of web pages that may use the API.")
@click.option("--certificate", help="PEM file of the certificate chain, for HTTPS.")
@click.option("--private-key", help="PEM file of its private key.")
@click.option("--max-body", help="Largest body of a request.  [default: 16MiB]")
@click.option("--stored-items", help="Bytes of responses' items that are kept in memory.  [default: 128MiB]")
@click.option("--keepalive", metavar="comment|chunk|off", help="What keeps silent streams open.  [default: comment]")
@click.option("--progress", metavar="comment|reasoning", help="Where chats tell of a model's load.  [default: comment]")
@click.option(
    "--reasoning-key",
    metavar="reasoning_content|reasoning",
    help="The key of the reasoning in answers.  [default: reasoning_content]",
)
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="Least level logged.")
@click.option(
    "--log-format", type=click.Choice(FORMATS), default="human", show_default=True, help="json: an object in each line."
)
@supervisor_options
def gateway(runtime_dir: Path, log_level: str, log_format: str, **given: Any) -> int:
    """Serve OpenAI's API over HTTP in this terminal, for a supervisor that runs already.

    On the supervisor's machine, the section `gateway` of models.yaml does the same. For another machine, give --connect
    and a key with the right `gateway`. The options are keys of the section `gateway`.
    """
    from protocol.client.transport import ClientKey
    from protocol.process.logs import begin_log, never_wait
    from protocol.process.worker_spec import missing_for_gateway
    from supervisor.gateway import CHECK_S, GatewayProcesses, settings_of, with_seal_secret
    from supervisor.helper import HelperWatch

    config = _config_of(given)
    style = LogStyle(log_level, log_format)
    settings = replace(settings_of(config, Path.cwd()), log_style=style)
    way = way_to(runtime_dir)
    if "key" in way:
        try:
            ClientKey.load(way["key"])
        except ValueError as e:
            raise CommandFailure(exit_codes.CONFIG, "bad_key", str(e)) from None
        settings = replace(settings, connect=str(way["endpoint"]), key_file=str(Path(way["key"]).absolute()))
    else:
        settings = with_seal_secret(replace(settings, runtime_dir=str(runtime_dir)), runtime_dir)
    if (missing := missing_for_gateway()) is not None:
        raise CommandFailure(exit_codes.CONFIG, "not_installed", missing)
    never_wait()
    begin_log("gateway", style)
    watch = HelperWatch()
    processes = GatewayProcesses(config, settings, logging.getLogger("modelctl"), watch)
    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) > 1:
            processes.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        processes.check()
        if not processes.is_open:
            raise CommandFailure(exit_codes.CONFIG, "cannot_listen")  # the log has said why
        poll = select.poll()
        poll.register(watch.descriptor, select.POLLIN)
        while not signals:
            if poll.poll(CHECK_S * 1000):
                watch.hear()
            processes.check()
    finally:
        processes.close(PATIENCE_S)
    return exit_codes.INTERRUPTED if signals[0] == signal.SIGINT else exit_codes.OK


def _config_of(given: dict[str, Any]) -> "GatewayConfig":
    """Return the section ``gateway`` that the options stand for. Raises UsageError with the option that is wrong."""
    from protocol.values import Unfit
    from supervisor.config.reading import fit
    from supervisor.config.server import GatewayConfig, gateway_problems

    names = {"allowed_hosts": "--allowed-host", "cors_origins": "--cors-origin"}
    present = {key: value for key, value in given.items() if value not in (None, ())}
    keys = {key: list(value) if isinstance(value, tuple) else value for key, value in present.items()}
    try:
        config = fit(GatewayConfig, keys)
        problems = gateway_problems(config)
    except Unfit as e:
        problems = [(str(flaw.path[0]), flaw.message) for flaw in e.flaws]
    if problems:
        key, message = problems[0]
        raise click.UsageError(f"{names.get(key, '--' + key.replace('_', '-'))}: {message}")
    return config


# The command metrics: print the metrics once, or serve them for Prometheus where no gateway runs.


CONNECTION_S = 10.0
"""Seconds that a client of the HTTP port may be silent."""


@command(
    ("modelctl metrics", "Print all metrics once"),
    ("modelctl metrics --listen 9400", "Serve them at http://127.0.0.1:9400/metrics"),
)
@click.option("--listen", metavar="ADDRESS:PORT", help="Serve the metrics there, for everybody who can reach it.")
@supervisor_options
def metrics(listen: str | None, runtime_dir: Path) -> None:
    """Print the metrics in the format of Prometheus, or serve them.

    A gateway serves the same under /metrics, for keys with the right `status`.
    """
    if not_installed(("prometheus_client",)):
        text = f"metrics need the package prometheus-client: run {install_command('metrics')}"
        raise CommandFailure(exit_codes.CONFIG, "not_installed", text)
    if listen is None:
        with connect(runtime_dir) as client:
            click.echo(_read(client).decode(), nl=False)
        return
    try:
        address = parse_address(listen)
    except ValueError as e:
        raise click.UsageError(f"--listen {listen}: {e}") from None
    from protocol.client.sync_client import Client

    with Client(**way_to(runtime_dir)) as client, _server(address, lambda: _read(client)) as server:
        click.echo(f"modelctl: metrics are at http://{address}/metrics; Ctrl-C ends this", err=True)
        server.serve_forever()


def _read(client: Any) -> bytes:
    from protocol.metrics import exposition  # not imported above: it needs the package prometheus-client

    return exposition(client.status(), client.call("metrics", reply_timeout=client.timeout))


def _server(address: Address, read: Callable[[], bytes]) -> "ThreadingHTTPServer":
    """Return an HTTP server that listens. Raises CommandFailure."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # `serve` does without: 5 MB, with TLS and mail

    from protocol.metrics import CONTENT_TYPE, EVERY_S, accepts_gzip, compressed

    lock, newest, made_at = threading.Lock(), b"", -EVERY_S

    def recent() -> bytes:
        """Return the text of the last second, or a new one."""
        nonlocal newest, made_at
        with lock:
            if time.monotonic() - made_at >= EVERY_S:
                newest, made_at = read(), time.monotonic()
            return newest

    class Handler(BaseHTTPRequestHandler):
        timeout = CONNECTION_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(404)
                return
            try:
                status, kind, body = 200, CONTENT_TYPE, recent()
            except (WireError, TimeoutError, OSError) as e:  # the supervisor is away, and may come back
                status, kind, body = 503, "text/plain; charset=utf-8", f"{e}\n".encode()
            self.send_response(status)
            self.send_header("Vary", "Accept-Encoding")
            if status == 200 and accepts_gzip(self.headers.get("Accept-Encoding", "")):
                body = b"".join(compressed([body]))
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: a scrape comes each few seconds."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        daemon_threads = True

    try:
        return Server((address.host, address.port), Handler)
    except OSError as e:
        text = f"--listen {address}: cannot be opened: {e.strerror or e}"
        raise CommandFailure(exit_codes.CONFIG, "cannot_listen", text) from None
