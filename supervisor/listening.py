"""Find the keys of a models.yaml, and decide whether the port of ``supervisor.listen`` may be opened."""

from supervisor.config import Config
from supervisor.keys.opening import Opening, check_opening
from supervisor.keys.records import KeysProblem
from supervisor.keys.store import KeyStore
from supervisor.yaml_source import ConfigError, YamlSource


def opening_of(config: Config) -> Opening | None:
    """Return the port to open; None if the file names none. Raises ConfigError, which names the line of models.yaml."""
    listen = config.supervisor.listen
    if listen is None:
        return None
    try:
        return check_opening(listen, config.keys_dir)
    except KeysProblem as e:
        raise ConfigError([YamlSource(config.file).problem(("supervisor", "listen"), str(e))]) from None


def keys_of(config: Config) -> KeyStore | None:
    """Return the place of the keys; None if there can be none, because a home directory does not exist."""
    try:
        return KeyStore(config.keys_dir)
    except KeysProblem:
        return None
