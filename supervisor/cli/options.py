"""Options that several commands share, and the way to the running supervisor."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from protocol.runtime_paths import default_runtime_dir

if TYPE_CHECKING:
    from protocol.client import Client

F = TypeVar("F", bound=Callable[..., object])

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def runtime_dir_option(command: F) -> F:
    """Adds ``--runtime-dir``, handed on as an absolute path."""

    def absolute(_: click.Context, __: click.Parameter, value: Path | None) -> Path:
        return value.absolute() if value is not None else default_runtime_dir()

    option = click.option(
        "--runtime-dir",
        type=click.Path(path_type=Path, file_okay=False),
        default=None,
        callback=absolute,
        help="Directory of the supervisor's sockets.  [default: $MODELCTL_RUNTIME_DIR, $XDG_RUNTIME_DIR/modelctl, or "
        "/tmp/modelctl-UID]",
    )
    return option(command)


def connect(runtime_dir: Path, *, admin: bool = False) -> "Client":
    """A client of the running supervisor. Raises ConnectionLost, which ends the command with exit code 69."""
    from protocol.client import Client  # not for `check` and `logs`: a third of what they take

    # a command is about the supervisor that it began with
    return Client(runtime_dir=runtime_dir, admin=admin, reconnect=False)
