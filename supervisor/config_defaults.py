"""Lay the section ``defaults`` of a models.yaml beneath the keys of its models. Pure.

A model's own key wins, also if its value is null. Maps of options are merged by their keys. A key that means nothing
for a model is not laid beneath it: a file may hold models of several engines, and models that are lazy and others.
"""

from dataclasses import fields
from typing import Any, Final

from protocol.values import Unfit, hints_of
from supervisor.config_model import ENGINE_KEYS, ONE, ModelConfig, marked
from supervisor.schema_validation import fit
from supervisor.yaml_source import KeyPath, YamlSource
from supervisor.yaml_variables import Quoted

SECTION: Final = "defaults"
NO_DEFAULTS: Final = {
    key.name: f"{key.metadata[ONE]} below the model" for key in fields(ModelConfig) if ONE in key.metadata
}
"""Keys of a model that would be wrong for several, and why."""
MERGED: Final = [name for name, hint in hints_of(ModelConfig).items() if "dict[" in str(hint)]
"""Keys whose maps are merged. The value of any other key is taken whole."""


def lay_defaults(source: YamlSource) -> None:
    """Add the file's defaults to its models, and remember for each of them where it stands.

    A key of ``defaults`` that no model could have becomes a problem of ``source``, and is added to none.
    """
    if not isinstance(source.data, dict) or (given := source.data.pop(SECTION, None)) is None:
        return
    defaults = sound_defaults(source, (SECTION,), given)
    models = source.data.get("models")
    for name, entry in models.items() if isinstance(models, dict) else ():
        if isinstance(entry, dict):
            for key in _meant(defaults, entry):
                _lay(source, entry, ("models", name), key, defaults[key])


def sound_defaults(source: YamlSource, path: KeyPath, given: Any) -> dict[str, Any]:
    """Return the defaults that a model may have. The others become problems.

    path  the place of the defaults in the file
    """
    if not isinstance(given, dict):
        source.problems.append(source.problem(path, "must be a mapping (key: value lines)"))
        return {}
    known = {key: value for key, value in given.items() if key not in NO_DEFAULTS}
    source.problems += [source.problem((*path, key), NO_DEFAULTS[key]) for key in given if key in NO_DEFAULTS]
    try:
        fit(ModelConfig, {"model_dir": "", **known})
    except Unfit as e:
        source.problems += [source.problem((*path, *flaw.path), flaw.message) for flaw in e.flaws]
        wrong = {flaw.path[0] for flaw in e.flaws}
        return {key: value for key, value in known.items() if key not in wrong}
    return known


def _meant(defaults: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """Return the keys of the defaults that mean something for a model."""
    whole = {**defaults, **entry}
    engine = whole.get("engine", ModelConfig.engine)
    of_engines = frozenset[str]().union({"options"}, *ENGINE_KEYS.values())
    without = of_engines - ENGINE_KEYS.get(engine, {"options"}) if isinstance(engine, str) else of_engines
    lazy = whole.get("lazy")
    if (lazy.unquoted if isinstance(lazy, Quoted) else lazy) is not True:
        without |= {*marked(ModelConfig, "lazy")}
    return [key for key in defaults if key not in without]


def _lay(source: YamlSource, below: dict[str, Any], path: KeyPath, key: str, value: Any) -> None:
    if key not in below:
        below[key] = value
        source.moved[*path, key] = (SECTION, key)
    elif key in MERGED and isinstance(own := below[key], dict) and isinstance(value, dict):
        more = {part: what for part, what in value.items() if part not in own}
        below[key] = {**own, **more}
        source.moved |= {(*path, key, part): (SECTION, key, part) for part in more}
