"""Decide whether the port of ``supervisor.listen`` may be opened. A refusal names the line of models.yaml."""

from supervisor.config import Config
from supervisor.keys.opening import Opening, check_opening
from supervisor.keys.records import KeysProblem
from supervisor.yaml_source import ConfigError, YamlSource


def opening_of(config: Config) -> Opening | None:
    """Return the port to open; None if the file names none. Raises ConfigError."""
    listen = config.supervisor.listen
    if listen is None:
        return None
    try:
        return check_opening(listen, config.keys_dir)
    except KeysProblem as e:
        raise ConfigError([YamlSource(config.file).problem(("supervisor", "listen"), str(e))]) from None
