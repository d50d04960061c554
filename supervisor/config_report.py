"""The answers to the verbs ``config`` (models.yaml as it is on the disk, its values, its faults, and what a reload
would change) and ``settings`` (the keys that a model was given when models.yaml was last read)."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from supervisor.config import Examined, ModelSpec, examine_config
from supervisor.config_schema import FIXED_CHANGED
from supervisor.config_settings import Setting, settings_of
from supervisor.fleet.reloads import Reloads
from supervisor.fleet.rollout import Change
from supervisor.yaml_source import ConfigError, Problem, YamlSource, read_file

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
