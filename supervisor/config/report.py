"""The answers to the verbs ``config`` (models.yaml as it is on the disk, its values, its faults, and what a reload
would change) and ``settings`` (the keys that a model was given when models.yaml was last read)."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import yaml

from protocol.process.shown import masked
from supervisor.config.file import Examined, ModelSpec, examine_config
from supervisor.config.models import ModelConfig
from supervisor.config.server import (
    FIXED_CHANGED,
    ClusterConfig,
    FolderConfig,
    GatewayConfig,
    GroupConfig,
    SupervisorConfig,
)
from supervisor.config.spelling import duration
from supervisor.config.yaml_source import ConfigError, KeyPath, Problem, YamlSource, read_file
from supervisor.fleet.turnovers import Change, Reloads
from supervisor.workers.life import AT_REST, WorkerState

# Which value each key of a models.yaml has, and where it comes from: ``modelctl config``, and the verb ``config``.


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


MOST_ENTRIES: Final = 3000
MOST_BYTES: Final = 768 << 10
"""Most entries of a list in the reply, and bytes of their texts. The reply has two such lists, and the file of at most
1 MiB. All of them must fit into one frame of 3 MiB."""
LONGEST_VALUE: Final = 400
"""Characters of a value. The file itself has the whole value."""


def describe_config(file: Path, reloads: Reloads, *, every: bool) -> dict[str, Any]:
    """Return the result of the verb ``config``, see ``protocol.activity.ConfigResult``. Change nothing.

    The file is read and checked as a reload does it. The directories of the models are not opened.

    every  describe keys that have their defaults, too
    """
    text, examined = "", None
    problems: list[Problem] = []
    try:
        text = read_file(file)[0].decode(errors="replace").replace("\ufffd", "?")  # U+FFFD would take three bytes
        examined = examine_config(file)
        problems = examined.problems or _unfit(examined, reloads)
    except ConfigError as e:
        problems = e.problems
    faults, more_faults = _fitting(_described(problem, file) for problem in problems)
    found, more = _fitting(_settings(examined.source, file, every=every)) if examined is not None else ([], False)
    changes = None
    if examined is not None and not problems:
        keys, models = reloads.preview(examined.config)
        changed = {name: str(change) for name, change in models.items() if change is not Change.UNCHANGED}
        changes = {"settings": keys, "models": changed}
    return {
        "file": str(file),
        "text": text,
        "problems": faults,
        "notes": [] if examined is None else [note[:LONGEST_VALUE] for note in examined.config.notes[:100]],
        "settings": found,
        "more": more or more_faults,
        "changes": changes,
    }


def _unfit(examined: Examined, reloads: Reloads) -> list[Problem]:
    """Return a problem for each key that a reload cannot apply."""
    return [examined.source.problem(place, FIXED_CHANGED) for place in reloads.fixed_of(examined.config)]


def _described(problem: Problem, file: Path) -> dict[str, Any]:
    line = problem.line if problem.file == str(file) else 0
    return {"line": line, "place": problem.file, "key": problem.path, "message": problem.message}


def describe_settings(spec: ModelSpec, file: Path) -> dict[str, Any]:
    """Return the result of the verb ``settings``, see ``protocol.activity.SettingsResult``. No file is read for it.

    spec  a model
    file  the models.yaml
    """
    found, more = _fitting(_settings(spec.source, file, spec.name, every=True)) if spec.source else ([], False)
    return {"settings": found, "more": more}


def _settings(source: YamlSource, file: Path, *models: str, every: bool) -> Iterator[dict[str, Any]]:
    for setting in settings_of(source, models):
        if every or setting.origin != "default":
            yield {
                "key": setting.key,
                "value": _shortened(setting.as_yaml),
                "source": setting.place,
                "line": _line(setting, file),
            }


def _shortened(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 1]}…"


def _line(setting: Setting, file: Path) -> int:
    return setting.line if setting.source == str(file) else 0


def _fitting(entries: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the entries that fit into a reply, and whether there are more."""
    found: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
        size += sum(len(value.encode(errors="replace")) + 16 for value in entry.values() if isinstance(value, str))
        if len(found) == MOST_ENTRIES or size > MOST_BYTES:
            return found, True
        found.append(entry)
    return found, False


# Tell the user of ``serve`` where the page is, and a command that asks a model over HTTP. Pure.


_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses that mean every address of the machine, and one that programs of this machine can ask."""


def is_settled(state: WorkerState) -> bool:
    """Return whether a worker that was started is up, or will not come up by itself."""
    return state in (*AT_REST, WorkerState.READY, WorkerState.ASLEEP)


def url_here(gateway: Mapping[str, Any]) -> str:
    """Return the address of the gateway, from its part of ``status``, as programs of this machine reach it."""
    host, _, port = str(gateway.get("listen")).rpartition(":")
    return f"{'https' if gateway.get('tls') else 'http'}://{_ANY_ADDRESS.get(host, host)}:{port}"


_TRIALS: Final[dict[bool | str, tuple[str, dict[str, Any]]]] = {
    True: ("chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
    False: ("completions", {"prompt": "The capital of France is", "max_tokens": 32}),
    "vectors": ("embeddings", {"input": ["The capital of France is Paris."]}),
    "scores": ("rerank", {"query": "What is the capital of France?", "documents": ["Paris is.", "Rome is not."]}),
}
"""A first request, by what a model makes, as in ``how_to_ask``: the path, and the body without the model."""


def how_to_ask(
    gateway: Mapping[str, Any] | None, models: Sequence[tuple[str, bool | str | None, bool]], file: Path
) -> list[str]:
    """Return lines for the end of a start. There are none while the gateway has a problem, which is reported by itself.

    gateway  its part of ``status``; None if models.yaml has no section ``gateway``
    models   (name, what it makes, whether it is ready). It makes chats (True), texts (False), "vectors" or "scores";
             None if that is not known yet
    file     models.yaml
    """
    if gateway is None:
        line = "gateway: {listen: 127.0.0.1:8000, auth: none}"
        return [f"no HTTP port is open: for the page and OpenAI's API, add `{line}` to {file}"]
    if gateway.get("problem"):
        return []
    url = url_here(gateway)
    lines = [f"the page: {url}/", f"OpenAI's API: {url}/v1"]
    token = ""
    if gateway.get("auth") != "none":
        lines.append("a token for a client, as TOKEN below: `modelctl keys new NAME --http`")
        token = " -H 'Authorization: Bearer TOKEN'"
    if models:
        # the first of the best
        name, makes, _ = max(models, key=lambda model: (model[2], model[1] is True, not isinstance(model[1], str)))
        path, asked = _TRIALS[makes or False]
        body = json.dumps({"model": name, **asked})
        lines.append(f"try: curl {url}/v1/{path}{token} -H 'Content-Type: application/json' -d '{body}'")
    return lines
