"""Read the options of engine exllamav2 from models.yaml, and check them. Does not import torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_worker.engine import JOB_OPTIONS, LoadError
from model_worker.engines.model_dir import ModelDir, Options
from protocol.process.worker_spec import PAGE_TOKENS, EngineSpec
from protocol.request import SamplingParams
from protocol.values import hints_of

CACHE_MODES = ("FP16", "Q8", "Q6", "Q4")
DEFAULT_DRAFT_TOKENS = 4
MAX_DRAFT_TOKENS = 16
DEFAULT_CHUNK_SIZE = 2048
DEFAULT_MAX_GAP_MS = 30

OFFERED = frozenset(hints_of(SamplingParams)) | JOB_OPTIONS | {"negative_prompt"}
"""Options of a request that the engine offers. Guidance needs two sequences per job, so it excludes speculation."""
GUIDANCE = frozenset({"cfg_scale", "negative_prompt"})

_KEYS = (
    "cache_mode", "cache_size", "chunk_size", "rope_scale", "rope_alpha", "gpu_split", "autosplit_reserve",
    "tensor_parallel", "draft_model", "draft_cache_mode", "draft_rope_scale", "draft_rope_alpha", "draft_tokens",
    "ngram_draft", "lora", "graphs", "max_gap_ms", "sleep_cache", "chat_template",
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its directory, and a factor by which its contribution is multiplied."""

    directory: str
    scaling: float = 1.0


@dataclass(frozen=True)
class ExLlamaV2Options:
    """The engine's own keys of models.yaml. Sizes are in tokens.

    cache_size                          all sequences together, a multiple of 256; None: room for one full context, and
                                        at least a page for every request of a batch
    cache_mode                          FP16, Q8, Q6 or Q4
    chunk_size                          prompt tokens computed at a time, a multiple of 256; None: 2048, or the context
                                        if that is less
    rope_scale                          positions are divided by it; None: as the model says
    rope_alpha                          NTK scaling of the rotary base; None: 1
    gpu_split                           GB (2**30) of weights and buffers per GPU of the worker; None: several GPUs are
                                        split automatically
    autosplit_reserve                   MB (2**20) per GPU that the automatic split leaves free; None: 256 each
    tensor_parallel                     split every layer over the GPUs, instead of giving whole layers to them
    draft_model                         directory of a small model of the same vocabulary that speculates; None: none
    draft_cache_mode                    None: cache_mode
    draft_rope_scale, draft_rope_alpha  like rope_scale and rope_alpha, for the draft model
    draft_tokens                        tokens speculated per step
    ngram_draft                         speculate from repetitions in the text, without a model
    loras                               adapters that are applied to every request
    graphs                              capture decode steps as CUDA graphs, where that is possible
    max_gap_ms                          longest pause of running answers while prompts are read, in milliseconds
    chat_template                       absolute path of a file, or a name in tokenizer_config.json; None: the model's
    sleep_cache                         bytes of host memory for cached pages while the model sleeps
    """

    cache_size: int | None = None
    cache_mode: str = "FP16"
    chunk_size: int | None = None
    rope_scale: float | None = None
    rope_alpha: float | None = None
    gpu_split: tuple[float, ...] | None = None
    autosplit_reserve: tuple[int, ...] | None = None
    tensor_parallel: bool = False
    draft_model: str | None = None
    draft_cache_mode: str | None = None
    draft_rope_scale: float | None = None
    draft_rope_alpha: float | None = None
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    ngram_draft: bool = False
    loras: tuple[Adapter, ...] = ()
    graphs: bool = True
    max_gap_ms: int = DEFAULT_MAX_GAP_MS
    sleep_cache: int = 0
    chat_template: str | None = None

    @property
    def speculates(self) -> bool:
        return self.ngram_draft or self.draft_model is not None


SCORED_LOGITS = 1 << 23
"""Logits of a prompt that are computed at once, for its log-probabilities: 65 places of a vocabulary of 128,256 ids."""


def offered(*, speculates: bool, tensor_parallel: bool) -> frozenset[str]:
    """Return the options that a request may have (``Capabilities.offered``).

    speculates       whether the model has a draft model or drafts by n-grams
    tensor_parallel  whether each layer is split over several GPUs: no GPU then has a prompt's hidden states
    """
    left_out = GUIDANCE if speculates else frozenset[str]()
    return OFFERED - left_out - ({"prompt_logprobs"} if tensor_parallel else frozenset[str]())


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, in tokens.

    context     prompt and answer of one request together
    chunk_size  prompt tokens computed at a time
    cache_size  all requests together
    rows        tokens that one step of a full batch computes: each request's last token, and those speculated behind it
    positions   positions in the model's tables: speculation goes beyond the context, and loading computes a full chunk
    """

    context: int
    chunk_size: int
    cache_size: int
    rows: int
    positions: int


def sizes_of(spec: EngineSpec, options: ExLlamaV2Options, directory: ModelDir) -> Sizes:
    """Return the sizes, with defaults filled in. Raises LoadError for sizes that contradict each other."""
    stretched = options.rope_scale is not None or options.rope_alpha is not None
    context, batch = directory.context(spec.max_seq_len, stretched=stretched), spec.max_batch_size
    speculated = options.draft_tokens if options.speculates else 0
    padded = -(-(context + speculated) // PAGE_TOKENS) * PAGE_TOKENS
    chunk_size = options.chunk_size or min(DEFAULT_CHUNK_SIZE, -(-context // PAGE_TOKENS) * PAGE_TOKENS)
    cache_size = options.cache_size or max(padded, batch * PAGE_TOKENS)
    if cache_size < padded:
        tokens = f"{context} tokens" + (f" and {speculated} speculated ones" if speculated else "")
        raise LoadError(
            f"cache_size is {cache_size}, less than the context of {tokens}: set max_seq_len to at most "
            f"{cache_size - speculated}, or cache_size to at least {padded}",
            key="cache_size",
        )
    if chunk_size > cache_size:
        message = f"chunk_size is {chunk_size}, more than cache_size, which is {cache_size}: lower it"
        raise LoadError(message, key="chunk_size")
    rows = batch * (speculated + 1)
    if rows > chunk_size:
        raise LoadError(
            f"max_batch_size is {batch}"
            + (f", each with {speculated} speculated tokens" if speculated else "")
            + f": {rows} tokens a step, which must be at most chunk_size, {chunk_size}",
            key="max_batch_size",
        )
    return Sizes(context, chunk_size, cache_size, rows, max(context + speculated, chunk_size))


def read_options(spec: EngineSpec) -> ExLlamaV2Options:
    """Return the options of a spec.

    Raises LoadError in one line for an unknown key, a wrong value, or two options that exclude each other.
    """
    given = spec.options
    options = Options("exllamav2", given, _KEYS)
    if not spec.device.startswith("cuda"):
        message = f"engine exllamav2 needs a CUDA device, not {spec.device}: set gpu, or engine: transformers"
        raise LoadError(message, key="gpu")
    draft_cache_mode = None
    if "draft_cache_mode" in given:
        draft_cache_mode = options.choice("draft_cache_mode", "FP16", CACHE_MODES)
    read = ExLlamaV2Options(
        cache_size=_size(options, given, "cache_size"),
        cache_mode=options.choice("cache_mode", "FP16", CACHE_MODES),
        chunk_size=_size(options, given, "chunk_size"),
        rope_scale=_number(given, "rope_scale"),
        rope_alpha=_number(given, "rope_alpha"),
        gpu_split=_numbers(given, "gpu_split"),
        autosplit_reserve=_reserve(given),
        tensor_parallel=_flag(given, "tensor_parallel"),
        draft_model=_text(given, "draft_model"),
        draft_cache_mode=draft_cache_mode,
        draft_rope_scale=_number(given, "draft_rope_scale"),
        draft_rope_alpha=_number(given, "draft_rope_alpha"),
        draft_tokens=options.integer("draft_tokens", DEFAULT_DRAFT_TOKENS),
        ngram_draft=_flag(given, "ngram_draft"),
        loras=_adapters(given),
        graphs=_flag(given, "graphs", default=True),
        max_gap_ms=options.integer("max_gap_ms", DEFAULT_MAX_GAP_MS),
        sleep_cache=options.integer("sleep_cache", 0, minimum=0),
        chat_template=options.text("chat_template"),
    )
    _check_together(read, given)
    return read


def _check_together(read: ExLlamaV2Options, given: Mapping[str, Any]) -> None:
    """Raise LoadError for options that are valid alone but contradict each other."""
    if read.ngram_draft and read.draft_model:
        raise LoadError("draft_model and ngram_draft both speculate: keep one of them", key="ngram_draft")
    if read.draft_tokens > MAX_DRAFT_TOKENS:
        message = f"draft_tokens is {read.draft_tokens}: it must be at most {MAX_DRAFT_TOKENS}"
        raise LoadError(message, key="draft_tokens")
    if not read.speculates and "draft_tokens" in given:
        message = "draft_tokens is set, but nothing speculates: add draft_model or ngram_draft, or remove it"
        raise LoadError(message, key="draft_tokens")
    if not read.draft_model:
        for key in ("draft_cache_mode", "draft_rope_scale", "draft_rope_alpha"):
            if key in given:
                raise LoadError(f"{key} is set without draft_model: add draft_model, or remove it", key=key)
    if read.gpu_split and read.autosplit_reserve:
        message = "autosplit_reserve is for the automatic split, gpu_split turns that off: keep one of them"
        raise LoadError(message, key="autosplit_reserve")
    if read.tensor_parallel and read.autosplit_reserve:
        message = "autosplit_reserve is for layers split among GPUs: remove it, or tensor_parallel"
        raise LoadError(message, key="autosplit_reserve")


def _size(options: Options, given: Mapping[str, Any], key: str) -> int | None:
    return options.integer(key, 0, minimum=PAGE_TOKENS, multiple_of=PAGE_TOKENS) if key in given else None


def _wrong(key: str, value: object, must: str) -> LoadError:
    return LoadError(f"option {key} of engine exllamav2 is {value!r}: it must be {must}", key=key)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _number(given: Mapping[str, Any], key: str) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if not _is_number(value):
        raise _wrong(key, value, "a number above 0")
    return float(value)


def _numbers(given: Mapping[str, Any], key: str) -> tuple[float, ...] | None:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value or not all(map(_is_number, value)):
        raise _wrong(key, value, "a list of numbers above 0, one for each GPU")
    return tuple(map(float, value))


def _reserve(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = given.get("autosplit_reserve")
    if value is None:
        return None
    if (
        not isinstance(value, (list, tuple))
        or not value
        or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value)
    ):
        raise _wrong("autosplit_reserve", value, "a list of whole megabytes, one for each GPU")
    return tuple(value)


def _flag(given: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise _wrong(key, value, "a directory")
    return value


def _adapters(given: Mapping[str, Any]) -> tuple[Adapter, ...]:
    must = "a list of {dir: DIRECTORY, scaling: NUMBER}"
    value = given.get("lora") or []
    if not isinstance(value, (list, tuple)):
        raise _wrong("lora", value, must)
    adapters = []
    for entry in value:
        if not isinstance(entry, Mapping) or not {"dir"} <= set(entry) <= {"dir", "scaling"}:
            raise _wrong("lora", value, must)
        directory, scaling = entry["dir"], entry.get("scaling", 1.0)
        number = isinstance(scaling, (int, float)) and not isinstance(scaling, bool) and math.isfinite(scaling)
        if not isinstance(directory, str) or not number:
            raise _wrong("lora", value, must)
        adapters.append(Adapter(directory, float(scaling)))
    return tuple(adapters)
