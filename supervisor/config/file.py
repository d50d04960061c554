"""Read and check models.yaml, and work out what its keys mean.

Unknown keys, wrong types, missing directories and combinations that cannot work are all found before anything is
started, each with its line. No value is clamped, and none is ignored.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from protocol import limits
from protocol.process.paths import is_unmounted
from protocol.process.shown import mask, masked
from protocol.process.worker_spec import EngineSpec
from protocol.values import Flaw, Unfit
from supervisor.config.folders import SECTION as FOLDERS
from supervisor.config.folders import Folder, FoundModel, engines_of, lay_folders, lay_suitable
from supervisor.config.foreign import lay_beneath, program_of
from supervisor.config.models import ModelConfig, lay_defaults, marked
from supervisor.config.reading import AUTO, fit
from supervisor.config.rules import (
    ModelNames,
    cluster_problems,
    combination_problems,
    group_problems,
    held_problems,
    is_alias,
    is_template_file,
    name_problems,
    sampling_problems,
)
from supervisor.config.server import (
    ClusterConfig,
    FileConfig,
    FolderConfig,
    GatewayConfig,
    GroupConfig,
    SupervisorConfig,
    gateway_problems,
)
from supervisor.config.yaml_source import NOTE_PREFIX, ConfigError, KeyPath, Problem, Signature, YamlSource
from supervisor.keys.records import KeysProblem
from supervisor.keys.store import KeyStore, Opening, check_opening, default_keys_dir
from supervisor.logs.files import log_dir
from supervisor.requests.queue import QueueLimits
from supervisor.workers.environment import DEMO_DIR
from supervisor.workers.launcher import Elsewhere

# Lay the variables ``MODELCTL_SECTION__KEY`` of an environment over the values of a models.yaml.
#
# Two underscores stand between a section and its key, as with pydantic-settings: ``MODELCTL_SUPERVISOR__STALL=2m``,
# ``MODELCTL_GATEWAY__LISTEN=8080``, ``MODELCTL_MODELS__LLAMA_8B__CACHE_MODE=Q8``. The value is YAML. A part of the
# name is the key in capitals; every character of a model's name that a variable cannot have becomes one underscore. A
# variable changes a model of the file, and adds none: a model without a line in the file would surprise whoever reads
# the file.


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


DEMO_PREFIX = "demo:"
_PATHS = ("model_dir", "draft_model", "lora", "chat_template")


class ModelSpec:
    """One configured model, with its name, its keys, and the values that are worked out from the keys.

    draft_model, lora  the directories that these keys name
    model_roots        directories into which files of these directories may be links
    template_file      the file that ``chat_template`` names; None if it names none
    folder             the folder below which the model was found; None for a model with an entry in models.yaml
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        model_dir: Path,
        draft_model: Path | None = None,
        lora: tuple[Path, ...] = (),
        model_roots: tuple[Path, ...] = (),
        template_file: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.model_dir = model_dir
        self.draft_model = draft_model
        self.lora = lora
        self.model_roots = model_roots
        self.template_file = template_file
        self.source: YamlSource | None = None
        """The file as it was when the model was read from it. None for a model that was not read from a file."""
        self.folder = folder

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of the model's workers: the model's own name, or NAME:1, NAME:2, ... No model can have such
        a name."""
        count = self.config.replicas
        return (self.name,) if count == 1 else tuple(f"{self.name}:{i + 1}" for i in range(count))

    @property
    def queue_limits(self) -> QueueLimits:
        return QueueLimits(self.config.max_queue, self.config.max_queue_tokens)

    @property
    def visible_devices(self) -> str:
        """Return the pinned devices as for CUDA_VISIBLE_DEVICES; "auto" if they are chosen later, "" for the CPU."""
        gpu = self.config.gpu
        if gpu in (None, "cpu"):
            return ""
        return ",".join(map(str, gpu)) if isinstance(gpu, tuple) else str(gpu)

    @property
    def autostart(self) -> bool:
        """Return whether the model starts with the supervisor."""
        return not self.config.lazy if self.config.autostart is None else self.config.autostart

    @property
    def may_sleep(self) -> bool:
        """Return whether models.yaml lets the model sleep. Its engine may not be able to."""
        config = self.config
        return config.lazy and not config.pinned and config.sleep == "ram" and self.here

    @property
    def here(self) -> bool:
        """Return whether workers may run on the supervisor's own machine."""
        return self.config.node in (None, AUTO)

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Return what workers want of other machines; None if they run on the supervisor's own only."""
        config = self.config
        return None if config.node is None else Elsewhere(config.node, config.gpu_count, config.vram)

    @property
    def process_key(self) -> tuple[object, ...]:
        """Return the settings that a worker gets at its start. If they change, the worker must be replaced.

        ``model_roots`` are not among them: a running worker has read its files. Paths are those in ``engine_spec``,
        since one may be written in several ways.
        """
        keys = [key for key in marked(ModelConfig, "workers") if key not in _PATHS]
        return (replace(self.engine_spec, model_roots=()), *(getattr(self.config, key) for key in keys))

    @property
    def told(self) -> dict[str, Any]:
        """Return the keys that a worker is told as they are, by their names in ``WorkerSpec``, if they are set."""
        found = {key: getattr(self.config, key) for key in marked(ModelConfig, "told")}
        return {key: value for key, value in found.items() if value is not None}

    @property
    def engine_spec(self) -> EngineSpec:
        config = self.config
        keys = sorted(marked(ModelConfig, "engines"))
        options = {key: value for key in keys if (value := getattr(config, key)) is not None}
        if self.draft_model:
            options["draft_model"] = str(self.draft_model)
        if self.template_file:
            options["chat_template"] = str(self.template_file)
        if config.lora:
            found = zip(self.lora, config.lora, strict=True)
            options["lora"] = [{"dir": str(path), "scaling": entry.scaling} for path, entry in found]
        return EngineSpec(
            model=self.name,
            engine=config.engine,
            model_dir=str(self.model_dir),
            device="cuda" if self.visible_devices else "cpu",
            max_seq_len=config.max_seq_len,
            max_batch_size=config.together,
            options={**options, **(config.options or {})},
            sleep=config.lazy and config.sleep == "ram" and self.here,
            model_roots=tuple(map(str, self.model_roots)),
        )


class Config:
    """A valid models.yaml.

    file  its path, see ``absolute``
    """

    def __init__(
        self,
        file: Path,
        models: dict[str, ModelSpec],
        supervisor: SupervisorConfig,
        gateway: GatewayConfig | None = None,
        default_model: str | None = None,
        groups: Mapping[str, GroupConfig] | None = None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        self.file = file
        self.models = models
        self.supervisor = supervisor
        self.gateway = gateway
        self.notes: list[str] = []
        """What was left out of files that give defaults, one line each."""
        self.used_variables: Mapping[str, str] = {}
        """The variables of the environment that values of the file name."""
        self.read: Signature | None = None
        """The signature of the content of ``file`` that this is; None for one that was not read from a file."""
        self.folders: tuple[Folder, ...] = ()
        self.groups = groups or {}
        self.cluster = cluster
        self.names = ModelNames({name: spec.config for name, spec in models.items()}, default_model)

    def with_models(self, models: dict[str, ModelSpec]) -> "Config":
        """Return this configuration with other models."""
        changed = copy(self)
        changed.models = models
        changed.names = ModelNames({name: spec.config for name, spec in models.items()}, self.names.default)
        return changed

    def with_found(self, found: Mapping[str, ModelSpec]) -> "Config":
        """Return this configuration with these models of folders, in place of those that it has.

        A model of a folder that is no longer in the file is left out, and so is one whose name a model with an entry
        has. An alias that such a model has is no alias of the found model.
        """
        own = {name: spec for name, spec in self.models.items() if spec.folder is None}
        names, folders = self.with_models(own).names, {folder.path for folder in self.folders}
        more: dict[str, ModelSpec] = {}
        for name, spec in found.items():
            if spec.folder in folders and name not in names:
                aliases = [alias for alias in spec.config.aliases if alias not in names]
                more[name] = copy(spec)
                more[name].config = replace(spec.config, aliases=aliases)
        return self.with_models(own | more)

    @property
    def engines(self) -> list[str]:
        """The engines of all models, and of those that may be found."""
        return [*(spec.config.engine for spec in self.models.values()), *(folder.engine for folder in self.folders)]

    @property
    def worker_count(self) -> int:
        """Return how many workers all models have together."""
        return sum(len(model.workers) for model in self.models.values())

    @property
    def keys_dir(self) -> Path:
        """Return the directory of the keys. Raises KeysProblem if none is given and this user has no home directory."""
        given = self.supervisor.keys
        return default_keys_dir() if given is None else self.file.parent / Path(given).expanduser()

    @property
    def request_log(self) -> Path | None:
        """Return the file of the request log; None for none."""
        given = self.supervisor.request_log
        return None if given is None else self.file.parent / Path(given).expanduser()

    def usage_file(self, runtime_dir: Path) -> Path:
        """Return the file with the counts of usage."""
        given = self.supervisor.usage.file
        return (
            log_dir(runtime_dir).parent / "usage.sqlite3"
            if given is None
            else self.file.parent / Path(given).expanduser()
        )


@dataclass(frozen=True)
class Examined:
    """The result of reading and checking a models.yaml.

    source    finds the line of a key
    config    the correct part of the file. Wrong keys are left out, so that the rest can be checked further
    problems  every problem of the file; ``config`` may be used only if there is none
    """

    source: YamlSource
    config: Config
    problems: list[Problem]

    def problem(self, model: str, key: str, message: str) -> Problem:
        """Return a problem at a model's key. Nested keys are written with dots: "lora.0.dir"."""
        parts = [int(part) if part.isdecimal() else part for part in key.split(".")]
        return self.source.problem(("models", model, *parts), message)


def load_config(file: Path) -> Config:
    """Read and check a models.yaml, with the variables of the environment laid over it. Start and change nothing.

    Raises ConfigError with every problem found.
    """
    examined = examine_config(file)
    if examined.problems:
        raise ConfigError(examined.problems)
    return examined.config


def examine_config(file: Path, environment: Mapping[str, str] = os.environ) -> Examined:
    """Read and check a models.yaml as far as possible. Raises ConfigError if nothing of it can be understood.

    environment  the variables that values of the file may name, and those that are laid over it

    From then on this process masks what variables have brought, see ``shown.mask``.
    """
    return examine_source(YamlSource(file, environment), environment)


def examine_source(
    source: YamlSource, environment: Mapping[str, str] = os.environ, found: Sequence[FoundModel] = ()
) -> Examined:
    """Check a models.yaml that was read, as ``examine_config`` does. The source's values are changed.

    found  models of the file's folders
    """
    file = Path(source.file)
    if (program := program_of(source.data)) is not None:
        why = f"is the configuration of {program}: `modelctl init --from {file}` writes a models.yaml from it"
        raise ConfigError([Problem(source.file, 0, "", why)])
    if isinstance(source.data, dict):
        source.data = {key: value for key, value in source.data.items() if not key.startswith(NOTE_PREFIX)}
    mask(source.masks())
    overlay(source, environment)
    lay_folders(source, found)
    engines = engines_of(source.data)
    lay_defaults(source)
    path_of_file = absolute(file)
    base = path_of_file.parent
    notes = lay_beneath(source, lambda model_dir: _resolve(model_dir, base))
    lay_suitable(source, found)
    parsed, flaws = _fit(source.data)
    problems = [*source.problems, *(source.problem(flaw.path, flaw.message) for flaw in flaws)]
    folders, unusable = _folders(parsed.folders, engines, base)
    problems += [source.problem((FOLDERS, *path), message) for path, message in unusable]
    of_folder = {model.name: folders[model.folder].path for model in found if model.folder < len(folders)}
    if not parsed.models and not parsed.folders and not flaws:
        problems.append(source.problem(("models",), "names no model; add at least one"))
    flawed = {flaw.path[1] for flaw in flaws if len(flaw.path) > 2 and flaw.path[0] == "models"}
    roots, unfit = _roots(parsed.supervisor.model_roots or (), base)
    problems += [source.problem(("supervisor", "model_roots", *path), message) for path, message in unfit]
    models = {}
    for name, config in parsed.models.items():
        path: KeyPath = ("models", name)
        if problem := _name_problem(name):
            problems.append(source.problem(path, problem))
        if name not in flawed:  # a wrong key was left out, and the checks of other keys may need it
            problems += [source.problem((*path, key), message) for key, message in combination_problems(config)]
            wrong = sampling_problems(config)
            problems += [source.problem((*path, *key), message) for key, message in wrong]
            if wrong:
                config = replace(config, sampling=None, forced=None, limits=None, variants={}, template_kwargs=None)
        spec, missing = _find(name, config, base, roots)
        problems += [source.problem((*path, *key), message) for key, message in missing]
        if spec is not None:
            models[name] = spec
            spec.folder = of_folder.get(name)
    default = None if flaws else parsed.default_model  # a model with a wrong key may be missing here
    problems += [source.problem(path, message) for path, message in name_problems(parsed.models, default)]
    problems += [source.problem(path, message) for path, message in held_problems(parsed.supervisor.held)]
    if not flaws:
        problems += [source.problem(path, message) for path, message in group_problems(parsed.models, parsed.groups)]
        problems += [source.problem(path, message) for path, message in cluster_problems(parsed.models, parsed.cluster)]
    if parsed.gateway is not None:
        wrong_keys = gateway_problems(parsed.gateway)
        problems += [source.problem(("gateway", key), message) for key, message in wrong_keys]
    unfilled = {".".join(map(str, path)) for path in source.unfilled}
    problems = [problem for problem in problems if problem.path not in unfilled or problem in source.problems]
    problems.sort(key=lambda problem: problem.line)
    whole = Config(
        path_of_file, models, parsed.supervisor, parsed.gateway, parsed.default_model, parsed.groups,
        parsed.cluster,
    )  # fmt: skip
    for spec in models.values():
        spec.source = source
    whole.notes = [masked(str(note)) for note in notes]
    whole.read = source.read
    whole.folders = folders
    whole.used_variables = source.used_variables
    return Examined(source, whole, problems)


def absolute(file: Path) -> Path:
    """Return the path of a models.yaml from the root. Links in it stay as they are, so that each reading follows them.

    Whoever changes the file may do so by giving a link on its path another target, as Kubernetes does with a ConfigMap.
    """
    if file.is_absolute():
        return file
    base, parts = Path.cwd(), list(file.parts)  # the kernel's name of the current directory has no links
    while parts[:1] == [".."]:
        base = base.parent
        del parts[0]
    return base.joinpath(*parts)


def _fit(data: Any) -> tuple[FileConfig, list[Flaw]]:
    """Return the file's values in their types, without values that do not fit, and the flaws of these values."""
    try:
        return fit(FileConfig, data), []
    except Unfit as e:
        flaws = e.flaws
    models = data.get("models") if isinstance(data, dict) else None
    sound = {}
    for name, keys in models.items() if isinstance(models, dict) else ():
        wrong = {flaw.path[2] for flaw in flaws if flaw.path[:2] == ("models", name) and len(flaw.path) > 2}
        if isinstance(keys, dict):
            try:
                sound[name] = fit(ModelConfig, {key: value for key, value in keys.items() if key not in wrong})
            except Unfit:  # a required key is missing or wrong
                continue
    supervisor = SupervisorConfig()
    if isinstance(data, dict) and not _has_flaw(flaws, "supervisor"):
        supervisor = fit(SupervisorConfig, data.get("supervisor", {}))
    gateway = None
    if isinstance(data, dict) and data.get("gateway") is not None and not _has_flaw(flaws, "gateway"):
        gateway = fit(GatewayConfig, data["gateway"])
    folders = []
    if isinstance(data, dict) and not _has_flaw(flaws, FOLDERS):
        folders = fit(FileConfig, {"models": {}, FOLDERS: data.get(FOLDERS) or []}).folders
    default = data.get("default_model") if isinstance(data, dict) and not _has_flaw(flaws, "default_model") else None
    whole = FileConfig(models=sound, default_model=default, folders=folders, supervisor=supervisor, gateway=gateway)
    return whole, flaws


def _has_flaw(flaws: list[Flaw], section: str) -> bool:
    return any(flaw.path[:1] == (section,) for flaw in flaws)


def _name_problem(name: str) -> str | None:
    if not re.fullmatch(limits.MODEL_NAME_PATTERN, name):
        rule = "use a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a letter or digit"
        other = f"; clients may use {name!r}, too, if it is one of the model's aliases" if is_alias(name) else ""
        return f"is no model name: {rule}{other}"
    if name in (limits.SUPERVISOR_NAME, limits.GATEWAY_NAME):
        return f"is taken: the {name}'s own log is called so"
    return None


def _roots(given: Iterable[str], base: Path) -> tuple[tuple[Path, ...], list[tuple[KeyPath, str]]]:
    """Return the directories of ``supervisor.model_roots``, and (place in the list, message) for each that cannot be
    one."""
    roots: list[Path] = []
    unfit: list[tuple[KeyPath, str]] = []
    for index, text in enumerate(given):
        try:
            root = (base / Path(text).expanduser()).resolve()
            if root == Path("/"):
                raise ValueError("/ holds every file of the machine: name the directories that hold models")
            roots.append(root)
        except (ValueError, RuntimeError, OSError) as e:
            unfit.append(((index,), str(e)))
    return tuple(roots), unfit


def _folders(
    given: Iterable[FolderConfig], engines: Sequence[str], base: Path
) -> tuple[tuple[Folder, ...], list[tuple[KeyPath, str]]]:
    """Return the folders, and (place in the list, message) for each that cannot be one. No file system is asked: a
    share of the network may be away, and come later."""
    folders: list[Folder] = []
    unusable: list[tuple[KeyPath, str]] = []
    for index, (folder, engine) in enumerate(zip(given, engines, strict=False)):  # none are given if one has a flaw
        path = Path(os.path.normpath(base / Path(folder.path).expanduser()))
        if path == Path("/"):
            message = "is '/', which holds every file of the machine: name the directory that holds models"
            unusable.append(((index, "path"), message))
        folders.append(Folder(path, engine))
    return tuple(folders), unusable


def _find(
    name: str, config: ModelConfig, base: Path, roots: tuple[Path, ...]
) -> tuple[ModelSpec | None, list[tuple[KeyPath, str]]]:
    """Return the model with its directories (None if one is missing), and (key, message) for each missing directory.

    base   the directory to which paths are relative
    roots  directories into which files of the model's directories may be links
    """
    paths: list[tuple[KeyPath, str]] = [(("model_dir",), config.model_dir)]
    if config.draft_model is not None:
        paths.append((("draft_model",), config.draft_model))
    paths += [(("lora", index, "dir"), entry.dir) for index, entry in enumerate(config.lora or ())]
    found, missing = {}, []
    for key, given in paths:
        try:
            found[key] = _resolve(given, base)
        # the path has a loop of links, or is too long
        except (ValueError, RuntimeError, OSError) as e:
            missing.append((key, str(e)))
    template = None
    if (given_template := config.chat_template) is not None and is_template_file(given_template):
        template = (base / Path(given_template).expanduser()).absolute()
        if not template.is_file() and not is_unmounted(template):
            message = f"{given_template!r} is no file (looked for {template}); give a jinja template"
            missing.append((("chat_template",), message))
    if missing:
        return None, missing
    lora = tuple(directory for key, directory in found.items() if key[0] == "lora")
    return ModelSpec(name, config, found["model_dir",], found.get(("draft_model",)), lora, roots, template), []


def demo_models() -> dict[str, Path]:
    """Return the directories of the models that are shipped with modelctl, by name."""
    return {path.parent.name: path.parent for path in sorted(DEMO_DIR.glob("*/config.json"))}


def _resolve(model_dir: str, base: Path) -> Path:
    """Return the directory of a model or adapter. Raises ValueError if there is none.

    A directory on a file system that is not mounted passes. Its worker finds that, and is started again until the
    directory is there. Otherwise a supervisor that starts before a share of the network would end for good.
    """
    if model_dir.startswith(DEMO_PREFIX):
        # The name is looked up and never joined into a path, so that demo:../../x cannot leave the package.
        shipped = demo_models()
        if (name := model_dir.removeprefix(DEMO_PREFIX)) not in shipped:
            raise ValueError(f"{model_dir!r} is no demo model; shipped are {', '.join(shipped)}")
        return shipped[name]
    path = (base / Path(model_dir).expanduser()).resolve()
    if not path.is_dir() and not is_unmounted(path):
        raise ValueError(f"{model_dir!r} is no directory (looked for {path}); give the directory with config.json")
    return path


# Find the keys of a models.yaml, and decide whether the port of ``supervisor.listen`` may be opened.


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
