"""What may stand in a models.yaml: keys, types, defaults. What follows from them is ``supervisor.config``."""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from protocol.beat import DEFAULT_LEASES, MAX_LEASE_S, Leases
from supervisor.fitting import Read, Within
from supervisor.keys.endpoint import parse_listen
from supervisor.placement.sizes import Limit, parse_limit, parse_size
from supervisor.requests.deliveries import HoldLimits
from supervisor.requests.model_queue import QueueLimits
from supervisor.requests.strikes import StrikePolicy
from supervisor.workers.restart import RestartPolicy
from supervisor.workers.stop_ladder import PATIENT, LadderTimes

ENGINE_KEYS: dict[str, frozenset[str]] = {
    "exllamav2": frozenset(
        {
            "cache_size",
            "cache_mode",
            "chunk_size",
            "rope_scale",
            "rope_alpha",
            "gpu_split",
            "autosplit_reserve",
            "tensor_parallel",
            "draft_model",
            "draft_cache_mode",
            "draft_rope_scale",
            "draft_rope_alpha",
            "draft_tokens",
            "ngram_draft",
            "lora",
        }
    ),
    "transformers": frozenset({"chunk_size", "threads"}),
}
"""Keys of models.yaml that only some engines know. An engine named by an import string takes ``options`` instead."""

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)$")
MIN_LEASE_S = 1.0
MAX_DURATION_S = 7 * 24 * 3600.0
"""Nothing here means to wait for longer, and no clock overflows."""
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(value: object) -> float:
    """Seconds of ``5m``, ``90s``, ``250ms``, ``1h``, or of a number of seconds. Raises ValueError."""
    seconds = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    elif isinstance(value, str) and (match := _DURATION.match(value)):
        seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 <= seconds <= MAX_DURATION_S:
        raise ValueError("must be a duration such as 250ms, 30s, 5m or 1h, a week at most")
    return float(seconds)


def parse_gpu(value: object) -> str | int | tuple[int | str, ...]:
    """``cpu``, ``auto``, an index of nvidia-smi, a GPU's UUID, or a list of indices or UUIDs. Raises ValueError."""
    one = (
        f"{value!r} is no GPU: must be cpu, auto, an index as nvidia-smi counts, GPU-<uuid>, or a list of the last two"
    )
    if value in ("cpu", "auto"):
        return str(value)
    if isinstance(value, list):
        if not value or len(set(map(str, value))) != len(value):
            raise ValueError("must name at least one GPU, and none twice")
        parsed = [parse_gpu(item) for item in value]
        if any(item in ("cpu", "auto") or isinstance(item, tuple) for item in parsed):
            raise ValueError(one)
        return tuple(item for item in parsed if not isinstance(item, tuple))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1024:
        return value
    if isinstance(value, str) and re.fullmatch(r"GPU-[0-9a-fA-F-]{8,64}", value):
        return value
    raise ValueError(one)


def parse_vram(value: object) -> tuple[int, ...]:
    """One size, or a list of them, one for each GPU; in bytes. Raises ValueError."""
    return tuple(map(parse_size, value)) if isinstance(value, list) and value else (parse_size(value),)


def parse_vram_limit(value: object) -> Limit | dict[str, Limit]:
    """One limit for every GPU, or GPU → limit. Raises ValueError naming the GPU."""
    if not isinstance(value, dict):
        return parse_limit(value)
    limits = {}
    for gpu, limit in value.items():
        text = str(gpu)  # as all keys of a YAML file come
        if not re.fullmatch(r"\d{1,3}|GPU-[0-9a-fA-F-]{8,64}", text):
            raise ValueError(f"{gpu!r} is no GPU: must be an index as nvidia-smi counts, or GPU-<uuid>")
        try:
            limits[text] = parse_limit(limit)
        except ValueError as e:
            raise ValueError(f"GPU {gpu}: {limit!r} {e}") from None
    return limits


def parse_ttl(value: object) -> float | None:
    """Seconds without a request, None for ``never``. Raises ValueError."""
    if value is None or value == "never":
        return None
    try:
        seconds = parse_duration(value)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError("must be never, or a duration above zero such as 30s, 10m or 1h, a week at most")
    return seconds


def parse_lease(value: object) -> float:
    """Seconds that a worker may go without a beat. Raises ValueError."""
    seconds = parse_duration(value)
    if not MIN_LEASE_S <= seconds <= MAX_LEASE_S:  # an idle worker waits for 200 ms at a time
        raise ValueError("must be from 1s to 24h")
    return seconds


Duration = Annotated[float, Read(parse_duration)]
Ttl = Annotated[float | None, Read(parse_ttl)]
Lease = Annotated[float, Read(parse_lease)]
Listen = Annotated[str | None, Read(parse_listen)]
Gpu = Annotated[Any, Read(parse_gpu)]
Tokens = Annotated[int, Within(1, 1 << 24)]
Vram = Annotated[Any, Read(parse_vram)]
VramLimit = Annotated[Any, Read(parse_vram_limit)]

_QUEUE = QueueLimits()
CacheMode = Literal["FP16", "Q8", "Q6", "Q4"]
Factor = Annotated[float, Within(0, 1e6, above=True)]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """One entry under ``lora``."""

    dir: str
    """Directory with adapter_config.json and adapter_model.safetensors, absolute or relative to the file."""
    scaling: Annotated[float, Within(-1000, 1000)] = 1.0
    """Factor on what the adapter adds, beside the one it has itself."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One entry under ``models``. The keys are those that EXL2 users know from elsewhere."""

    model_dir: str
    """Directory of the model: absolute, relative to the file, or demo:NAME for a model that is shipped."""
    engine: str = "exllamav2"
    """exllamav2, transformers, or an import string package.module:Class."""
    gpu: Gpu = None
    """The GPU or GPUs this model is pinned to, or auto; required for exllamav2, cpu by default for the others."""
    vram: Vram = None
    """What each worker takes of its GPUs' memory in all, as nvidia-smi shows it: instead of the estimate, and for
    engines that have none. One size, divided evenly among several GPUs, or a list with one for each."""
    max_seq_len: Tokens | None = None
    """Tokens of context; the model's own by default."""
    max_batch_size: Annotated[int, Within(1, 1024)] = 8
    """Requests decoded together."""
    cache_size: Tokens | None = None
    """exllamav2: tokens of all running requests together; by default the larger of the context and 256 a request."""
    cache_mode: CacheMode | None = None
    """exllamav2: FP16 by default."""
    chunk_size: Tokens | None = None
    """Prompt tokens computed in one step."""
    rope_scale: Factor | None = None
    """exllamav2: positions are divided by it (linear scaling); the model's own by default."""
    rope_alpha: Factor | None = None
    """exllamav2: NTK scaling of the rotary base; 1 by default."""
    gpu_split: list[Annotated[float, Within(0, 1e6, above=True)]] | None = None
    """exllamav2 on several GPUs: GB of weights on each; split automatically by default."""
    autosplit_reserve: list[Annotated[int, Within(0, 1 << 20)]] | None = None
    """exllamav2 on several GPUs: MB that the automatic split leaves free on each; 256 by default."""
    tensor_parallel: bool | None = None
    """exllamav2 on several GPUs: every layer is split among them (EXL2 weights, some architectures)."""
    draft_model: str | None = None
    """exllamav2: directory of a small model of the same vocabulary that speculates; as model_dir."""
    draft_cache_mode: CacheMode | None = None
    """exllamav2: cache_mode by default."""
    draft_rope_scale: Factor | None = None
    draft_rope_alpha: Factor | None = None
    """exllamav2: as rope_scale and rope_alpha, of the draft model."""
    draft_tokens: Annotated[int, Within(1, 16)] | None = None
    """exllamav2: tokens speculated per step; 4 by default."""
    ngram_draft: bool | None = None
    """exllamav2: speculate from what the text repeats, without a draft model."""
    lora: list[LoraConfig] | None = None
    """exllamav2: adapters that apply to every request."""
    threads: Annotated[int, Within(1, 1024)] | None = None
    """transformers on the CPU: 1 by default, so that several models do not fight for the cores."""
    replicas: Annotated[int, Within(1, 64)] = 1
    """Workers that serve this model, each a process with its own weights and cache on the same devices."""
    max_queue: Annotated[int, Within(1, 100_000)] = _QUEUE.requests
    """Requests that may wait for this model; more are refused as overloaded."""
    max_queue_tokens: Annotated[int, Within(1, 1 << 30)] = _QUEUE.tokens
    """Tokens of all prompts that may wait for this model, estimated at four bytes each."""
    sampling: dict[str, Any] | None = None
    """What a request leaves out: sampling parameters by name, and ``preset: steady`` against loops of small models."""
    limits: dict[str, Any] | None = None
    """What a request may not exceed: max_tokens, prompt_tokens, temperature, ..."""
    step_timeout: Lease | None = None
    """What one step may take before the worker is taken to hang; as ``supervisor.watch.step`` by default."""
    load_timeout: Lease | None = None
    """The same of one part of a load (a module, a step of the warm-up); as ``supervisor.watch.load`` by default."""
    autostart: bool | None = None
    """Start with the supervisor; by default, unless it is lazy."""
    lazy: bool = False
    """Start with the first request that asks for it, and be unloaded when another model needs the memory."""
    ttl: Ttl = None
    """lazy: unload after so long without a request; never by default."""
    pinned: bool = False
    """lazy: stay loaded once it is, whoever needs the memory."""
    priority: Annotated[int, Within(-1000, 1000)] = 0
    """lazy: models of a lower priority are unloaded before it."""
    options: dict[str, Any] | None = None
    """For an engine named by an import string: its own settings."""


_RESTART = RestartPolicy()


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """When to give up on a model that keeps ending."""

    limit: Annotated[int, Within(1, 1000)] = _RESTART.limit
    window: Duration = _RESTART.window_s
    initial: Duration = _RESTART.initial_s
    max: Duration = _RESTART.max_s


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """How long each rung of the stop ladder is given."""

    drain: Duration = 30.0
    shutdown: Duration = PATIENT.shutdown_s
    sigterm: Duration = PATIENT.sigterm_s


_POISON = StrikePolicy()


@dataclass(frozen=True, kw_only=True)
class PoisonConfig:
    """When a request is refused because the workers that compute it die."""

    limit: Annotated[int, Within(1, 1000)] = _POISON.limit
    """Deaths of workers that are blamed on the request: it was on probation, or the only one that was computed. Each
    death before that, with other requests beside it, only puts it on probation."""
    window: Duration = _POISON.window_s
    """How long after the last death a request, and each one with the same payload, is remembered."""


_WATCH = DEFAULT_LEASES


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """How long a worker may go without a sign of progress before it is taken to hang, and killed. A reload changes it
    for workers that are started from then on."""

    start: Lease = _WATCH.start_s
    """From its spawning to its first line: Python starts, and the files of this package are read."""
    load: Lease = _WATCH.load_s
    """One part of a load: the import of the engine, one module of the weights from a slow disk, kernels that are
    compiled, a step of the warm-up. A whole load may take as long as it likes."""
    idle: Lease = _WATCH.idle_s
    """With nothing to compute: it looks up five times a second."""
    step: Lease = _WATCH.step_s
    """One step of the engine: a chunk of a prompt (``chunk_size``) and a token of each answer; or the encoding of one
    prompt. A whole prefill may take as long as it likes."""


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """The ``supervisor`` section."""

    restart: RestartConfig = field(default_factory=RestartConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    poison: PoisonConfig = field(default_factory=PoisonConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    listen: Listen = None
    """tcp://ADDRESS:PORT, open to holders of a key that `modelctl keys new` made; nothing listens by default."""
    keys: str | None = None
    """Directory of the keys: absolute, or relative to the file; by default $MODELCTL_KEYS, else
    ~/.config/modelctl/keys."""
    stall: Duration = HoldLimits.stall_s
    """How long a stream may have events waiting while its client reads none, before it is ended."""
    vram_limit: VramLimit = None
    """Most that all models together may hold of a GPU: one limit for every GPU, or GPU → limit; no limit by default."""

    @property
    def restart_policy(self) -> RestartPolicy:
        r = self.restart
        return RestartPolicy(limit=r.limit, window_s=r.window, initial_s=r.initial, max_s=r.max)

    @property
    def strike_policy(self) -> StrikePolicy:
        return StrikePolicy(limit=self.poison.limit, window_s=self.poison.window)

    @property
    def hold_limits(self) -> HoldLimits:
        return HoldLimits(stall_s=self.stall)

    def leases(self, model: ModelConfig) -> Leases:
        """Those of a model's workers."""
        w = self.watch
        return Leases(
            start_s=w.start, load_s=model.load_timeout or w.load, idle_s=w.idle, step_s=model.step_timeout or w.step
        )

    @property
    def ladder(self) -> LadderTimes:
        return LadderTimes(shutdown_s=self.stop.shutdown, sigterm_s=self.stop.sigterm)


@dataclass(frozen=True, kw_only=True)
class FileConfig:
    """The whole file."""

    models: dict[str, ModelConfig]
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
