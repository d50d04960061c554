"""Lay the variables ``MODELCTL_SECTION__KEY`` of an environment over the values of a models.yaml.

Two underscores stand between a section and its key, as with pydantic-settings: ``MODELCTL_SUPERVISOR__STALL=2m``,
``MODELCTL_GATEWAY__LISTEN=8080``, ``MODELCTL_MODELS__LLAMA_8B__CACHE_MODE=Q8``. The value is YAML. A part of the name
is the key in capitals; every character of a model's name that a variable cannot have becomes one underscore. A variable
changes a model of the file, and adds none: a model without a line in the file would surprise whoever reads the file.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from supervisor.yaml_source import KeyPath, Problem, YamlSource

PREFIX: Final = "MODELCTL_"
SECTIONS: Final = {
    "SUPERVISOR": "supervisor", "GATEWAY": "gateway", "CLUSTER": "cluster", "DEFAULTS": "defaults", "MODELS": "models",
}  # fmt: skip
DEFAULT_MODEL: Final = "MODELCTL_DEFAULT_MODEL"
MOST_CHARS: Final = 65_536
"""The longest value."""
MOST_BRACKETS: Final = 1000
"""Opening brackets of a value. PyYAML takes seconds for text that is nested ten thousand deep."""


def overlay(source: YamlSource, environment: Mapping[str, str]) -> None:
    """Lay variables over the values of a file. Variables that cannot be used become problems of ``source``."""
    if not isinstance(source.data, dict):
        return
    for name, text in sorted(environment.items()):
        if name != DEFAULT_MODEL and not (name.startswith(PREFIX) and "__" in name):
            continue
        try:
            path = _path_of(name, source.data)
            value = _value_of(text)
        except ValueError as e:
            source.problems.append(Problem(name, 0, "", str(e)))
            continue
        _lay(source, path, value, name)


def variable_of(path: KeyPath) -> str:
    """Return the name of the variable that sets a key. The path has no numbers."""
    return PREFIX + "__".join(_spelled(str(part)) for part in path)


def _spelled(part: str) -> str:
    return re.sub("[^A-Z0-9]", "_", part.upper())


def _path_of(name: str, data: Mapping[str, Any]) -> KeyPath:
    """Return the path of the key that a variable names. Raises ValueError."""
    if name == DEFAULT_MODEL:
        return ("default_model",)
    head, *rest = name.removeprefix(PREFIX).split("__")
    if head not in SECTIONS or not all(rest):
        near = difflib.get_close_matches(head, SECTIONS, n=1)
        forms = ", ".join(f"{PREFIX}{section}__KEY" for section in (*list(SECTIONS)[:-1], "MODELS__NAME"))
        hint = f"did you mean {PREFIX}{near[0]}__…?" if near else f"there are {forms}"
        raise ValueError(f"sets no key of models.yaml: {hint}; correct it, or unset it")
    section = SECTIONS[head]
    if section != "models":
        return (section, *(part.lower() for part in rest))
    model, *keys = rest
    if not keys:
        raise ValueError(f"names a model and no key of it: {name}__KEY does; correct it, or unset it")
    models = data.get("models")
    return ("models", _model_of(model, models if isinstance(models, dict) else {}), *(key.lower() for key in keys))


def _model_of(part: str, models: Mapping[Any, Any]) -> str:
    """Return the one model of the file that a part of a variable's name means. Raises ValueError."""
    spelled = {str(name): _spelled(str(name)) for name in models}
    meant = [name for name, spelling in spelled.items() if spelling == part]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ValueError(f"means several models of the file: {', '.join(meant)}; set the key in the file instead")
    near = difflib.get_close_matches(part, spelled.values(), n=1)
    known = f"did you mean {near[0]}?" if near else f"there are {', '.join(spelled.values()) or 'none'}"
    raise ValueError(f"names a model that the file does not have: {known}; correct it, or unset it")


def _value_of(text: str) -> Any:
    """Return the value of a variable, read as YAML. Raises ValueError."""
    if len(text) > MOST_CHARS:
        raise ValueError(f"has {len(text)} characters: at most {MOST_CHARS}")
    if (brackets := text.count("[") + text.count("{")) > MOST_BRACKETS:
        raise ValueError(f"has {brackets} opening brackets: at most {MOST_BRACKETS}")
    try:
        # Neither anchors nor several documents have a use in a variable. So nothing in it can multiply.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise ValueError("has a YAML alias: write the value out")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, OverflowError) as e:
        problem = getattr(e, "problem", None) or type(e).__name__
        raise ValueError(f"is not YAML: {problem}; put text with special characters into quotes") from None


def _lay(source: YamlSource, path: KeyPath, value: Any, name: str) -> None:
    parent = source.data
    for part in path[:-1]:
        if parent.get(part) is None:
            parent[part] = {}
        parent = parent[part]
        if not isinstance(parent, dict):
            return  # the file's own problem: this value must be a mapping
    parent[path[-1]] = value
    source.variables[path] = name
