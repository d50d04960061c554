"""Getting ExLlamaV2 and a model into memory: what is refused before it starts, and which attention it gets.

exllamav2 is imported in here and nowhere else, late: it initialises CUDA, and what it finds under the name flash_attn
at that moment decides whether it can batch.
"""

import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from model_worker.engine import LoadError, ProgressCallback
from model_worker.engines import one_line, paged_attention
from model_worker.engines.model_dir import ModelDir

PAGE = 256
"""Tokens of a page of the cache, fixed by ExLlamaV2."""

CACHE_MODES = {
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


def load_model(
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
        cache = getattr(core, CACHE_MODES[cache_mode])(model, batch_size=1, max_seq_len=cache_size)
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
