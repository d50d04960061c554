"""The program that looks for models in the folders of a models.yaml. It may wait for a slow file system.

    python -P -m supervisor.config.folder_scanner FILE SCAN_S QUIET_S

FILE     the models.yaml, which is read once
SCAN_S   seconds between two looks, and QUIET_S as in ``folders``
stdin    the link to the supervisor (``helper_link``), with JSON. The supervisor sends a map: "served" has the models of
         folders that are served already, name → directory, and "variables" the variables of the environment that the
         models.yaml names. The program sends a record after each look: null if nothing has changed, else {"models",
         "kept", "refused", "unread"} as in ``folders.Picture``, with the models as ``packed`` makes them

Commands that start nothing look once (``examine_with_folders``).
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from protocol.process.helper_link import become_helper, serve
from protocol.process.shown import masked
from supervisor.config import yaml_source
from supervisor.config.file import Examined, ModelSpec, examine_config, examine_source
from supervisor.config.folders import QUIET_S, CheckResult, FolderModels, FoundModel, Picture, list_folder
from supervisor.config.model_search import original_name
from supervisor.config.models import ModelConfig
from supervisor.config.reading import fit
from supervisor.config.rules import ModelNames, is_alias
from supervisor.config.yaml_source import ConfigError, YamlSource
from supervisor.placement.estimates import CONTEXT, Estimated, fewest_gpus, unused_gpus, vet_models
from supervisor.placement.gpus import Gpu

AT_ONCE: Final = 16
"""Directories that are checked before the supervisor hears of them."""


class FolderScanner:
    """The folders of one models.yaml.

    served     the models of folders that are served already: name → directory
    variables  the variables of the environment that the file may name
    installed  whether a model is refused because the packages of its engine are not installed here

    Raises ConfigError if the file cannot be used.
    """

    def __init__(
        self,
        file: Path,
        served: Mapping[str, Path],
        variables: Mapping[str, str],
        quiet_s: float = QUIET_S,
        *,
        installed: bool = True,
    ) -> None:
        self._installed = installed
        self._source = YamlSource(file, variables)
        self.own = self.examine(())
        config = self.own.config
        places = [place for spec in config.models.values() for place in (spec.model_dir, spec.draft_model)]
        directories = {place for place in places if place is not None}
        self._models = FolderModels(_names_of(config.names), directories, served, quiet_s)

    def looks(self) -> Iterator[Picture]:
        """Look once. Yield what the folders give after each part of the checks."""
        listings = [list_folder(folder.path) for folder in self.own.config.folders]
        self._models.look(listings, time.time(), time.monotonic())
        due = self._models.due()
        gpus = unused_gpus() if due else []
        for begin in range(0, len(due), AT_ONCE):
            for model, verdict in self._check(due[begin : begin + AT_ONCE], gpus):
                self._models.judge(model.directory, verdict)
            yield self._models.picture()
        if not due:
            yield self._models.picture()

    def examine(self, models: Iterable[FoundModel]) -> Examined:
        """Return the file with these models."""
        return examine_source(deepcopy(self._source), found=self._with_aliases(models))

    def _check(self, models: Sequence[FoundModel], gpus: Sequence[Gpu]) -> Iterator[tuple[FoundModel, CheckResult]]:
        """Yield each model with the result of its check: that of `modelctl check`."""
        left = [replace(model, keys={"max_seq_len": CONTEXT}) for model in models]
        for keys in ({"max_seq_len": CONTEXT}, {}):
            examined = self.examine(replace(model, keys=keys) for model in left)
            faults = _faults(examined, [model.name for model in left])
            found = {
                model.name: spec
                for model in left
                if model.name not in faults and (spec := examined.config.models.get(model.name)) is not None
            }
            answers = vet_models(found, installed=self._installed)
            again = []
            for model in left:
                if (why := faults.get(model.name)) is not None:
                    yield model, CheckResult(None, why)
                    continue
                spec, answer = found[model.name], answers[model.name]
                if keys and answer.faults and all(fault.key == "max_seq_len" for fault in answer.faults):
                    again.append(model)  # the model has less context, or some place sets more
                    continue
                yield model, _verdict(spec, answer, keys, gpus)
            left = again

    def _with_aliases(self, models: Iterable[FoundModel]) -> list[FoundModel]:
        """Add the name of each model's directory as an alias, as `init` does, where it means nothing else."""
        if not (given := list(models)):
            return []
        originals = {model.name: original_name(model.directory) for model in given}
        taken, every = {*self.own.config.names, *originals}, list(originals.values())
        return [
            replace(model, keys={**model.keys, "aliases": [name]})
            if is_alias(name := originals[model.name]) and name not in taken and every.count(name) == 1
            else model
            for model in given
        ]


def _names_of(names: ModelNames) -> dict[str, str]:
    """Return the names of a file's own models, each with what it is."""
    models = {name: names.find(name).model for name in names}
    own = "the name of a model in models.yaml"
    return {name: own if model == name else f"a name of {model}" for name, model in models.items()}


def _faults(examined: Examined, names: Sequence[str]) -> dict[str, str]:
    """Return the first problem of each of these models."""
    found: dict[str, str] = {}
    for problem in examined.problems:
        owners = [name for name in names if f"{problem.path}.".startswith(f"models.{name}.")]
        if owners:  # a name may begin with another one and a dot
            name = max(owners, key=len)
            key = problem.path.removeprefix(f"models.{name}").removeprefix(".")
            found.setdefault(name, f"{key}: {problem.message}" if key else problem.message)
    return found


def _verdict(spec: ModelSpec, answer: Estimated, keys: Mapping[str, Any], gpus: Sequence[Gpu]) -> CheckResult:
    if answer.faults:
        why = answer.faults[0].message.removeprefix(f"{masked(str(spec.model_dir))} ")
        return CheckResult(None, why, final=not answer.retry)
    suitable = {**keys, **({"sampling": dict(answer.sampling)} if answer.sampling else {})}
    if spec.config.gpu == "auto" and (count := fewest_gpus(answer, gpus)) > 1:
        suitable["gpus"] = count
    return CheckResult(suitable)


def examine_with_folders(file: Path, *, installed: bool = True) -> tuple[Examined, Picture | None]:
    """Read and check a models.yaml with the models that its folders have now. Start and change nothing.

    installed  as for ``FolderScanner``

    Returns None for a file without folders, or with problems. Raises ConfigError if nothing of it can be understood.
    """
    examined = examine_config(file)
    if examined.problems or not examined.config.folders:
        return examined, None
    scanner = FolderScanner(file, {}, os.environ, installed=installed)
    *_, picture = scanner.looks()
    return scanner.examine(picture.models), picture


def packed(examined: Examined, models: Iterable[FoundModel]) -> list[dict[str, Any]]:
    """Return models of folders in plain data, for ``unpacked``."""
    found = []
    for model in models:
        spec = examined.config.models[model.name]
        places = (spec.model_dir, spec.draft_model, spec.template_file, spec.folder)
        keys = examined.source.data["models"][model.name]
        found.append(
            {
                "name": model.name,
                "keys": yaml_source.packed(keys),
                "shown": examined.source.written(("models", model.name), keys),
                "origins": {key: examined.source.origin(("models", model.name, key)) for key in keys},
                "places": [None if place is None else str(place) for place in places],
                "lora": [*map(str, spec.lora)],
                "roots": [*map(str, spec.model_roots)],
            }
        )
    return found


def unpacked(file: Path, data: Mapping[str, Any]) -> ModelSpec:
    """Return the model of a models.yaml that ``packed`` made plain data of. No file system is asked."""
    model_dir, draft, template, folder = (None if place is None else Path(place) for place in data["places"])
    assert model_dir is not None
    config = fit(ModelConfig, yaml_source.unpacked(data["keys"]))
    spec = ModelSpec(
        data["name"], config, model_dir, draft, tuple(map(Path, data["lora"])), tuple(map(Path, data["roots"])),
        template, folder,
    )  # fmt: skip
    spec.source = YamlSource(file, raw=b"")
    spec.source.data = {"models": {spec.name: data["shown"]}}
    origins = {key: origin for key, origin in data["origins"].items() if origin is not None}
    spec.source.defaults = {("models", spec.name, key): (place, line) for key, (place, line) in origins.items()}
    return spec


def main(arguments: list[str]) -> None:
    file, scan_s, quiet_s = arguments
    link = become_helper("folder scanner")
    given = json.loads(link.receive(None) or b"")
    served = {name: Path(directory) for name, directory in given["served"].items()}
    try:
        scanner = FolderScanner(Path(file), served, given["variables"], float(quiet_s))
    except ConfigError:  # it was changed since the supervisor has read it, which reads it again after a reload only
        return
    last: Picture | None = None

    def look() -> float:
        nonlocal last
        for picture in scanner.looks():
            told = None
            if picture != last:
                last = picture
                models = packed(scanner.examine(picture.models), picture.models)
                told = {"models": models, "kept": picture.kept, "refused": picture.refused, "unread": picture.unread}
            link.send(json.dumps(told).encode())
        return float(scan_s)

    serve(link, lambda record: None, look)


if __name__ == "__main__":
    main(sys.argv[1:])
