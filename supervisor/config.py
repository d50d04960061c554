"""models.yaml: what may stand in it, what it means, and how it is refused.

Unknown keys, wrong types, missing directories and combinations that cannot work are all found before anything is
started, each with its line. Nothing is clamped and nothing is ignored.
"""

import difflib
import re
from pathlib import Path

from protocol import limits
from protocol.worker_spec import EngineSpec
from supervisor.config_schema import ENGINE_KEYS, FileConfig, ModelConfig, SupervisorConfig
from supervisor.fitting import Unfit, fit
from supervisor.keys.records import KeysProblem
from supervisor.keys.store import default_keys_dir
from supervisor.requests.model_queue import QueueLimits
from supervisor.yaml_source import ConfigError, KeyPath, Problem, YamlSource

DEMO_PREFIX = "demo:"
DEMO_DIR = Path(__file__).resolve().parent.parent / "model_worker" / "demo_models"


PAGE = 256
"""Tokens of a page of ExLlamaV2's cache."""


class ModelSpec:
    """One model as configured: its name, its keys, and what follows from them.

    draft_model, lora  directories of these keys
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        model_dir: Path,
        draft_model: Path | None = None,
        lora: tuple[Path, ...] = (),
    ) -> None:
        self.name = name
        self.config = config
        self.model_dir = model_dir
        self.draft_model = draft_model
        self.lora = lora

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of its workers: its own, or NAME:1, NAME:2, ... (no model can be called so)."""
        count = self.config.replicas
        return (self.name,) if count == 1 else tuple(f"{self.name}:{i + 1}" for i in range(count))

    @property
    def queue_limits(self) -> QueueLimits:
        return QueueLimits(self.config.max_queue, self.config.max_queue_tokens)

    @property
    def visible_devices(self) -> str:
        """The pinned devices, as CUDA_VISIBLE_DEVICES has them; "auto" for one that is yet to be chosen, "" for the
        CPU."""
        gpu = self.config.gpu
        if gpu in (None, "cpu"):
            return ""
        return ",".join(map(str, gpu)) if isinstance(gpu, tuple) else str(gpu)

    @property
    def autostart(self) -> bool:
        """Whether it starts with the supervisor."""
        return not self.config.lazy if self.config.autostart is None else self.config.autostart

    @property
    def process_key(self) -> tuple[object, ...]:
        """What a worker is told at its start: where this differs, it takes another process."""
        config = self.config
        return self.engine_spec, config.gpu, config.sampling, config.limits, config.step_timeout

    @property
    def engine_spec(self) -> EngineSpec:
        config = self.config
        keys = frozenset[str]().union(*ENGINE_KEYS.values())
        options = {key: value for key in sorted(keys) if (value := getattr(config, key)) is not None}
        if self.draft_model:
            options["draft_model"] = str(self.draft_model)
        if config.lora:
            found = zip(self.lora, config.lora, strict=True)
            options["lora"] = [{"dir": str(path), "scaling": entry.scaling} for path, entry in found]
        return EngineSpec(
            model=self.name,
            engine=config.engine,
            model_dir=str(self.model_dir),
            device="cuda" if self.visible_devices else "cpu",
            max_seq_len=config.max_seq_len,
            max_batch_size=config.max_batch_size,
            options={**options, **(config.options or {})},
        )


class Config:
    """A valid models.yaml."""

    def __init__(self, file: Path, models: dict[str, ModelSpec], supervisor: SupervisorConfig) -> None:
        self.file = file
        self.models = models
        self.supervisor = supervisor

    @property
    def keys_dir(self) -> Path:
        """Directory of the keys. Raises KeysProblem where it is in a home that there is not."""
        given = self.supervisor.keys
        try:
            return default_keys_dir() if given is None else self.file.parent / Path(given).expanduser()
        except RuntimeError as e:
            raise KeysProblem(f"supervisor.keys is {given!r}: {e}") from None


def load_config(file: Path) -> Config:
    """Read and check a models.yaml. Raises ConfigError with every problem found; starts nothing, changes nothing."""
    source = YamlSource(file)
    try:
        parsed = fit(FileConfig, source.data)
    except Unfit as e:
        raise ConfigError([source.problem(flaw.path, flaw.message) for flaw in e.flaws]) from None
    problems: list[Problem] = []
    models = {}
    if not parsed.models:
        problems.append(source.problem(("models",), "names no model; add at least one"))
    for name, config in parsed.models.items():
        path: KeyPath = ("models", name)
        if not re.fullmatch(limits.MODEL_NAME_PATTERN, name):
            message = (
                "is no model name: use a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a letter or digit"
            )
            problems.append(source.problem(path, message))
        if name == limits.SUPERVISOR_NAME:
            problems.append(source.problem(path, "is taken: the supervisor's own log is called so"))
        problems += [source.problem((*path, key), message) for key, message in _combination_problems(config)]
        problems += [source.problem((*path, *key), message) for key, message in _sampling_problems(config)]
        base = Path(file).resolve().parent
        paths: list[tuple[KeyPath, str]] = [(("model_dir",), config.model_dir)]
        if config.draft_model is not None:
            paths.append((("draft_model",), config.draft_model))
        paths += [(("lora", index, "dir"), entry.dir) for index, entry in enumerate(config.lora or ())]
        found = {}
        for key, given in paths:
            try:
                found[key] = _resolve(given, base)
            except (ValueError, RuntimeError, OSError) as e:  # no such user in ~user, a loop of links, a name too long
                problems.append(source.problem((*path, *key), str(e)))
        if len(found) == len(paths):
            lora = tuple(directory for key, directory in found.items() if key[0] == "lora")
            models[name] = ModelSpec(name, config, found["model_dir",], found.get(("draft_model",)), lora)
    if problems:
        raise ConfigError(problems)
    return Config(Path(file).resolve(), models, parsed.supervisor)


def _resolve(model_dir: str, base: Path) -> Path:
    """The directory of a model or adapter. Raises ValueError if there is none."""
    if model_dir.startswith(DEMO_PREFIX):
        # Looked up, never joined into a path: demo:../../x must not leave the package.
        shipped = {path.parent.name: path.parent for path in DEMO_DIR.glob("*/config.json")}
        if (name := model_dir.removeprefix(DEMO_PREFIX)) not in shipped:
            raise ValueError(f"{model_dir!r} is no demo model; shipped are {', '.join(sorted(shipped))}")
        return shipped[name]
    path = (base / Path(model_dir).expanduser()).resolve()
    if not path.is_dir():
        raise ValueError(f"{model_dir!r} is no directory (looked for {path}); give the directory with config.json")
    return path


def _combination_problems(config: ModelConfig) -> list[tuple[str, str]]:
    """(key, message) for keys that are fine alone and wrong together."""
    problems = []
    custom = ":" in config.engine
    if not custom and config.engine not in ENGINE_KEYS:
        near = difflib.get_close_matches(config.engine, ENGINE_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(ENGINE_KEYS)}, or package.module:Class"
        problems.append(("engine", f"{config.engine!r} is no engine: {hint}"))
        return problems
    known = ENGINE_KEYS.get(config.engine, frozenset())
    foreign = sorted(frozenset[str]().union(*ENGINE_KEYS.values()) - known)
    message = f"is not a key of engine {config.engine!r}; remove it"
    problems += [(key, message) for key in foreign if getattr(config, key) is not None]
    if config.options is not None and not custom:
        problems.append(("options", "is only for an engine named by an import string; remove it"))
    problems += _demand_problems(config)
    if config.engine == "exllamav2" and config.gpu in (None, "cpu"):
        problems.append(
            ("gpu", "engine exllamav2 needs a GPU: add gpu: auto, or pin it with gpu: 0, [0, 1] or GPU-<uuid>")
        )
    if config.vram is not None:
        gpus = len(config.gpu) if isinstance(config.gpu, tuple) else 1
        if config.gpu in (None, "cpu"):
            problems.append(("vram", "is for a model on a GPU; add gpu, or remove it"))
        elif len(config.vram) not in (1, gpus):
            problems.append(("vram", f"has {len(config.vram)} values for {gpus} GPUs; give one, or one for each"))
    if config.engine == "exllamav2":
        problems += _exllamav2_problems(config)
    return problems


def _sampling_problems(config: ModelConfig) -> list[tuple[KeyPath, str]]:
    """(path, message) for defaults and limits that no request could have."""
    if config.sampling is None and config.limits is None:
        return []
    # a tenth of a second, for keys that few models have
    from protocol.sampling_defaults import DefaultsProblem, check_limits, check_sampling

    sampling, limits = config.sampling or {}, config.limits or {}
    name = "sampling"
    try:
        check_sampling(sampling)
        name = "limits"  # which are held against defaults that are right
        check_limits(limits, sampling)
    except DefaultsProblem as e:
        return [((name,) if e.key is None else (name, e.key), e.problem)]
    return []


def _demand_problems(config: ModelConfig) -> list[tuple[str, str]]:
    """(key, message) for what is only for lazy models, or contradicts itself."""
    given = {"ttl": config.ttl is not None, "pinned": config.pinned, "priority": config.priority != 0}
    why = "is for a model that a request can start: add lazy: true, or remove it"
    problems = [(key, why) for key, is_given in given.items() if is_given and not config.lazy]
    if config.pinned and config.ttl is not None:
        problems.append(("ttl", "unloads what pinned keeps loaded; keep one of them"))
    if config.pinned and config.priority:
        problems.append(("priority", "says who is unloaded first, and pinned that it never is; keep one of them"))
    return problems


def _exllamav2_problems(config: ModelConfig) -> list[tuple[str, str]]:
    """(key, message) for keys of engine exllamav2 that are wrong together."""
    problems = []
    for key in ("cache_size", "chunk_size"):
        value = getattr(config, key)
        if value is not None and value % PAGE:
            near = -(-value // PAGE) * PAGE
            problems.append((key, f"is {value}: must be a multiple of {PAGE}, such as {near}"))
    if config.draft_model is not None and config.ngram_draft:
        problems.append(("ngram_draft", "speculates as draft_model does; keep one of them"))
    if config.draft_model is None:
        alone = ("draft_cache_mode", "draft_rope_scale", "draft_rope_alpha")
        problems += [(key, "is for a draft_model; add one, or remove it") for key in alone if getattr(config, key)]
        if config.draft_tokens and not config.ngram_draft:
            problems.append(("draft_tokens", "is without effect: add draft_model or ngram_draft, or remove it"))
    gpus = len(config.gpu) if isinstance(config.gpu, tuple) else 1
    for key in ("gpu_split", "autosplit_reserve"):
        value = getattr(config, key)
        if value is not None and gpus == 1:
            problems.append((key, "is for several GPUs; list them (gpu: [0, 1]), or remove it"))
        elif value is not None and len(value) != gpus:
            problems.append((key, f"has {len(value)} values for {gpus} GPUs; give one for each"))
    if config.autosplit_reserve is not None and (config.gpu_split is not None or config.tensor_parallel):
        other = "gpu_split" if config.gpu_split is not None else "tensor_parallel"
        problems.append(("autosplit_reserve", f"is for the automatic split, which {other} turns off; keep one of them"))
    if config.tensor_parallel:
        if gpus == 1:
            problems.append(("tensor_parallel", "needs several GPUs; list them (gpu: [0, 1]), or remove it"))
        if config.lora:
            problems.append(("lora", "does not work with tensor_parallel; remove one of them"))
    return problems
