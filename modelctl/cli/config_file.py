"""Find the models.yaml that a command uses."""

import os
from pathlib import Path

from supervisor.config.yaml_source import ConfigError, Problem

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
