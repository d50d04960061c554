"""models.yaml: what may stand in it, what it means, and how it is refused.

Unknown keys, wrong types, missing directories and combinations that cannot work are all found before anything is
started, each with its line. Nothing is clamped and nothing is ignored.
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from protocol import limits
from protocol.worker_spec import EngineSpec
from supervisor.restart import RestartPolicy
from supervisor.stop_ladder import LadderTimes
from supervisor.yaml_source import ConfigError, KeyPath, Problem, YamlSource

DEMO_PREFIX = "demo:"
DEMO_DIR = Path(__file__).resolve().parent.parent / "model_worker" / "demo_models"

ENGINE_KEYS: dict[str, frozenset[str]] = {
    "exllamav2": frozenset({"cache_size", "cache_mode", "chunk_size"}),
    "transformers": frozenset({"chunk_size", "threads"}),
}
"""Keys of models.yaml that only some engines know. An engine named by an import string takes ``options`` instead."""

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)$")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(value: object) -> float:
    """Seconds of ``5m``, ``90s``, ``250ms``, ``1h``, or of a number of seconds. Raises ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    if isinstance(value, str) and (match := _DURATION.match(value)):
        return float(match[1]) * _SECONDS[match[2]]
    raise ValueError("must be a duration such as 250ms, 30s, 5m or 1h")


def parse_gpu(value: object) -> str | int | tuple[int | str, ...]:
    """``cpu``, an index of nvidia-smi, a GPU's UUID, or a list of indices or UUIDs. Raises ValueError."""
    one = f"{value!r} is no GPU: must be cpu, an index as nvidia-smi counts, GPU-<uuid>, or a list of those"
    if value == "cpu":
        return "cpu"
    if isinstance(value, list):
        if not value or len(set(map(str, value))) != len(value):
            raise ValueError("must name at least one GPU, and none twice")
        parsed = [parse_gpu(item) for item in value]
        if any(item == "cpu" or isinstance(item, tuple) for item in parsed):
            raise ValueError(one)
        return tuple(item for item in parsed if not isinstance(item, tuple))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1024:
        return value
    if isinstance(value, str) and re.fullmatch(r"GPU-[0-9a-fA-F-]{8,64}", value):
        return value
    raise ValueError(one)


Duration = Annotated[float, BeforeValidator(parse_duration)]
Gpu = Annotated[Any, BeforeValidator(parse_gpu)]
Tokens = Annotated[int, Field(ge=1, le=1 << 24)]

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(BaseModel):
    """One entry under ``models``. The keys are those that EXL2 users know from elsewhere."""

    model_config = _STRICT

    model_dir: str
    """Directory of the model: absolute, relative to the file, or demo:NAME for a model that is shipped."""
    engine: str = "exllamav2"
    """exllamav2, transformers, or an import string package.module:Class."""
    gpu: Gpu = None
    """The GPU or GPUs this model is pinned to; required for exllamav2, cpu by default for the others."""
    max_seq_len: Tokens | None = None
    """Tokens of context; the model's own by default."""
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests decoded together."""
    cache_size: Tokens | None = None
    """exllamav2: tokens of all running requests together; max_seq_len by default."""
    cache_mode: Literal["FP16", "Q8", "Q6", "Q4"] | None = None
    """exllamav2: FP16 by default."""
    chunk_size: Tokens | None = None
    """Prompt tokens computed in one step."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """transformers on the CPU: 1 by default, so that several models do not fight for the cores."""
    max_queue: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Requests that may wait for this model; more are refused as overloaded."""
    autostart: bool = True
    """Start with the supervisor."""
    options: dict[str, Any] | None = None
    """For an engine named by an import string: its own settings."""


class RestartConfig(BaseModel):
    """When to give up on a model that keeps ending."""

    model_config = _STRICT

    limit: Annotated[int, Field(ge=1, le=1000)] = 5
    window: Duration = 60.0
    initial: Duration = 0.5
    max: Duration = 30.0


class StopConfig(BaseModel):
    """How long each rung of the stop ladder is given."""

    model_config = _STRICT

    drain: Duration = 30.0
    shutdown: Duration = 5.0
    sigterm: Duration = 2.0


class SupervisorConfig(BaseModel):
    """The ``supervisor`` section."""

    model_config = _STRICT

    restart: RestartConfig = RestartConfig()
    stop: StopConfig = StopConfig()

    @property
    def restart_policy(self) -> RestartPolicy:
        r = self.restart
        return RestartPolicy(limit=r.limit, window_s=r.window, initial_s=r.initial, max_s=r.max)

    @property
    def ladder(self) -> LadderTimes:
        return LadderTimes(shutdown_s=self.stop.shutdown, sigterm_s=self.stop.sigterm)


class FileConfig(BaseModel):
    """The whole file."""

    model_config = _STRICT

    models: dict[str, ModelConfig]
    supervisor: SupervisorConfig = SupervisorConfig()


class ModelSpec:
    """One model as configured: its name, its keys, and what follows from them."""

    def __init__(self, name: str, config: ModelConfig, model_dir: Path) -> None:
        self.name = name
        self.config = config
        self.model_dir = model_dir

    @property
    def visible_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES of the worker: the pinned devices, "" for the CPU."""
        gpu = self.config.gpu
        if gpu in (None, "cpu"):
            return ""
        return ",".join(map(str, gpu)) if isinstance(gpu, tuple) else str(gpu)

    @property
    def engine_spec(self) -> EngineSpec:
        config = self.config
        keys = frozenset[str]().union(*ENGINE_KEYS.values())
        options = {key: value for key in sorted(keys) if (value := getattr(config, key)) is not None}
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


def load_config(file: Path) -> Config:
    """Read and check a models.yaml. Raises ConfigError with every problem found; starts nothing, changes nothing."""
    source = YamlSource(file)
    try:
        parsed = FileConfig.model_validate(source.data)
    except ValidationError as e:
        raise ConfigError([_problem(source, error) for error in e.errors(include_url=False)]) from None
    problems: list[Problem] = []
    models = {}
    if not parsed.models:
        problems.append(source.problem(("models",), "names no model; add at least one"))
    for name, config in parsed.models.items():
        path: KeyPath = ("models", name)
        if not re.match(limits.MODEL_NAME_PATTERN, name):
            message = "is no model name: use a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a letter or digit"
            problems.append(source.problem(path, message))
        problems += [source.problem((*path, key), message) for key, message in _combination_problems(config)]
        model_dir = _resolve(config.model_dir, Path(file).resolve().parent)
        if not model_dir.is_dir():
            message = f"{config.model_dir!r} is no directory (looked for {model_dir}); give the directory with config.json"
            problems.append(source.problem((*path, "model_dir"), message))
        models[name] = ModelSpec(name, config, model_dir)
    if problems:
        raise ConfigError(problems)
    return Config(Path(file).resolve(), models, parsed.supervisor)


def _resolve(model_dir: str, base: Path) -> Path:
    if model_dir.startswith(DEMO_PREFIX):
        # A single name, never a path: demo:../../x must not leave the package.
        return DEMO_DIR / Path(model_dir.removeprefix(DEMO_PREFIX)).name
    return (base / Path(model_dir).expanduser()).resolve()


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
    for key in sorted(frozenset[str]().union(*ENGINE_KEYS.values()) - known):
        if getattr(config, key) is not None:
            problems.append((key, f"is not a key of engine {config.engine!r}; remove it"))
    if config.options is not None and not custom:
        problems.append(("options", "is only for an engine named by an import string; remove it"))
    if config.engine == "exllamav2" and config.gpu in (None, "cpu"):
        problems.append(("gpu", "engine exllamav2 needs the GPU this model is pinned to: add gpu: 0, [0, 1] or GPU-<uuid>"))
    return problems


_KNOWN: dict[str, type[BaseModel]] = {
    "": FileConfig,
    "models": ModelConfig,
    "supervisor": SupervisorConfig,
    "restart": RestartConfig,
    "stop": StopConfig,
}


def _problem(source: YamlSource, error: Any) -> Problem:
    path: KeyPath = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        parents = path[:-1]
        section = "models" if parents[:1] == ("models",) else str(parents[-1]) if parents else ""
        known = list(_KNOWN[section].model_fields)
        near = difflib.get_close_matches(str(path[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
        return source.problem(path, f"unknown key; {hint}")
    if error["type"] == "missing":
        return source.problem(path, "is missing; add it")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = "must be a mapping (key: value lines)"
    shown = repr(error["input"])
    return source.problem(path, f"is {shown if len(shown) <= 60 else type(error['input']).__name__}: {message}")
