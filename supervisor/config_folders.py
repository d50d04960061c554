"""The section ``folders`` of a models.yaml: models that were found below a directory become entries of the file. Pure.

A found model has the keys of its folder's ``defaults``, then those of the file's ``defaults``, then those of its own
``tabby_config.yml``, and beneath all of them the keys that suit it (``FoundModel.keys``). It is always lazy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor.config_defaults import SECTION as DEFAULTS
from supervisor.config_defaults import sound_defaults
from supervisor.config_model import ModelConfig
from supervisor.yaml_source import KeyPath, YamlSource

SECTION: Final = "folders"


@dataclass(frozen=True)
class Folder:
    """A folder whose models are served.

    engine  the engine of its models
    """

    path: Path
    engine: str


@dataclass(frozen=True)
class FoundModel:
    """A model that was found below a folder.

    folder  the number of the folder in the file
    keys    keys that suit the model, for what no other place sets
    """

    name: str
    directory: Path
    folder: int
    keys: Mapping[str, Any] = field(default_factory=dict)


def lay_folders(source: YamlSource, found: Iterable[FoundModel]) -> None:
    """Write the folders as a list of maps, and add the found models to the models of the file.

    Keys of a folder's ``defaults`` that no model could have become problems of ``source``, and are added to none.
    """
    if not isinstance(source.data, dict) or (given := source.data.get(SECTION)) is None:
        return
    listed = given if isinstance(given, list) else [given]
    folders = [{"path": one} if isinstance(one, str) else one for one in listed]
    for index, one in enumerate(listed):
        if isinstance(one, str):
            source.moved[SECTION, index, "path"] = (SECTION, index) if isinstance(given, list) else (SECTION,)
    source.data[SECTION] = folders
    if source.data.get("models") is None:
        source.data["models"] = {}
    if not folders:
        source.problems.append(source.problem((SECTION,), "names no folder; add one, or remove the key"))
    defaults: list[dict[str, Any]] = []
    for index, folder in enumerate(folders):
        own = folder.get(DEFAULTS) if isinstance(folder, dict) else None
        defaults.append({} if own is None else sound_defaults(source, (SECTION, index, DEFAULTS), own))
    models = source.data["models"]
    for model in found if isinstance(models, dict) else ():
        models[model.name] = {**defaults[model.folder], "model_dir": str(model.directory), "lazy": True}
        place: KeyPath = ("models", model.name)
        source.moved |= {(*place, key): (SECTION, model.folder, DEFAULTS, key) for key in defaults[model.folder]}
        source.moved |= {(*place, key): (SECTION, model.folder, "path") for key in ("model_dir", "lazy")}


def lay_suitable(source: YamlSource, found: Iterable[FoundModel]) -> None:
    """Give each found model the keys that suit it, where nothing else has set them."""
    for model in found:
        entry = source.data["models"][model.name]
        wanted = dict(model.keys)
        if entry.get("engine", ModelConfig.engine) == ModelConfig.engine:
            wanted.setdefault("gpu", "auto")
        if entry.get("gpu", "auto") != "auto" or "vram" in entry:
            wanted.pop("gpus", None)
        for key, value in wanted.items():
            if key == "sampling" and isinstance(own := entry.get(key), dict):
                entry[key] = {**value, **own}
            elif key not in entry:
                entry[key] = value
                source.moved["models", model.name, key] = (SECTION, model.folder, "path")


def engines_of(data: Any) -> list[str]:
    """Return the engine of each folder's models."""
    whole = data.get(DEFAULTS) if isinstance(data, dict) else None
    common = whole if isinstance(whole, dict) else {}
    engines = []
    for folder in data.get(SECTION) or () if isinstance(data, dict) else ():
        own = folder.get(DEFAULTS) if isinstance(folder, dict) else None
        engine = {**common, **(own if isinstance(own, dict) else {})}.get("engine")
        engines.append(engine if isinstance(engine, str) else ModelConfig.engine)
    return engines
