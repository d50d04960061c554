"""Options that several commands share, and the connection to the running supervisor."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from protocol.process.runtime_paths import default_runtime_dir
from supervisor.cli.hints import need

if TYPE_CHECKING:
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
