"""Which models.yaml is meant."""

import os
from pathlib import Path

from supervisor.yaml_source import ConfigError, Problem

NAME = "models.yaml"


def find_config(given: Path | None) -> Path:
    """The file given, else ``$MODELCTL_CONFIG``, ``./models.yaml``, ``~/.config/modelctl/models.yaml``.

    Raises ConfigError if there is none.
    """
    if given is not None:
        return given
    if chosen := os.environ.get("MODELCTL_CONFIG"):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    candidates = [Path(NAME), home / "modelctl" / NAME]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    looked = " and ".join(map(str, candidates))
    raise ConfigError(
        [Problem(NAME, 0, "", f"not found (looked for {looked}); name one with --config or $MODELCTL_CONFIG")]
    )
