"""Which value each key of a models.yaml has, and where it comes from: ``modelctl config``, and the verb ``config``."""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import yaml

from protocol.process.masking import masked
from supervisor.config_gateway import GatewayConfig
from supervisor.config_model import ModelConfig
from supervisor.config_schema import ClusterConfig, FolderConfig, GroupConfig, SupervisorConfig
from supervisor.spelling import duration
from supervisor.yaml_source import KeyPath, YamlSource

_SECONDS = ("duration", "duration, or never", "duration from 1s to 24h")


@dataclass(frozen=True)
class Setting:
    """A key and its value.

    value   as the file or the variable has it; for a default, as the file would have it
    origin  "default", "model" (a file in the model's directory), "file", "environment" or "flag"
    source  the file or the variable; None for a default
    line    the line in the file; 0 for anything else
    """

    key: str
    value: Any
    origin: str
    source: str | None = None
    line: int = 0

    @property
    def place(self) -> str:
        """Return where the value comes from, for people."""
        if self.source is None:
            return self.origin
        return f"{Path(self.source).name}:{self.line}" if self.line else self.source

    @property
    def as_yaml(self) -> str:
        """Return the value as a line of YAML, which may be copied into a file."""
        value = self.value
        return _scalar(type(value).__name__, value) if isinstance(value, bool | int | str | None) else _as_yaml(value)


@lru_cache(4096)
def _scalar(_: str, value: Any) -> str:
    """Return a value as YAML. Models have many values in common, and each would take 50 µs. 1 and true are one key."""
    return _as_yaml(value)


def _as_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")


def settings_of(source: YamlSource, models: Sequence[str] = ()) -> Iterator[Setting]:
    """Yield every key of a file that was read, with its value.

    models  only the keys of these models; empty: all sections
    """
    data = source.data if isinstance(source.data, dict) else {}
    entries = data.get("models")
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if not models or name in models:
            yield from _section(source, ModelConfig, entry, ("models", name))
    if models:
        return
    if data.get("default_model") is not None:
        yield _given(source, ("default_model",), data["default_model"])
    yield from _section(source, SupervisorConfig, data.get("supervisor"), ("supervisor",))
    for name, kind in (("gateway", GatewayConfig), ("cluster", ClusterConfig)):
        if data.get(name) is not None:
            yield from _section(source, kind, data[name], (name,))
    folders = data.get("folders")
    for place, folder in enumerate(folders if isinstance(folders, list) else ()):
        yield from _section(source, FolderConfig, folder, ("folders", place))
    groups = data.get("groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        yield from _section(source, GroupConfig, group, ("groups", name))


def _section(source: YamlSource, kind: type, given: Any, path: KeyPath) -> Iterator[Setting]:
    """Yield the keys of a dataclass, in its order. ``given``: the mapping that the file has there."""
    values = given if isinstance(given, dict) else {}
    hints = _hints(kind)
    for field in fields(kind):
        place = (*path, field.name)
        if is_dataclass(hints[field.name]):
            yield from _section(source, hints[field.name], values.get(field.name), place)
        elif field.name in values:
            yield from _key(source, place, values[field.name])
        elif field.default is not MISSING:
            yield Setting(".".join(map(str, place)), _as_in_file(field.default, hints[field.name]), "default")
    for name in values.keys() - hints.keys():
        yield _given(source, (*path, name), values[name])


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _key(source: YamlSource, path: KeyPath, value: Any) -> Iterator[Setting]:
    """Yield a key with its value, or the parts of its map if some of them stand elsewhere in the file."""
    if isinstance(value, dict) and any((*path, part) in source.moved for part in value):
        for part, what in value.items():
            yield _given(source, (*path, part), what)
    else:
        yield _given(source, path, value)


def _given(source: YamlSource, path: KeyPath, value: Any) -> Setting:
    place, line = source.origin(path) or (source.file, 0)
    origin = "file" if place == source.file else "model" if line else "environment"
    return Setting(".".join(map(str, path)), source.written(path, value), origin, masked(place), line)


def _as_in_file(default: Any, hint: Any) -> Any:
    """Return a default as the file would have it: a duration with its unit, and not as seconds."""
    if get_origin(hint) is Annotated and getattr(get_args(hint)[1], "name", None) in _SECONDS and default is not None:
        return duration(default)
    return list(default) if isinstance(default, tuple) else default
