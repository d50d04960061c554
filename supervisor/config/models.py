"""Keys of one model in models.yaml: types, defaults, and which engine knows them.

The text below each key is its documentation: ``docs/configuration.md`` is generated from it. The text ends with a
paragraph of one or two lines. ``Default:`` says in words what an unset key means, if the default is None. ``Example:``
is a value as it stands in the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Final

from protocol.values import NullLeavesOut, Unfit, Within, hints_of
from supervisor.config.reading import (
    CacheMode,
    Description,
    Factor,
    Gpu,
    HostMemory,
    Lease,
    Node,
    Pooling,
    Reasoning,
    Sleep,
    Task,
    Tokens,
    ToolFormat,
    Ttl,
    UserPath,
    Vram,
    fit,
)
from supervisor.config.yaml_source import KeyPath, Quoted, YamlSource
from supervisor.placement.gpus import MOST_GPUS
from supervisor.requests.queue import QueueLimits

ENGINES: Final = ("exllamav2", "transformers", "embedding")
"""The engines of modelctl."""
# The metadata of a field say what the other parts of modelctl do with the key. A key without any is applied by the
# supervisor, also when a reload changes it.
WORKERS: Final = {"workers": True}
"""The worker of a model reads the key at its start. So a reload that changes the key exchanges the workers."""
TOLD: Final = WORKERS | {"told": True}
"""Like WORKERS. The field of ``WorkerSpec`` that has the key's name gets the value."""
EXLLAMAV2: Final = WORKERS | {"engines": ("exllamav2",)}
BOTH: Final = WORKERS | {"engines": ("exllamav2", "transformers")}
EMBEDDING: Final = WORKERS | {"engines": ("embedding",)}
ON_CPU: Final = WORKERS | {"engines": ("transformers", "embedding")}
"""Only these engines know the key. They find it in the ``options`` of ``EngineSpec``. Its default is None."""
TEXT: Final = {"text": True}
"""Engine embedding, which writes no text, does not have the key."""
EMBEDDED_TOGETHER: Final = 64
"""Requests that a worker of engine embedding has at once. ``batch_tokens`` says which it computes together."""
LAZY: Final = {"lazy": True}
"""Only a lazy model may have the key."""
ONE: Final = "one"
"""The key may not stand in ``defaults``. The text says why, and to write it below the model."""
LATER: Final = {"later": True}
"""A reload changes the key for workers that are started after it."""
AT_START: Final = {"at_start": True}
"""A reload refuses a change of the key, which the supervisor reads at its start only."""

_QUEUE = QueueLimits()


@dataclass(frozen=True, kw_only=True)
class LoraConfig(NullLeavesOut):
    """One LoRA adapter, an entry of the list ``lora``."""

    dir: UserPath
    """Directory with adapter_config.json and adapter_model.safetensors: absolute, or relative to models.yaml.

    Example: ~/loras/pirate
    """
    scaling: Annotated[float, Within(-1000, 1000)] = 1.0
    """Factor on the adapter's effect. The adapter's own scaling applies as well.

    Example: 0.8
    """


@dataclass(frozen=True, kw_only=True)
class VariantConfig(NullLeavesOut):
    """One variant of a model, an entry of the map ``variants``. It changes what requests leave out."""

    sampling: dict[str, Any] | None = None
    """Defaults for options that a request leaves out. They replace those of the same names in the model's ``sampling``.

    Default: the model's own
    Example: {temperature: 0.2, max_tokens: 1024}
    """
    forced: dict[str, Any] | None = None
    """Values for all requests. They replace the values of the same names in the model's own ``forced``.

    Default: the model's own
    Example: {temperature: 0}
    """
    template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template. They replace the values of the same names in the model's own ``template_kwargs``.

    Default: the model's own
    Example: {enable_thinking: false}
    """
    listed: bool | None = None
    """Show the variant's names to clients. A model with ``listed: false`` may have variants with ``listed: true``.

    Default: the model's own
    Example: false
    """


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NullLeavesOut):
    """One entry under ``models``."""

    model_dir: UserPath = field(metadata=WORKERS | {ONE: "is the directory of one model; write it"})
    """Directory of the model, with config.json, tokenizer.json and the weights (``*.safetensors``).

    ``demo:letters``, ``demo:stories`` and ``demo:agent`` are shipped with modelctl.

    Example: ~/models/Llama-3.1-8B-Instruct-exl2-6.0bpw
    """
    engine: str = field(default="exllamav2", metadata=WORKERS)
    """[Engine](engines.md) of the model: ``exllamav2``, ``transformers``, ``embedding`` (vectors of texts, scores of
    documents), or your own as ``package.module:Class``.

    Example: transformers
    """
    gpu: Gpu = field(default=None, metadata=WORKERS)
    """The GPU or GPUs of every worker of this model.

    An index is that of nvidia-smi. ``auto`` is the GPU with the most free memory. A list splits the model.

    Default: required for exllamav2, cpu for the other engines
    Example: [0, 1]
    """
    gpus: Annotated[int, Within(1, MOST_GPUS)] = field(default=1, metadata=WORKERS)
    """With ``gpu: auto``: the number of GPUs of every worker.

    Example: 2
    """
    node: Node = field(default=None, metadata=WORKERS)
    """The [other machines](operate.md#workers-on-other-machines) of the ``cluster`` on which the model's workers run.

    On other machines ``gpu`` is ``auto`` or ``cpu``.

    Default: the supervisor's own
    Example: big-box
    """
    vram: Vram = None
    """GPU memory of each worker in all, as nvidia-smi shows it.

    It replaces the estimate. One size is divided evenly among several GPUs; a list has one for each.

    Default: the estimate of the engine
    Example: 12GiB
    """
    max_seq_len: Tokens | None = field(default=None, metadata=WORKERS)
    """Most tokens of context of one request: prompt and answer together.

    Default: the model's own context
    Example: 16384
    """
    max_batch_size: Annotated[int, Within(1, 1024)] = field(default=8, metadata=WORKERS | TEXT)
    """Most requests that a worker decodes together. Others wait.

    Example: 16
    """
    cache_size: Tokens | None = field(default=None, metadata=EXLLAMAV2)
    """Tokens in the cache of a worker, for all its requests together. A multiple of 256.

    Default: the larger of max_seq_len and 256 × max_batch_size
    Example: 65536
    """
    cache_mode: CacheMode | None = field(default=None, metadata=EXLLAMAV2)
    """Precision of the cache. A coarser cache takes less memory.

    Example: Q8
    """
    chunk_size: Tokens | None = field(default=None, metadata=BOTH)
    """Most prompt tokens that one step of the engine computes. For engine exllamav2, a multiple of 256.

    Default: 2048 for exllamav2, or the context where that is less
    Example: 1024
    """
    rope_scale: Factor | None = field(default=None, metadata=EXLLAMAV2)
    """Linear scaling of the rotary embedding: positions are divided by this number.

    A max_seq_len above the model's own context needs this or rope_alpha.

    Default: the model's own
    Example: 2.0
    """
    rope_alpha: Factor | None = field(default=None, metadata=EXLLAMAV2)
    """NTK scaling of the rotary embedding's base.

    Default: 1
    Example: 2.6
    """
    gpu_split: list[Annotated[float, Within(0, 1e6, above=True)]] | None = field(default=None, metadata=EXLLAMAV2)
    """GiB of weights on each GPU of the worker, in the order of the list ``gpu``.

    Default: the engine splits the layers automatically
    Example: [20, 22.5]
    """
    autosplit_reserve: list[Annotated[int, Within(0, 1 << 20)]] | None = field(default=None, metadata=EXLLAMAV2)
    """MiB that the automatic split leaves free on each GPU of the worker, in the order of the list ``gpu``.

    Default: 256 on each
    Example: [512, 96]
    """
    tensor_parallel: bool | None = field(default=None, metadata=EXLLAMAV2)
    """Split every layer over the worker's GPUs.

    It needs EXL2 weights of Llama, Mistral or Qwen2, and is slower than one GPU.

    Example: true
    """
    draft_model: UserPath | None = field(default=None, metadata=EXLLAMAV2)
    """Directory of a small model with the same vocabulary, for speculative decoding. Written like model_dir.

    Default: no speculation
    Example: ~/models/Llama-3.2-1B-exl2-4.0bpw
    """
    draft_cache_mode: CacheMode | None = field(default=None, metadata=EXLLAMAV2)
    """Precision of the draft model's cache.

    Default: the same as cache_mode
    Example: Q6
    """
    draft_rope_scale: Factor | None = field(default=None, metadata=EXLLAMAV2)
    """Linear scaling of the draft model's rotary embedding.

    Default: the draft model's own
    Example: 2.0
    """
    draft_rope_alpha: Factor | None = field(default=None, metadata=EXLLAMAV2)
    """NTK scaling of the draft model's rotary embedding.

    Default: 1
    Example: 2.6
    """
    draft_tokens: Annotated[int, Within(1, 16)] | None = field(default=None, metadata=EXLLAMAV2)
    """Tokens that are speculated in each step, with draft_model or ngram_draft.

    Example: 6
    """
    ngram_draft: bool | None = field(default=None, metadata=EXLLAMAV2)
    """Speculate from repetitions in the text, without a draft model.

    Example: true
    """
    lora: list[LoraConfig] | None = field(default=None, metadata=EXLLAMAV2)
    """LoRA adapters that apply to every request of the model.

    Default: none
    Example: [{dir: ~/loras/pirate, scaling: 1.0}]
    """
    graphs: bool | None = field(default=None, metadata=EXLLAMAV2)
    """Capture the steps of decoding as CUDA graphs when the model is loaded.

    This makes a model several times faster, and takes some 100 MB of GPU memory and a second of loading. A model that
    cannot be captured is served as with false. With false a seed gives another answer.

    Default: true
    Example: false
    """
    max_gap_ms: Annotated[int, Within(1, 60_000)] | None = field(default=None, metadata=EXLLAMAV2)
    """The longest pause of running answers while other prompts are read, in milliseconds.

    A lower limit gives smoother streams and reads prompts more slowly. It needs ``graphs``.

    Default: 30
    Example: 60
    """
    threads: Annotated[int, Within(1, 1024)] | None = field(default=None, metadata=ON_CPU)
    """CPU threads of each worker.

    Example: 4
    """
    task: Task | None = field(default=None, metadata=EMBEDDING)
    """What the model is for: ``embed`` (vectors of texts) or ``rerank`` (scores of documents).

    A language model such as Qwen3-Reranker needs ``rerank``.

    Default: what the directory says
    Example: rerank
    """
    pooling: Pooling | None = field(default=None, metadata=EMBEDDING)
    """How the vectors of a text's tokens become one: ``cls``, ``mean``, ``max``, ``mean_sqrt_len``, ``weightedmean`` or
    ``lasttoken``.

    A directory without a modules.json of sentence-transformers needs it. The vectors then get the length 1.

    Default: what the directory says
    Example: mean
    """
    batch_tokens: Tokens | None = field(default=None, metadata=EMBEDDING)
    """Most tokens that the engine computes at once. Shorter texts count as much as the longest one beside them.

    Default: 16384 on a GPU, 2048 on the CPU
    Example: 8192
    """
    replicas: Annotated[int, Within(1, 64)] = 1
    """Workers that serve this model, each with its own weights and cache, on the same ``gpu``.

    With ``gpu: auto`` each worker is placed on its own.

    Example: 2
    """
    max_queue: Annotated[int, Within(1, 100_000)] = _QUEUE.requests
    """Most requests that may wait for this model. Further ones are refused as ``overloaded``.

    Example: 64
    """
    max_queue_tokens: Annotated[int, Within(1, 1 << 30)] = _QUEUE.tokens
    """Most prompt tokens that may wait for this model. Four bytes of a prompt count as one token.

    Example: 1000000
    """
    sampling: dict[str, Any] | None = field(default=None, metadata=TOLD | TEXT)
    """Defaults for options that a request leaves out, by name.

    [Options of a request](http-api.md#options-of-a-request) says which options may stand here, in ``forced`` and in
    ``limits``. ``preset: steady`` keeps small models from repeating themselves.

    Default: the neutral defaults of the options
    Example: {preset: steady, temperature: 0.7, max_tokens: 512}
    """
    forced: dict[str, Any] | None = field(default=None, metadata=TOLD | TEXT)
    """Values of options that count for every request, whatever the request asks for.

    The header ``x-modelctl-changed`` of an answer names the values of the request that they have replaced.

    Default: requests choose
    Example: {temperature: 0.7, repetition_penalty: 1.0}
    """
    limits: dict[str, Any] | None = field(default=None, metadata=TOLD | TEXT)
    """Limits that a request may not exceed, by the option's name. ``prompt_tokens`` limits the length of the prompt.

    A request beyond a limit is refused. A request without max_tokens gets the limit of max_tokens.

    Default: no limits
    Example: {max_tokens: 2048, prompt_tokens: 8192, temperature: 1.5}
    """
    chat_template: UserPath | None = field(default=None, metadata=BOTH)
    """The chat template for all conversations, in place of the one that the model's directory has.

    A value with ``/`` or with ``.jinja`` at its end is a file, which must have the same path on all machines of a
    ``cluster``. Any other value is the name of a template in tokenizer_config.json.

    Default: the template of the model's directory
    Example: templates/chatml.jinja
    """
    template_kwargs: dict[str, Any] | None = field(default=None, metadata=TEXT)
    """Variables of the chat template, for conversations that do not set them.

    Default: none
    Example: {enable_thinking: false}
    """
    description: Description = field(default=None, metadata={ONE: "is the description of one model; write it"})
    """The purpose of the model, which `modelctl status`, the page and GET /v1/models show.

    Default: none
    Example: "for code: slow, and the best that we have"
    """
    aliases: list[str] = field(default_factory=list, metadata={ONE: "are names of one model; write them"})
    """Further names of the model, of letters, digits, ``.``, ``_``, ``-``, ``/`` and ``:``. A name belongs to one model
    only, and may be neither that of a variant (``NAME:VARIANT``) nor that of a worker (``NAME:2``).

    Example: [gpt-4o-mini, claude-local, "llama3.2:latest"]
    """
    variants: dict[str, VariantConfig] = field(default_factory=dict)
    """Settings under names of their own, such as ``qwen:precise``. The workers are the model's own.

    Example: {precise: {sampling: {temperature: 0.2}}}
    """
    listed: bool = True
    """Show the model's names to clients that ask which models there are.

    With ``false``, requests that name the model are served all the same. Only ``--models`` of a key protects models.

    Example: false
    """
    tool_format: ToolFormat = field(default=None, metadata=TOLD | TEXT)
    """The format in which the model writes calls of tools. ``off``: the model does not call tools.

    [Formats of calls](http-api.md#formats-of-calls) names them all, such as ``hermes``, ``llama3`` and ``json``.

    Default: the format that the chat template shows
    Example: hermes
    """
    reasoning: Reasoning = field(default=None, metadata=TOLD | TEXT)
    """The markers between which the model writes its reasoning. ``off``: the model does not reason.

    Default: the markers that the chat template shows
    Example: {start: <think>, end: </think>}
    """
    step_timeout: Lease | None = field(default=None, metadata=WORKERS)
    """Longest time for one step of the engine. After it the supervisor kills the worker as hung.

    Default: the value of supervisor.watch.step
    Example: 2m
    """
    load_timeout: Lease | None = None
    """Longest time for one part of a load, such as one module of the weights.

    Default: the value of supervisor.watch.load
    Example: 10m
    """
    autostart: bool | None = None
    """Start the model with the supervisor.

    Default: true, and false for a lazy model
    Example: false
    """
    lazy: bool = False
    """Start the model with its first request. An idle lazy model makes room for other models.

    Example: true
    """
    ttl: Ttl = field(default=None, metadata=LAZY)
    """For a lazy model: unload it after this time without a request.

    Default: never
    Example: 10m
    """
    sleep: Sleep = field(default="ram", metadata=LAZY)
    """For a lazy model: what becomes of it when another model needs its GPU memory, and after ``sleep_after``.

    ``ram``: it [goes to sleep](operate.md#models-that-sleep), if its engine can. ``off``: it is unloaded.

    Example: off
    """
    sleep_after: Ttl = field(default=None, metadata=LAZY)
    """For a lazy model: put it to sleep after this time without a request.

    Default: never
    Example: 2m
    """
    sleep_cache: HostMemory = field(default=None, metadata=EXLLAMAV2 | LAZY)
    """For a lazy model: host memory that keeps cached prompts while the model sleeps.

    Default: none is kept
    Example: 4GiB
    """
    pinned: bool = field(default=False, metadata=LAZY)
    """For a lazy model: keep it loaded, also when another model needs its GPU memory.

    Example: true
    """
    priority: Annotated[int, Within(-1000, 1000)] = field(default=0, metadata=LAZY)
    """For a lazy model: models of lower priority make room first.

    Example: 10
    """
    options: dict[str, Any] | None = field(default=None, metadata=WORKERS)
    """Settings of an engine that is named by an import string.

    Default: none
    Example: {rate: 100}
    """

    @property
    def together(self) -> int:
        """Return the most requests that a worker computes together."""
        return EMBEDDED_TOGETHER if self.engine == "embedding" else self.max_batch_size

    @property
    def gpu_count(self) -> int:
        """Return the number of GPUs of every worker; 0 for a model on the CPU."""
        if self.gpu in (None, "cpu"):
            return 0
        return len(self.gpu) if isinstance(self.gpu, tuple) else self.gpus


@cache
def marked(kind: type[Any], mark: str) -> tuple[str, ...]:
    """Return the keys of a section whose metadata have a mark. ``kind``: the dataclass of the section."""
    return tuple(key.name for key in fields(kind) if key.metadata.get(mark))


ENGINE_KEYS: Final[Mapping[str, frozenset[str]]] = {
    engine: frozenset(key.name for key in fields(ModelConfig) if engine in key.metadata.get("engines", ()))
    for engine in ENGINES
}
"""Keys that only some engines know. An engine named by an import string takes ``options`` instead."""


# Lay the section ``defaults`` of a models.yaml beneath the keys of its models. Pure.
#
# A model's own key wins, also if its value is null, which stands for the key's default. Maps of options are merged by
# their keys. A key that means nothing for a model is not laid beneath it: a file may hold models of several engines,
# and models that are lazy and others.


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
    engine = whole.get("engine") or ModelConfig.engine
    of_engines = frozenset[str]().union({"options"}, *ENGINE_KEYS.values())
    without = of_engines - ENGINE_KEYS.get(engine, {"options"}) if isinstance(engine, str) else of_engines
    lazy = whole.get("lazy")
    if (lazy.unquoted if isinstance(lazy, Quoted) else lazy) is not True:
        without |= {*marked(ModelConfig, "lazy")}
    if engine == "embedding":
        without |= {*marked(ModelConfig, "text")}
    return [key for key in defaults if key not in without]


def _lay(source: YamlSource, below: dict[str, Any], path: KeyPath, key: str, value: Any) -> None:
    if key not in below:
        below[key] = value
        source.moved[*path, key] = (SECTION, key)
    elif key in MERGED and isinstance(own := below[key], dict) and isinstance(value, dict):
        more = {part: what for part, what in value.items() if part not in own}
        below[key] = {**own, **more}
        source.moved |= {(*path, key, part): (SECTION, key, part) for part in more}
