"""Load ExLlamaV2 and a model.

``exllamav2.check`` has refused every model that is known to fail before. This module also checks the GPUs' free memory
(``vram``).
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import IO, Any

import torch

from model_worker.engine import LoadError, ProgressCallback
from model_worker.engines import check_installed, one_line
from model_worker.engines.exllamav2 import extension, vram
from model_worker.engines.exllamav2.check import CheckedExLlamaV2Model, check_parallel, obstacle_before_loading
from model_worker.engines.exllamav2.lora import load_adapters
from model_worker.engines.exllamav2.meaning import layer_kinds
from model_worker.engines.exllamav2.options import DEFAULT_MAX_GAP_MS, ExLlamaV2Options, Sizes
from model_worker.engines.exllamav2.package_model import compute_as_transformers, only_the_models_weights, replaced
from model_worker.engines.exllamav2.quantised_cache import is_quantised, store_once
from model_worker.engines.exllamav2.sleep import NoSleepError, SleepMemory, obstacle
from model_worker.engines.model_dir import ModelDir, bytes_of_modules, read_shape
from model_worker.engines.paged import attention as paged_attention
from model_worker.engines.tokenizer import Tokenizer
from model_worker.engines.vetting import understood
from model_worker.text import Pieces
from protocol.process.worker_spec import DEFAULT_RESERVE_MB, PAGE_TOKENS, install_command

# Import exllamav2, and choose the attention that it uses.
#
# Whether the package can batch depends on the module flash_attn that it finds when it is imported. So this module puts
# the right flash_attn in place and then imports the package. No other module imports the package before.


@dataclass(frozen=True)
class Package:
    """The imported package, and the name of the attention that it uses (for people)."""

    core: Any
    generator: Any
    attention: str


def import_package(progress: ProgressCallback = lambda *_: None) -> Package:
    """Import exllamav2, with flash-attn where that works, and with PyTorch's attention in its place elsewhere.

    Compile the package's extension first if that has not been done. Raises LoadError in one line for whatever is
    missing.
    """
    if not __debug__:
        raise LoadError("ExLlamaV2 checks its input with assertions: do not run Python with -O or PYTHONOPTIMIZE")
    check_installed("exllamav2")
    if not torch.cuda.is_available():
        raise LoadError(
            "no CUDA device is visible to this process: ExLlamaV2 needs one; see whether nvidia-smi finds it, and "
            f"whether torch {torch.__version__} is a CUDA build"
        )
    os.environ.setdefault("EXLLAMA_NO_XFORMERS", "1")  # unused, and a build for another torch would break the import
    if "exllamav2" not in sys.modules:
        _load_extension(progress)
    attention = _choose_attention()
    try:
        core = importlib.import_module("exllamav2")
        generator = importlib.import_module("exllamav2.generator")
    except ModuleNotFoundError as e:  # exllamav2 is there (check_installed), but a package that it needs is not
        message = f"engine exllamav2 needs the package {e.name}: run {install_command('exllamav2')}"
        raise LoadError(message) from e
    except Exception as e:
        raise LoadError(f"exllamav2 cannot be imported: {type(e).__name__}: {one_line(e)}") from e
    return Package(core, generator, attention)


def _load_extension(progress: ProgressCallback) -> None:
    """Import the compiled extension under the name where the package looks first, so that the package never
    compiles."""
    phases = {"waiting": "waiting for a compiler", "build": "compiling ExLlamaV2"}
    try:
        extension.ensure(lambda phase, done, total: progress(phases[phase], done, total, "steps"))
        if importlib.util.find_spec("exllamav2"):
            extension.import_built()
    except extension.ExtensionError as e:
        raise LoadError(str(e)) from None


def _choose_attention() -> str:
    """Leave ``flash_attn`` unchanged if it works here, else replace it. Return a name of the attention for people."""
    # With this variable the package uses no paged attention at all. Here the variable only chooses between two kinds.
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
        except Exception as e:  # a build for another torch: importing the package with it would fail
            why = f"flash-attn does not load: {one_line(e)}"
    paged_attention.install()
    return f"{paged_attention.NAME}; {why}"


def check_attention(package: Package, directory: ModelDir, gpus: int, progress: ProgressCallback) -> str:
    """Try the attention of this model on each GPU. Return, for people, its name, and why it is not flash-attn."""
    if not paged_attention.is_installed():
        return package.attention
    shape, config = read_shape(directory), directory.text_config
    # the package's window does not count the token itself (``package_model``)
    window = config["sliding_window"] - 1 if any(layer_kinds(directory)) else None
    softcap = config.get("attn_logit_softcapping")
    found = ""
    for index in range(gpus):
        progress("compiling attention", index, gpus)
        for size in [window, -1] if isinstance(window, int) else [-1]:  # some models have layers of both kinds
            found = paged_attention.check(
                torch.device("cuda", index),
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                window=size,
                softcap=float(softcap or 0.0),
            )
    progress("compiling attention", gpus, gpus)
    return found + package.attention.removeprefix(paged_attention.NAME)


# Mixtures of 128 experts, which ExLlamaV2's fused function computes wrongly for more than one row.
#
# The fused function (exllamav2_ext/cuda/q_mlp.cu, ``QMoEMLP::forward_``) copies the routing weights of row 0 to the
# host, and launches only the experts that row 0 chose. It skips the experts that only later rows chose, and reports
# nothing. The package calls the function for 2 to 4 rows (moe_mlp.py, ``forward``). The rows are all tokens of one
# forward pass: those of two concurrent streams, speculated tokens, or the last tokens of a prompt.
#
# With one row the function is right. With 4, 8 or 16 experts it launches every expert, and is right for up to 4 rows.


EXPERTS = 128
"""The number of experts for which the fused function reads the routing of row 0 only."""
ROW_BY_ROW = 64
"""The most rows for which the fused function is called once per row. More rows take the package's PyTorch code, which
waits for the GPU 128 times per layer or more, whatever the number of rows. benchmarks/mixture.py measures both: on an
H200, one layer of Qwen3-30B-A3B takes 2.5 ms instead of 16 ms for 8 rows, and 20 ms instead of 30 ms for 64 rows."""


def keep_rows_apart() -> None:
    """Make the package compute mixtures of 128 experts correctly in all models of this process, draft models included.

    A second call changes nothing.
    """
    module: Any = importlib.import_module("exllamav2.moe_mlp")
    if hasattr(module, "modelctl_original"):
        return
    original = module.modelctl_original = module.ExLlamaV2MoEMLP.forward

    def forward(
        layer: Any,
        hidden_states: Any,
        cache: Any = None,
        attn_params: Any = None,
        past_len: Any = None,
        intermediates: bool = False,
        loras: Any = None,
        **kwargs: Any,
    ) -> Any:
        rows = hidden_states.shape[0] * hidden_states.shape[1]
        given = (cache, attn_params, past_len, intermediates, loras)
        # The fused function is right for other numbers of experts, and for one row. In the other three cases the
        # package never calls it.
        if layer.num_experts != EXPERTS or rows == 1 or layer.q_handle is None or intermediates or loras:
            return original(layer, hidden_states, *given, **kwargs)
        if rows > ROW_BY_ROW:
            return layer.forward_torch(hidden_states, *given, **kwargs)
        # The fused function adds its result to the row in place, so the rows have to be views.
        for row in hidden_states.view(rows, 1, 1, hidden_states.shape[-1]):
            original(layer, row, *given, **kwargs)
        return hidden_states

    module.ExLlamaV2MoEMLP.forward = forward


# Make the package's tokenizer from ours, so that a vocabulary is read once. Reading one of 128,256 ids takes the
# package longer than the weights of a small model.
#
# The package would parse tokenizer.json twice more and have each id decoded alone. The result is the same: a test
# compares it with what the package reads by itself.


def make_tokenizer(core: Any, config: Any, ours: Tokenizer) -> Any:
    """Return the package's ExLlamaV2Tokenizer of a model, with the lists that its generator needs.

    core    the package's module exllamav2
    config  the package's configuration of the model
    ours    the tokenizer of the same directory
    """
    library = ours.library
    added = [
        {"id": token, "content": known.content, "special": known.special}
        for token, known in library.get_added_tokens_decoder().items()
    ]

    def load(file: IO[str]) -> Any:
        return {"added_tokens": added} if file.name.endswith("/tokenizer.json") else json.load(file)

    with (
        replaced("exllamav2.tokenizer.hf", "Tokenizer", SimpleNamespace(from_file=lambda path: library)),
        replaced("exllamav2.tokenizer.tokenizer", "json", SimpleNamespace(load=load)),
    ):
        tokenizer = core.ExLlamaV2Tokenizer(config)
    if ours.pieces is not None:
        tokenizer.tokenizer_model.vocab = _texts(ours.pieces, library.get_vocab_size())
        tokenizer.id_to_ord = []  # the next calls would make this list, too, and nothing reads it
    # Otherwise these lists are made at the first token, in the middle of the first answer.
    tokenizer.get_id_to_piece_list(True)
    tokenizer.get_id_to_piece_list(False)
    return tokenizer


def _texts(pieces: Pieces, size: int) -> list[str]:
    """Return the text of each id below ``size`` as if it were decoded alone, behind another text."""
    texts = [
        "" if piece is None else piece if isinstance(piece, str) else piece.decode(errors="replace")
        for piece in pieces.table[:size]
    ]
    return texts + [""] * (size - len(texts))


MEGABYTE = 1 << 20

_ALLOCATOR_SETTINGS = ((torch._C, "_accelerator_setAllocatorSettings"), (torch.cuda.memory, "_set_allocator_settings"))
"""The function that changes settings of PyTorch's allocator, under its names in different versions, newest first. If
none exists, the allocator wastes a few per cent more memory."""
_CACHES = {
    "FP16": "ExLlamaV2Cache",
    "Q8": "ExLlamaV2Cache_Q8",
    "Q6": "ExLlamaV2Cache_Q6",
    "Q4": "ExLlamaV2Cache_Q4",
}

Region = Callable[[], contextlib.AbstractContextManager[None]]

_NO_ROOM = "out of memory", "Insufficient VRAM", "ALLOC_FAILED"
"""Parts of the messages of CUDA, ExLlamaV2 and cuBLAS when a GPU's memory is used up."""


@dataclass(frozen=True)
class Loaded:
    """A model in memory, with everything that a generator needs.

    core, generator           the package's modules exllamav2 and exllamav2.generator
    attention                 how attention is computed, for people
    model, cache, tokenizer   the package's objects
    draft_model, draft_cache  None without a draft model
    draft_tokens              tokens speculated per step; 0: no speculation
    ngram                     whether to speculate from n-grams of the text
    loras                     the package's adapters, loaded
    context                   tokens of prompt and answer together
    chunk_size                prompt tokens computed at a time
    cache_size                tokens of all sequences together, a multiple of 256
    devices                   GPUs used, as the process counts them
    graphs                    whether decode steps are to be captured. The cache then has a spare page behind the others
    uncaptured                why they are not, for people; "" where ``graphs`` is true
    max_gap_s                 longest pause of running answers while prompts are read
    memory                    the GPU memory that is given back while the model sleeps; None if it cannot sleep
    no_sleep                  why it cannot sleep, for people
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
    graphs: bool = False
    uncaptured: str = ""
    max_gap_s: float = DEFAULT_MAX_GAP_MS / 1000
    memory: SleepMemory | None = None
    no_sleep: str = ""

    @property
    def caches(self) -> list[Any]:
        return [self.cache] if self.draft_cache is None else [self.cache, self.draft_cache]


def load(checked: CheckedExLlamaV2Model, progress: ProgressCallback, *, sleep: bool = False) -> Loaded:
    """Load a model onto the visible GPUs. Several GPUs share it by layers or, if the options say so, by tensors.

    sleep  whether the model may be put to sleep

    Raises LoadError. ``progress`` gets the phases "compiling ExLlamaV2" (steps) if that is needed, "compiling
    attention" (GPUs), "loading draft" and "loading" (bytes of weights), and "loading lora" (adapters).
    """
    options, directory, sizes, draft = checked.options, checked.directory, checked.sizes, checked.draft
    assert checked.tokenizer is not None, "build_engine has seen that its packages are there"
    package = import_package(progress)
    expand_segments()
    gpus = torch.cuda.device_count()
    with understood(directory.path):
        check_parallel(options, directory, sizes, gpus)
        needs = vram.estimate_of(options, sizes, directory, draft, gpus)
    readings = [torch.cuda.mem_get_info(index) for index in range(gpus)]
    free, total = (sum(column) for column in zip(*readings, strict=True))
    refusal = vram.refusal(needs, free, total, options, sizes, gpus)
    if needs.total > free:
        raise refusal
    attention = check_attention(package, directory, gpus, progress)
    uncaptured = obstacle_before_loading(options, attention)
    graphs = uncaptured is None
    cache_tokens = sizes.cache_size + (PAGE_TOKENS if graphs else 0)
    compute_as_transformers()
    keep_rows_apart()
    config = _config(package, directory, options.rope_scale, options.rope_alpha, sizes, graphs)
    core, draft_model, draft_cache = package.core, None, None
    memory, no_sleep = _sleep_memory(gpus, allowed=sleep)
    weights, of_cache = _regions(memory)
    try:
        with _assertions_named(directory):
            tokenizer = make_tokenizer(core, config, checked.tokenizer)
        if draft is not None:
            with _assertions_named(draft):
                scales = options.draft_rope_scale, options.draft_rope_alpha
                draft_model = core.ExLlamaV2(_config(package, draft, *scales, sizes, graphs))
                with weights():
                    draft_model.load(callback=_counted(progress, "loading draft", draft_model, draft, memory))
                mode = options.draft_cache_mode or options.cache_mode
                with of_cache():
                    draft_cache = getattr(core, _CACHES[mode])(draft_model, batch_size=1, max_seq_len=cache_tokens)
        with _assertions_named(directory):
            model = core.ExLlamaV2(config)
            count = _counted(progress, "loading", model, directory, memory)
            cache = _load_model(core, model, options, cache_tokens, gpus, count, memory)
            for each in (cache, draft_cache):
                if is_quantised(each) and not options.tensor_parallel:
                    store_once(each)
            if options.loras:
                progress("loading lora", 0, len(options.loras))
            with weights():
                loras = load_adapters(core, model, options.loras, directory)
    except torch.OutOfMemoryError:
        raise refusal from None
    except RuntimeError as e:
        if any(sign in str(e) for sign in _NO_ROOM):
            raise refusal from None
        raise
    torch.cuda.empty_cache()  # memory of tensors that were converted to fp16 or reordered
    return Loaded(
        core=core,
        generator=package.generator,
        attention=attention,
        model=model,
        cache=cache,
        tokenizer=tokenizer,
        context=sizes.context,
        chunk_size=sizes.chunk_size,
        cache_size=sizes.cache_size,
        draft_model=draft_model,
        draft_cache=draft_cache,
        draft_tokens=options.draft_tokens if options.speculates else 0,
        ngram=options.ngram_draft,
        loras=loras,
        devices=_devices(model, cache),
        graphs=graphs,
        uncaptured=uncaptured or "",
        max_gap_s=options.max_gap_ms / 1000,
        memory=memory,
        no_sleep=no_sleep,
    )


def make_generator(loaded: Loaded, max_batch_size: int) -> Any:
    """Return the package's ExLlamaV2DynamicGenerator for a loaded model, with adapters set and an empty page table."""
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
        max_q_size=loaded.draft_tokens + 1,  # tokens of a step: the last one, and those speculated behind it
        paged=True,
    )
    if loaded.graphs and loaded.cache.max_seq_len > loaded.cache_size:  # its last page is spare
        generator.max_total_tokens = loaded.cache_size
        generator.max_pages = loaded.cache_size // PAGE_TOKENS
        generator.reset_page_table()
    if loaded.loras:
        generator.set_loras(loaded.loras)
        generator.reset_page_table()  # pages that were cached without the adapter must not be used with it
    return generator


def expand_segments() -> None:
    """Have PyTorch's allocator grow its segments, which wastes the least memory. The environment's setting has
    precedence.

    Call this before anything is allocated.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return
    for owner, name in _ALLOCATOR_SETTINGS:
        if setting := getattr(owner, name, None):
            setting("expandable_segments:True")
            return


def _config(
    package: Package,
    directory: ModelDir,
    rope_scale: float | None,
    rope_alpha: float | None,
    sizes: Sizes,
    graphs: bool,
) -> Any:
    """Return the package's configuration of a model. Raises LoadError."""
    config = package.core.ExLlamaV2Config()
    config.model_dir = str(directory.path)
    config.modelctl_directory = directory
    with _assertions_named(directory), only_the_models_weights(directory.bounds):
        config.prepare()
        config.arch_compat_overrides(quiet=True)
    if config.no_flash_attn:
        raise LoadError(
            f"architecture {directory.architecture} is computed without paged attention only: not supported"
        )
    if rope_scale is not None:
        config.scale_pos_emb = rope_scale
    if rope_alpha is not None:
        config.scale_alpha_value = rope_alpha
    # The tables of positions have exactly this length, and the package reads them without a check. Admission refuses
    # longer requests.
    config.max_seq_len = sizes.positions
    config.modelctl_context = sizes.context
    config.max_input_len = sizes.chunk_size
    config.max_attention_size = sizes.chunk_size**2
    if graphs:
        config.no_graphs = True  # the package's own captures of single layers would be nested in those of steps
    config.max_output_len = max(sizes.rows, 16)  # tokens whose logits are computed at once
    return config


def _sleep_memory(gpus: int, *, allowed: bool) -> tuple[SleepMemory | None, str]:
    """Return the memory of a model that can sleep, or None and why it cannot."""
    why = obstacle(gpus, allowed=allowed)
    if why is None:
        try:
            return SleepMemory(), ""
        except NoSleepError as e:
            why = str(e)
    return None, why


def _regions(memory: SleepMemory | None) -> tuple[Region, Region]:
    """Return the contexts in which weights and caches are allocated."""
    if memory is None:
        return contextlib.nullcontext, contextlib.nullcontext
    return memory.weights, memory.cache


def _load_model(
    core: Any,
    model: Any,
    options: ExLlamaV2Options,
    cache_tokens: int,
    gpus: int,
    count: Callable[[int, int], None],
    memory: SleepMemory | None,
) -> Any:
    """Load the weights, and make the cache. Return the cache."""
    kind = getattr(core, _CACHES[options.cache_mode])
    if options.tensor_parallel:
        # Without a split the package reads CUDA_VISIBLE_DEVICES as numbers, but the variable may hold UUIDs.
        split = options.gpu_split or [torch.cuda.mem_get_info(index)[0] / 2**30 for index in range(gpus)]
        model.load_tp(list(split), callback=count, expect_cache_tokens=cache_tokens, expect_cache_base=kind)
        return core.ExLlamaV2Cache_TP(model, base=kind, batch_size=1, max_seq_len=cache_tokens)
    if gpus > 1 and not options.gpu_split:
        cache = kind(model, batch_size=1, max_seq_len=cache_tokens, lazy=True)
        reserve = options.autosplit_reserve or (DEFAULT_RESERVE_MB,) * gpus
        # The package tries every layer with attention without pages. Our replacement of flash-attn does not compute
        # that.
        model.config.no_flash_attn = True
        try:
            model.load_autosplit(cache, reserve_vram=[mb * MEGABYTE for mb in reserve], callback=count)
        finally:
            model.config.no_flash_attn = False
        return cache
    weights, of_cache = _regions(memory)
    with weights():
        model.load(list(options.gpu_split) if options.gpu_split else None, callback=count)
    with of_cache():
        return kind(model, batch_size=1, max_seq_len=cache_tokens)


def _devices(model: Any, cache: Any) -> list[int]:
    """Return the GPUs that hold a layer, or a part of the cache."""
    layers = {module.device_idx for module in model.modules if isinstance(module.device_idx, int)}
    return sorted((layers | {tensor.device.index for tensor in cache.all_tensors()}) - {-1})


def _counted(
    progress: ProgressCallback, phase: str, model: Any, directory: ModelDir, memory: SleepMemory | None
) -> Callable[[int, int], None]:
    """Return the callback of the package's load, which gets (modules loaded, modules).

    It reports bytes of the weights. If the names of the modules are not those of the files, it reports modules. Between
    modules the memory of a model that can sleep is divided.
    """
    sizes = bytes_of_modules(directory.tensors, [getattr(module, "key", "") for module in model.modules])
    read, whole = list(itertools.accumulate(sizes or (), initial=0)), sum(t.bytes for t in directory.tensors.values())

    def count(done: int, total: int) -> None:
        if memory is not None:
            memory.divide()
        if sizes is None:
            progress(phase, done, total, "modules")
        else:
            progress(phase, whole if done >= total else read[done], whole, "bytes")

    return count


@contextlib.contextmanager
def _assertions_named(directory: ModelDir) -> Iterator[None]:
    """Turn the package's exceptions about a model into LoadError."""
    try:
        yield
    except (AssertionError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        if "Insufficient space in device allocation" in str(e):
            raise LoadError(
                "gpu_split leaves no room for all layers: it has to hold the weights, and on each GPU the buffers that "
                "a chunk needs: raise it, or remove it to have the layers split automatically"
            ) from None
        raise LoadError(f"{directory.path} cannot be loaded: {one_line(e)}") from e
