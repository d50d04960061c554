"""Options that several commands share, and the connection to the running supervisor."""

import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from modelctl.cli import exit_codes
from modelctl.cli.root import CommandFailure, command, in_colour, need
from modelctl.cli.tables import ELLIPSIS, terminal_width
from protocol.process.paths import default_runtime_dir
from protocol.process.shown import steer
from supervisor.config.spelling import CLOCK_UNITS, parse_duration

if TYPE_CHECKING:
    import subprocess

    from click.shell_completion import CompletionItem

    from protocol.client.sync_client import Client


F = TypeVar("F", bound=Callable[..., object])

CONFIG_DEFAULT = (
    "[default: $MODELCTL_CONFIG, ./models.yaml, that of the running supervisor, ~/.config/modelctl/models.yaml]"
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def config_file(command: F) -> F:
    """Add the argument FILE and the option ``--config FILE`` to a command. Both set its parameter ``file``."""

    def keep(context: click.Context, _: click.Parameter, value: Path | None) -> None:
        context.meta["modelctl.config"] = value

    def merge(context: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
        option: Path | None = context.meta["modelctl.config"]
        if given := option or value:
            need("--config", given.absolute())
        if option is not None and value is not None:
            raise click.UsageError(f"the models.yaml is given twice: {value}, and --config {option}")
        return option if value is None else value

    path = click.Path(path_type=Path)
    option = click.option(
        "-c", "--config", metavar="FILE", type=path, is_eager=True, expose_value=False, callback=keep,
        help=f"Another way to give FILE.  {CONFIG_DEFAULT}",
    )  # fmt: skip
    return click.argument("file", required=False, type=path, callback=merge)(option(command))


def runtime_dir_option(command: F) -> F:
    """Add the option ``--runtime-dir`` to a command, which gets an absolute path."""

    def absolute(_: click.Context, __: click.Parameter, value: Path | None) -> Path:
        default = default_runtime_dir()
        path = value.absolute() if value is not None else default
        if path != default:
            need("--runtime-dir", path)
        return path

    option = click.option(
        "--runtime-dir",
        type=click.Path(path_type=Path, file_okay=False),
        default=None,
        callback=absolute,
        help="Directory of the supervisor's sockets.  [default: $MODELCTL_RUNTIME_DIR, $XDG_RUNTIME_DIR/modelctl, or "
        "/tmp/modelctl-UID]",
    )
    return option(command)


def supervisor_options(command: F) -> F:
    """Add ``--runtime-dir``, and ``--connect`` with ``--key-file`` for a supervisor on another machine.

    ``way_to`` returns the arguments that these options mean.
    """

    def keep(context: click.Context, option: click.Parameter, value: object) -> None:
        context.meta[f"modelctl.{option.name}"] = value
        assert option.name is not None
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            need(option.opts[0], value.absolute() if isinstance(value, Path) else value)

    connect_option = click.option(
        "--connect",
        metavar="tcp://ADDRESS:PORT",
        envvar="MODELCTL_CONNECT",
        expose_value=False,
        callback=keep,
        help="A supervisor on another machine.  [default: $MODELCTL_CONNECT; else the one here]",
    )
    key_option = click.option(
        "--key-file",
        type=click.Path(path_type=Path),
        envvar="MODELCTL_KEY_FILE",
        expose_value=False,
        callback=keep,
        help="The key for it, from `modelctl keys new`.  [default: $MODELCTL_KEY_FILE]",
    )
    return runtime_dir_option(connect_option(key_option(command)))


def json_options(command: F) -> F:
    """Add ``--json`` and the options of ``supervisor_options`` to a command."""
    return as_json(supervisor_options(command))


def order_options(command: F) -> F:
    """Add ``--no-wait`` and the options of ``json_options`` to a command that gives orders."""
    return click.option("--no-wait", is_flag=True, help="Give the order and return at once.")(json_options(command))


def way_to(runtime_dir: Path) -> dict[str, Any]:
    """Return the arguments with which Client and AsyncClient connect to the command's supervisor. Raises UsageError."""
    context = click.get_current_context(silent=True)
    endpoint = context.meta.get("modelctl.connect") if context is not None else None
    if context is None or endpoint is None:
        return {"runtime_dir": runtime_dir}
    key_file = context.meta.get("modelctl.key_file")
    if not str(endpoint).startswith("tcp://"):
        raise click.UsageError(f"--connect {endpoint}: must be tcp://ADDRESS:PORT; for one here, give --runtime-dir")
    if key_file is None:
        raise click.UsageError("--connect needs --key-file FILE: the key that `modelctl keys new` wrote")
    return {"endpoint": endpoint, "key": key_file}


def is_remote() -> bool:
    """Return whether the command's supervisor is on another machine."""
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get("modelctl.connect") is not None


def listener_of(client: "Client") -> int:
    """Return the pid of the process at the other end of the client's connection.

    The kernel names it, as a pid of this process's own namespace. 0 if it is not known: over TCP, and for a process of
    another PID namespace. A pid in a message is one of the supervisor's namespace.
    """
    transport = client._connection.transport
    return 0 if transport is None else transport.listener


def connect(runtime_dir: Path, *, admin: bool = False) -> "Client":
    """Return a client of the running supervisor. Raises ConnectionLost, which ends the command with exit code 69."""
    from protocol.client.sync_client import Client  # not imported for `check`: a third of its time

    # Do not reconnect: a new connection might lead to another supervisor than the one that the command began with.
    return Client(**way_to(runtime_dir), admin=admin, reconnect=False)


# Find the models.yaml that a command uses.


NAME = "models.yaml"
ANSWER_S = 5.0
"""Seconds that the supervisor has to name its file, as for other questions. One that hangs must not make ``check``
hang."""
SCHEMA = Path(__file__).with_name("models.schema.json")
"""The JSON schema of such a file, for editors. ``python -m tools.docs`` makes it."""


def find_config(given: Path | None, runtime_dir: Path, *, running_first: bool = False) -> Path:
    """Return the given file, else ``$MODELCTL_CONFIG``, ``./models.yaml``, the file of the supervisor that runs, or
    ``~/.config/modelctl/models.yaml``.

    runtime_dir    the directory of that supervisor
    running_first  prefer its file to ``./models.yaml``. For commands that change what the supervisor uses

    Raises ConfigError if there is none.
    """
    if given is not None:
        return given
    if chosen := os.environ.get("MODELCTL_CONFIG"):
        return Path(chosen)
    candidates = [Path(NAME)]
    if candidates[0].exists() and not running_first:
        return candidates[0]
    if (running := _of_running(runtime_dir)) is not None:
        return running
    if candidates[0].exists():
        return candidates[0]
    if (directory := user_directory()) is not None:
        candidates.append(directory / "modelctl" / NAME)
        if candidates[1].exists():
            return candidates[1]
    looked = " and ".join(map(str, candidates))
    message = (
        f"not found (looked for {looked}, and no supervisor runs here); name one with --config or $MODELCTL_CONFIG, or "
        "let `modelctl init` write one"
    )
    from supervisor.config.yaml_source import ConfigError, Problem  # with PyYAML

    raise ConfigError([Problem(NAME, 0, "", message)])


def _of_running(runtime_dir: Path) -> Path | None:
    """Return the models.yaml of the supervisor that runs here; None if there is none that answers soon."""
    from protocol.client.connection import CANNOT_CONNECT
    from protocol.client.sync_client import Client

    try:
        with Client(runtime_dir=runtime_dir, timeout=ANSWER_S, reconnect=False) as client:
            file = Path(client.status()["supervisor"]["config"])
    except (*CANNOT_CONNECT, TimeoutError):
        return None
    return file if file.exists() else None  # a supervisor in a container has other paths


def user_directory() -> Path | None:
    """Return ``$XDG_CONFIG_HOME``, else ``~/.config``; None for a user without a home directory."""
    if chosen := os.environ.get("XDG_CONFIG_HOME"):
        return Path(chosen)
    try:
        return Path.home() / ".config"
    except RuntimeError:  # no $HOME, and a uid that is not in passwd, as in some containers
        return None


# The type of options that take a duration.


def duration_of(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``1h`` or ``2d``. Raises BadParameter. The type of an option."""
    try:
        return parse_duration(text, (*CLOCK_UNITS, "d"))
    except ValueError:
        message = f"{text!r} is no duration: give one such as 90s, 15m, 1h or 2d, a week at most"
        raise click.BadParameter(message) from None


# The command completion, and the names of models for the shell's completion of other commands.


COMPLETION_ANSWER_S = 1.0
"""Seconds that the supervisor has for its greeting, which names its models. A shell waits for that."""
PROGRAM = "modelctl"
VARIABLE = "_MODELCTL_COMPLETE"
"""The variable by which the shell asks the program for completions (``root``)."""


@command(
    ("modelctl completion bash >> ~/.bashrc", "Complete commands, options and models in bash"),
    ("modelctl completion fish > ~/.config/fish/completions/modelctl.fish", "Do so in fish"),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a SHELL completes commands, options and the names of models."""
    from click.shell_completion import get_completion_class

    from modelctl.cli.root import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, PROGRAM, VARIABLE).source())


def models(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Return the names of models that begin like this. Nothing if none are known.

    They are those of the running supervisor, in whatever directory. If none runs, or for a command about a file, they
    are those of models.yaml.
    """
    from click.shell_completion import CompletionItem

    about_file = any(option.name in ("file", "config") for option in context.command.params)
    names = _of_file(context) if about_file else _of_supervisor(context) or _of_file(context)
    already = context.params.get("models") or ()
    return [CompletionItem(name) for name in names if name.startswith(incomplete) and name not in already]


def _of_supervisor(context: click.Context) -> list[str]:
    """Return the models and other names that the command's supervisor offers; nothing if there is none that answers."""
    from protocol.client.connection import CANNOT_CONNECT
    from protocol.client.sync_client import Client

    try:
        with (
            context.scope(cleanup=False),
            Client(**way_to(_runtime_dir(context)), timeout=COMPLETION_ANSWER_S, reconnect=False) as client,
        ):
            return [name for model in client.server["models"] for name in _completed(model)]
    except (*CANNOT_CONNECT, click.UsageError, TimeoutError, OSError, KeyError):
        return []


def _completed(model: Mapping[str, Any]) -> list[str]:
    """Return the listed names of a model, without its variants: commands other than `run` know no variants."""
    from protocol.names import listed_names_of

    return [name for name in listed_names_of(model) if name in (model["name"], *model.get("aliases", ()))]


def _of_file(context: click.Context) -> list[str]:
    """Return the listed models and aliases of the models.yaml that the command uses. It is not checked."""
    import yaml

    from supervisor.config.yaml_source import ConfigError

    try:
        given = context.params.get("file") or context.params.get("config")
        file = find_config(given, _runtime_dir(context))
        entries = yaml.safe_load(file.read_text())["models"]
        shown = [(name, entry or {}) for name, entry in entries.items() if (entry or {}).get("listed") is not False]
        names = [str(name) for name, _ in shown]
        for _, entry in shown:
            names += map(str, entry.get("aliases") or ())
    except (ConfigError, OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return []
    return names


def _runtime_dir(context: click.Context) -> Path:
    given: Path | None = context.params.get("runtime_dir")
    return default_runtime_dir() if given is None else given


def models_and_directories(context: click.Context, option: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Return the models that begin like this, and have the shell complete directories."""
    from click.shell_completion import CompletionItem

    return [*models(context, option, incomplete), CompletionItem(incomplete, type="dir")]


# Which models a command line means: names, patterns such as ``llama-*``, or ``--all``.


Worker = Mapping[str, Any]
"""An entry of ``models`` in the reply to the verb "status"."""

some = click.argument("models", nargs=-1, metavar="[MODEL...]", shell_complete=models)
"""The argument of a command that shows models: names or patterns. None of them means all models."""


named = click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=models)
"""The argument of a command that gives orders: names or patterns."""


def or_all(command: F) -> F:
    """Add the argument MODEL..., for names and patterns, and the option ``--all`` to a command that gives orders."""
    every = click.option("-a", "--all", "every", is_flag=True, help="All models of the supervisor.")
    argument = click.argument("models", nargs=-1, metavar="MODEL...", shell_complete=models)
    return argument(every(command))


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern. No name of a model has one of these characters."""
    return any(character in name for character in "*?[")


def ordered(client: "Client", given: Sequence[str], *, every: bool = False) -> list[str]:
    """Return the names to give orders for, each once.

    given  names, which may be those of workers, and patterns, which mean models
    every  ``--all``

    Raises UsageError if nothing or both is given, CommandFailure for a pattern that matches nothing, and the
    supervisor's own error for an unknown name. So no order is given if one name is wrong.
    """
    if bool(given) == every:
        both = "--all means every model: leave out the names, or --all"
        raise click.UsageError(both if given else "name a MODEL, or give --all")
    workers = client.status()["models"]
    known = {name for worker in workers for name in (worker["name"], worker["model"])}
    for name in given:
        if name not in known and not is_pattern(name):
            client.status(name)
    return list(dict.fromkeys(worker["model"] for worker in workers)) if every else expanded(given, workers)


def expanded(given: Iterable[str], workers: Sequence[Worker]) -> list[str]:
    """Return the names in order, each once, with the models that they match in place of patterns.

    Raises CommandFailure for a pattern that matches nothing.
    """
    found = (_matching(name, workers) if is_pattern(name) else [name] for name in given)
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _matching(pattern: str, workers: Sequence[Worker]) -> list[str]:
    """Return the models whose name or alias matches, or the workers (``NAME:2``) if the pattern has a colon."""
    if ":" in pattern:
        found = [worker["name"] for worker in workers if fnmatchcase(worker["name"], pattern)]
    else:
        found = [
            worker["model"]
            for worker in workers
            if any(fnmatchcase(name, pattern) for name in (worker["model"], *worker.get("aliases", ())))
        ]
    if not found:
        known = ", ".join(dict.fromkeys(worker["model"] for worker in workers)) or "none"
        raise CommandFailure(exit_codes.FAILED, "no_match", f"no model matches {pattern!r}: there is {known}")
    return found


def status_of(client: "Client", given: Sequence[str]) -> dict[str, Any]:
    """Return the reply to the verb "status" with the workers of the given models only, in the supervisor's order.

    given  names and patterns; nothing means all models

    Raises CommandFailure for a pattern that matches nothing, and the supervisor's own error for an unknown name.
    """
    if len(given) == 1 and not is_pattern(given[0]):
        return client.status(given[0])
    answer = client.status()
    if not given:
        return answer
    wanted: set[str] = set()
    for name in expanded(given, answer["models"]):
        meant = [worker["name"] for worker in answer["models"] if name in (worker["name"], worker["model"])]
        wanted.update(meant or (worker["name"] for worker in client.status(name)["models"]))  # an alias, or an error
    return answer | {"models": [worker for worker in answer["models"] if worker["name"] in wanted]}


# Turn signals into exceptions, so that a command ends its child process before it ends itself.


class _Signalled(BaseException):
    """A signal that has to end this process. The argument is its number."""


@contextmanager
def ending_by(*numbers: signal.Signals) -> Iterator[None]:
    """Make these signals an exception in the body, except signals that the parent has set to be ignored (nohup). After
    that exception, end this process by the signal: its parent then sees which one it was.

    A service manager counts such an end as clean. Call this in the main thread only (ValueError).
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        raise _Signalled(number)

    former = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if former[number] != signal.SIG_IGN]
    ended_by: int | None = None
    try:
        for number in caught:
            signal.signal(number, handle)
        yield
    except _Signalled as e:
        ended_by = e.args[0]
    finally:
        for number in caught:
            signal.signal(number, former[number])
    if ended_by is not None:
        signal.raise_signal(ended_by)


def end(process: "subprocess.Popen[Any]", seconds: float) -> None:
    """End a process that leads a session of its own: with SIGTERM, and its group with SIGKILL after so many seconds."""
    from subprocess import TimeoutExpired  # a command that starts no process does without

    try:
        if process.poll() is None:
            process.terminate()
            process.wait(seconds)
    except TimeoutExpired:
        pass
    finally:  # also when a second signal cuts the wait short
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


# The option --watch, and the printing of what a command has read: once, or again and again, as text or as JSON.


T = TypeVar("T")
EVERY_S: Final = 1.0
"""Seconds between two looks."""

watch = click.option("-w", "--watch", is_flag=True, help="Look again each second, until Ctrl-C.")


def show(
    read: Callable[[], T],
    text: Callable[[T, int | None], str],
    *,
    as_json: bool,
    again: bool = False,
    as_data: Callable[[T], Any] = lambda value: value,
) -> None:
    """Print what ``read`` returns, as JSON or as the text that ``text`` makes of it.

    text     gets the value, and the columns of the terminal; None for all columns
    as_json  print JSON; with ``again``, each look is one line
    as_data  makes of the value what is printed as JSON; without it, that is the value itself
    again    go on until Ctrl-C. On a terminal, a further look takes the place of the one before
    """

    def look() -> str:
        value = read()
        return json.dumps(as_data(value), indent=None if again else 2) if as_json else text(value, terminal_width())

    click.echo(look())
    in_place = again and not as_json and sys.stdout.isatty()
    if in_place:
        steer(sys.stdout, "\x1b[2J")
    while again:
        if in_place:
            _replace(look())
        else:
            click.echo(look())
        time.sleep(EVERY_S)


def _replace(text: str) -> None:
    """Write a text over the terminal's screen. The lines that do not fit are counted in the last one.

    Lines are overwritten and not cleared before, so that the screen does not flicker.
    """
    lines, room = text.split("\n"), shutil.get_terminal_size().lines - 1
    if len(lines) > room > 0:
        lines = [*lines[: room - 1], f"{ELLIPSIS} {len(lines) - room + 1} more lines: the terminal is too low"]
    shown = lines if in_colour() else [click.unstyle(line) for line in lines]
    steer(sys.stdout, "\x1b[H")
    for line in shown:
        sys.stdout.write(line)
        steer(sys.stdout, "\x1b[K\n")
    steer(sys.stdout, "\x1b[J")
    sys.stdout.flush()
