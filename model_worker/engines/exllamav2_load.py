"""Getting ExLlamaV2 and a model into memory: what is refused before it starts, and which attention it gets.

exllamav2 is imported in here and nowhere else, late: it initialises CUDA, and what it finds under the name flash_attn
at that moment decides whether it can batch.
"""

import importlib
import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from model_worker.engine import LoadError, ProgressCallback
from model_worker.engines import one_line, paged_attention
from model_worker.engines.exllamav2_options import PAGE, ExLlamaV2Options
from model_worker.engines.model_dir import ModelDir
from protocol.worker_spec import EngineSpec

DEFAULT_CHUNK_SIZE = 2048

_CACHES = {
    "FP16": "ExLlamaV2Cache",
    "Q8": "ExLlamaV2Cache_Q8",
    "Q6": "ExLlamaV2Cache_Q6",
    "Q4": "ExLlamaV2Cache_Q4",
}

# The package loads an architecture that it does not know as Llama, after a line on stdout.
ARCHITECTURES = frozenset(
    {
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "DbrxForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmoeForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "IndexForCausalLM",
        "InternLM2ForCausalLM",
        "LlamaForCausalLM",
        "MiniCPMForCausalLM",
        "MistralForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MixtralForCausalLM",
        "OrionForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Starcoder2ForCausalLM",
        "YiForCausalLM",
    }
)


@dataclass(frozen=True)
class Package:
    """The imported package, and which attention it uses (for people)."""

    core: Any
    generator: Any
    attention: str


def check_directory(directory: ModelDir) -> None:
    """Raise LoadError for a model that the package would refuse with an assertion, or load wrongly without a word."""
    name = directory.architecture
    if name not in ARCHITECTURES:
        raise LoadError(f"architecture {name} is not one that ExLlamaV2 0.3.2 knows (it would be computed as Llama)")
    if directory.quantization not in (None, "exl2", "gptq"):
        raise LoadError(
            f"{directory.path} is quantized as {directory.quantization}: ExLlamaV2 loads EXL2, GPTQ (4 bit) and plain "
            "16-bit or 32-bit weights"
        )
    config = directory.text_config
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta")
        flat = config.get("rope_theta", directory.config.get("rope_theta"))
        scaling = config.get("rope_scaling") or directory.config.get("rope_scaling")
        if theta != flat or (kind != "default" and not scaling):
            raise LoadError(
                f"{directory.path}/config.json keeps its rotary embedding in rope_parameters (transformers 5), which "
                f"ExLlamaV2 does not read: write rope_theta ({theta}) at the top level"
                + (f", and rope_scaling with rope_type {kind}" if kind != "default" else "")
            )
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") and scaling.get("rope_type"):
        raise LoadError(f"{directory.path}/config.json: rope_scaling has both type and rope_type: remove type")


def import_package() -> Package:
    """Import exllamav2, with flash-attn where it works and PyTorch's attention in its place where it does not.

    Raises LoadError in one line for whatever is missing.
    """
    if not __debug__:
        raise LoadError("ExLlamaV2 checks its input with assertions: do not run Python with -O or PYTHONOPTIMIZE")
    if not torch.cuda.is_available():
        raise LoadError("no CUDA device is visible to this process: ExLlamaV2 needs one")
    os.environ.setdefault("EXLLAMA_NO_XFORMERS", "1")  # unused, and a build for another torch would break the import
    attention = _choose_attention()
    try:
        core = importlib.import_module("exllamav2")
        generator = importlib.import_module("exllamav2.generator")
    except ModuleNotFoundError as e:
        raise LoadError(f"engine exllamav2 needs the package {e.name}: pip install 'modelctl[exllamav2]'") from e
    except Exception as e:  # its import may run a compiler
        raise LoadError(f"exllamav2 cannot be imported: {type(e).__name__}: {one_line(e)}") from e
    return Package(core, generator, attention)


def _choose_attention() -> str:
    """Leave ``flash_attn`` as it is if it works here, else replace it. Which one it is, for people."""
    # this variable makes the package do without any paged attention; here it only chooses
    switched_off = os.environ.pop("EXLLAMA_NO_FLASH_ATTN", None) is not None
    old = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) < (8, 0)]
    if paged_attention.is_installed():
        return paged_attention.NAME
    if switched_off:
        why = "flash-attn is switched off"
    elif importlib.util.find_spec("flash_attn") is None:
        why = "flash-attn is not installed"
    elif old:
        why = "flash-attn needs an Ampere GPU or later"
    else:
        try:
            version = str(importlib.import_module("flash_attn").__version__)
            importlib.import_module("flash_attn_2_cuda")
            if [int(part) for part in version.split(".")[:3] if part.isdigit()] >= [2, 5, 7]:
                return f"flash-attn {version}, paged"
            why = f"flash-attn {version} is older than 2.5.7"
        except Exception as e:  # a build for another torch: the package would not survive the import
            why = f"flash-attn does not load: {one_line(e)}"
    paged_attention.install()
    return f"{paged_attention.NAME}; {why}"


@dataclass(frozen=True)
class Loaded:
    """A model in memory, with what a generator is made of.

    core, generator   the package's modules exllamav2 and exllamav2.generator
    attention         how attention is computed, for people
    model, cache, tokenizer  the package's objects
    draft_model, draft_cache None without a draft model
    draft_tokens      tokens speculated per step; 0: no speculation
    ngram             speculate from n-grams of the text
    loras             the package's adapters, loaded
    context           tokens of prompt and answer together
    chunk_size        prompt tokens computed at a time
    cache_size        tokens of all sequences together, a multiple of 256
    devices           GPUs used, as the process counts them
    """

    core: Any
    generator: Any
    attention: str
    model: Any
    cache: Any
    tokenizer: Any
    context: int
    chunk_size: int
    cache_size: int
    draft_model: Any = None
    draft_cache: Any = None
    draft_tokens: int = 0
    ngram: bool = False
    loras: list[Any] = field(default_factory=list)
    devices: list[int] = field(default_factory=lambda: [0])


def load(spec: EngineSpec, options: ExLlamaV2Options, directory: ModelDir, progress: ProgressCallback) -> Loaded:
    """Load onto the visible GPUs. Raises LoadError; progress counts the model's modules."""
    check_directory(directory)
    context, batch = directory.context(spec.max_seq_len), spec.max_batch_size
    padded = -(-context // PAGE) * PAGE
    chunk_size = options.chunk_size or min(DEFAULT_CHUNK_SIZE, padded)
    cache_size = options.cache_size or max(padded, batch * PAGE)
    if cache_size < padded:
        raise LoadError(
            f"cache_size is {cache_size}, less than the context of {context} tokens: "
            f"set max_seq_len to at most {cache_size}, or cache_size to at least {padded}"
        )
    if batch > chunk_size:
        raise LoadError(f"max_batch_size is {batch}: it must be at most chunk_size, which is {chunk_size}")
    package = import_package()
    model, cache, tokenizer = _load_model(
        package, directory, context, chunk_size, options.cache_mode, cache_size, progress
    )
    return Loaded(
        package.core, package.generator, package.attention, model, cache, tokenizer, context, chunk_size, cache_size
    )


def make_generator(loaded: Loaded, max_batch_size: int) -> Any:
    """The package's ExLlamaV2DynamicGenerator over what is loaded, with adapters set and an empty page table."""
    generator = loaded.generator.ExLlamaV2DynamicGenerator(
        model=loaded.model,
        cache=loaded.cache,
        tokenizer=loaded.tokenizer,
        draft_model=loaded.draft_model,
        draft_cache=loaded.draft_cache,
        num_draft_tokens=loaded.draft_tokens,
        use_ngram_draft=loaded.ngram,
        max_batch_size=max_batch_size,  # the default takes a gigabyte of logits
        max_chunk_size=loaded.chunk_size,
        max_q_size=loaded.draft_tokens + 1,  # of a step: the last token, and those speculated behind it
        paged=True,
    )
    if loaded.loras:
        generator.set_loras(loaded.loras)
        generator.reset_page_table()  # cached pages would be taken for this adapter's
    return generator


def _load_model(
    package: Package, directory: ModelDir, context: int, chunk_size: int, cache_mode: str, cache_size: int,
    progress: ProgressCallback,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(model, cache, tokenizer) on the first visible GPU. Sizes in tokens. Raises LoadError.

    progress counts the model's modules.
    """
    core = package.core
    config = core.ExLlamaV2Config()
    config.model_dir = str(directory.path)
    try:
        config.prepare()
        config.arch_compat_overrides(quiet=True)
    except (AssertionError, ValueError, KeyError, TypeError) as e:
        raise LoadError(f"{directory.path} cannot be loaded: {one_line(e)}") from e
    if config.no_flash_attn:
        raise LoadError(
            f"architecture {directory.architecture} is computed without paged attention only: not supported"
        )
    if cache_mode != "FP16" and config.head_dim % 32:
        raise LoadError(
            f"cache_mode {cache_mode} needs heads of a multiple of 32, they are {config.head_dim}: use FP16"
        )
    # the tables of positions have exactly this length and are read without a check: admission keeps to it
    config.max_seq_len = context
    config.max_input_len = chunk_size
    config.max_attention_size = chunk_size**2
    free = torch.cuda.mem_get_info()[0]
    try:
        tokenizer = core.ExLlamaV2Tokenizer(config)
        model = core.ExLlamaV2(config)
        model.load(callback=lambda done, total: progress("loading", done, total))
        cache = getattr(core, _CACHES[cache_mode])(model, batch_size=1, max_seq_len=cache_size)
    except torch.OutOfMemoryError:
        raise LoadError(
            f"not enough VRAM: {_gib(free)} were free, the weights take {_gib(directory.weight_bytes)} and the "
            f"{cache_mode} cache of {cache_size} tokens comes on top: use a smaller cache_size, cache_mode or model"
        ) from None
    except (AssertionError, ValueError, KeyError, TypeError) as e:
        raise LoadError(f"{directory.path} cannot be loaded: {one_line(e)}") from e
    # built at the first token otherwise, in the middle of the first answer
    tokenizer.get_id_to_piece_list(True)
    tokenizer.get_id_to_piece_list(False)
    return model, cache, tokenizer


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
