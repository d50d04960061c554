"""``supervisor.listen`` of a models.yaml: whether its port may be opened, and if not, the line that asks for it."""

from supervisor.config import Config
from supervisor.keys.opening import Opening, check_opening
from supervisor.keys.records import KeysProblem
from supervisor.yaml_source import ConfigError, YamlSource


def opening_of(config: Config) -> Opening | None:
    """None where nothing is to listen. Raises ConfigError."""
    listen = config.supervisor.listen
    if listen is None:
        return None
    try:
        return check_opening(listen, config.keys_dir)
    except KeysProblem as e:
        raise ConfigError([YamlSource(config.file).problem(("supervisor", "listen"), str(e))]) from None
