"""Find the models.yaml that a command uses."""

import os
from pathlib import Path

from supervisor.yaml_source import ConfigError, Problem

NAME = "models.yaml"
SCHEMA = Path(__file__).with_name("models.schema.json")
"""The JSON schema of such a file, for editors. ``python -m tools.docs`` makes it."""


def find_config(given: Path | None) -> Path:
    """Return the given file, else ``$MODELCTL_CONFIG``, ``./models.yaml`` or ``~/.config/modelctl/models.yaml``.

    Raises ConfigError if there is none.
    """
    if given is not None:
        return given
    if chosen := os.environ.get("MODELCTL_CONFIG"):
        return Path(chosen)
    candidates = [Path(NAME)]
    if candidates[0].exists():
        return candidates[0]
    if (directory := user_directory()) is not None:
        candidates.append(directory / "modelctl" / NAME)
        if candidates[1].exists():
            return candidates[1]
    looked = " and ".join(map(str, candidates))
    message = (
        f"not found (looked for {looked}); name one with --config or $MODELCTL_CONFIG, or let `modelctl init` write one"
    )
    raise ConfigError([Problem(NAME, 0, "", message)])


def user_directory() -> Path | None:
    """Return ``$XDG_CONFIG_HOME``, else ``~/.config``; None for a user without a home directory."""
    if chosen := os.environ.get("XDG_CONFIG_HOME"):
        return Path(chosen)
    try:
        return Path.home() / ".config"
    except RuntimeError:  # no $HOME, and a uid that is not in passwd, as in some containers
        return None
