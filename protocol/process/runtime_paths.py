"""The paths of the supervisor's sockets, for the supervisor, its workers and the clients."""

import os
import shlex
from pathlib import Path

from protocol.limits import IPC_PATH_MAX

ENVIRONMENT_VARIABLE = "MODELCTL_RUNTIME_DIR"
PAUSED = ".paused"
"""Suffix of the name of a socket's file while the supervisor takes no new connections through the socket."""
FRONT, ADMIN, BACK = "front", "admin", "back"
"""File names of the sockets for requests, for operators and for workers."""


def default_runtime_dir() -> Path:
    """Return $MODELCTL_RUNTIME_DIR, else $XDG_RUNTIME_DIR/modelctl, else /tmp/modelctl-UID. It may not exist."""
    if chosen := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(chosen).absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime).absolute() / "modelctl"
    return Path(f"/tmp/modelctl-{os.getuid()}")


def front_endpoint(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the endpoint of the socket for requests. Raises ValueError if the path is too long for a Unix socket."""
    return _endpoint(runtime_dir, FRONT)


def admin_endpoint(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the endpoint of the socket for operators. Raises ValueError if the path is too long for a Unix socket."""
    return _endpoint(runtime_dir, ADMIN)


def back_endpoint(runtime_dir: str | os.PathLike[str]) -> str:
    """Return the endpoint of the socket for workers. Raises ValueError if the path is too long for a Unix socket."""
    return _endpoint(runtime_dir, BACK)


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint. Raises ValueError with the path, its length and the remedy if an ipc path is too long."""
    path = ipc_path(endpoint)
    if path is not None and (length := len(os.fsencode(path))) > IPC_PATH_MAX:
        raise ValueError(
            f"the socket path {path} has {length} bytes, a Unix socket takes at most {IPC_PATH_MAX}: "
            f"choose a shorter runtime directory (${ENVIRONMENT_VARIABLE})"
        )
    return endpoint


def ipc_path(endpoint: str) -> str | None:
    """Return the file of an ipc endpoint. None for other transports and for abstract sockets (``ipc://@name``)."""
    path = endpoint.removeprefix("ipc://")
    return None if path == endpoint or path.startswith("@") else path


def serve_hint(endpoint: str) -> str:
    """Return the remedy if no supervisor listens at this endpoint: the command to type."""
    path = ipc_path(endpoint)
    if path is None:
        return "start it there with `modelctl serve`"
    directory = Path(path).parent
    usual = directory == default_runtime_dir() or Path(path).name not in (
        FRONT,
        ADMIN,
    )  # serve makes no socket of another name
    option = "" if usual else f" --runtime-dir {shlex.quote(str(directory))}"
    return f"start it with `modelctl serve{option}`"


def _endpoint(runtime_dir: str | os.PathLike[str], name: str) -> str:
    return check_endpoint(f"ipc://{os.path.abspath(runtime_dir)}/{name}")
