"""Load a model with the transformers library: checks that need the library, and reports of progress."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import transformers
import transformers.modeling_utils  # else the library would import it, and much more, in the middle of the first load
from transformers.utils import logging as transformers_logging

from model_worker.engine import LoadError, ProgressCallback
from model_worker.engines import one_line
from model_worker.engines.bytes_read import bytes_of_parameters
from model_worker.engines.embedded.architectures import NEEDED, cannot_step
from model_worker.engines.model_dir import ModelDir, Tensor

_SLACK = 1 << 22
"""Parameters that may be missing before the model counts as too large. The load then names the missing ones."""


def load_model(directory: ModelDir, device: torch.device, progress: ProgressCallback) -> Any:
    """Load the model in float32 on ``device``, in eval mode. Return it.

    Only safetensors files of the directory are read, and no code of it is run. ``embedded.check`` must have checked the
    directory. ``progress`` counts bytes of the weights if the library reports its tensors, else one step for the whole
    load. Raises LoadError.
    """
    attention = _check_size(directory)
    changed: dict[str, Any] = {}
    if "quantization_config" in directory.config:  # left behind by plain weights; the library would quantize them
        changed["config"] = transformers.AutoConfig.from_pretrained(
            str(directory.path), local_files_only=True, trust_remote_code=False
        )
        del changed["config"].quantization_config
    done_before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with _loading(progress, directory.tensors):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                str(directory.path),
                dtype=torch.float32,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **changed,
            )
            model, info = loaded
            model = model.to(device).eval()
    except torch.OutOfMemoryError as e:
        raise LoadError(f"not enough memory on {device} for the weights: {one_line(e)}") from None
    except Exception as e:  # a foreign config.json may make the library raise anything
        raise LoadError(f"{directory.path} cannot be loaded: {type(e).__name__}: {one_line(e)}") from e
    finally:
        if done_before:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    # The library fills missing weights with random numbers and goes on.
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            raise LoadError(
                f"{directory.path}: the weights do not fit config.json: {what} {sorted(map(str, info[what]))[0]}"
            )
    if missing := NEEDED - set(inspect.signature(model.forward).parameters):
        raise cannot_step(directory.architecture, missing)
    return model


def _check_size(directory: ModelDir) -> str:
    """Return the attention that the library has for this model.

    Raises LoadError if config.json describes a much larger model than the weights hold. Otherwise the library would
    allocate and fill memory for all of it before it notices what is missing.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(directory.path), local_files_only=True, trust_remote_code=False
        )
        known: Any = transformers.AutoModelForCausalLM
        # Some architectures have no other attention than the library's own, which it calls eager (Gemma 2, GPT-J).
        attention = "sdpa" if known._model_mapping[type(config)]._supports_sdpa else "eager"
        with torch.device("meta"):
            skeleton: Any = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=attention, trust_remote_code=False
            )
        described = sum(parameter.numel() for parameter in skeleton.parameters())
    except Exception as e:  # a foreign config.json may make the library raise anything
        raise LoadError(f"{directory.path}/config.json describes no model: {type(e).__name__}: {one_line(e)}") from e
    held = sum(tensor.elements for tensor in directory.tensors.values())
    if described > 2 * held + _SLACK:
        raise LoadError(
            f"{directory.path}/config.json describes a model of {described} parameters, its weights hold {held}: they "
            "are not of one model"
        )
    return attention


def check_room(directory: ModelDir, device: torch.device, rows: int, context: int) -> None:
    """Raise LoadError, with the arithmetic, if weights and cache cannot fit the device's free memory."""
    config = directory.text_config
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int)):
        return  # config.json uses other names: the load itself will find out
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    cache = rows * (context + 1) * layers * kv_heads * head_dim * 2 * 4
    free = _free_bytes(device)
    weights = directory.weight_bytes  # at least this: 16-bit weights double in float32
    if free is not None and cache + weights > free:
        raise LoadError(
            f"not enough memory on {device}: the cache of {rows} sequences of {context} tokens takes {_gib(cache)}, "
            f"the weights {_gib(weights)} or more, {_gib(free)} are free: lower max_seq_len or max_batch_size"
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise LoadError("no CUDA device is visible to this process: set gpu: cpu, or mend the driver")
        return int(torch.cuda.mem_get_info()[0])
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            fields = dict(line.split(":", 1) for line in f)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def device_name(device: torch.device, threads: int) -> str:
    """Return a name for people: "cpu (2 threads)", or the GPU's name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({threads} thread{'s' if threads > 1 else ''})"


class _loading:
    """Reports the progress of the library's loop over parameters. If the library has no hook, reports start and end."""

    def __init__(self, progress: ProgressCallback, tensors: Mapping[str, Tensor]) -> None:
        self._progress, self._tensors = progress, tensors
        self._total = sum(tensor.bytes for tensor in tensors.values())
        self._set_hook: Callable[[Any], Any] | None = getattr(transformers_logging, "set_tqdm_hook", None)

    def __enter__(self) -> None:
        self._say(0)
        if self._set_hook:
            self._previous = self._set_hook(self._hook)

    def __exit__(self, *exc: object) -> None:
        if self._set_hook:
            self._set_hook(self._previous)
        if exc[0] is None:
            self._say(self._total)

    def _say(self, done: int) -> None:
        self._progress("loading", min(done, self._total), self._total, "bytes")

    def _hook(self, factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bar = factory(*args, **kwargs)
        if kwargs.get("desc") != "Loading weights" or not args:
            return bar
        # The library iterates over (name, how it is made) of the parameters.
        names = [item[0] if isinstance(item, tuple) and item else "" for item in args[0]]
        return self._counted(bar, bytes_of_parameters(self._tensors, names))

    def _counted(self, items: Iterable[Any], sizes: Iterable[int]) -> Iterator[Any]:
        done = 0
        for item, size in zip(items, sizes, strict=False):
            yield item
            done += size
            self._say(done)
