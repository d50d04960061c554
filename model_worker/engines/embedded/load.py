"""Load a model with the transformers library: checks that need the library, and reports of progress."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
import transformers.modeling_utils  # else the library would import it, and much more, in the middle of the first load
from transformers.cache_utils import Cache
from transformers.utils import logging as transformers_logging

from model_worker.engine import LoadError, ProgressCallback
from model_worker.engines import one_line
from model_worker.engines.embedded.check import NEEDED, cannot_step
from model_worker.engines.model_dir import ModelDir, Tensor, bytes_of_parameters

_SLACK = 1 << 22
"""Parameters that may be missing before the model counts as too large. The load then names the missing ones."""


def load_model(directory: ModelDir, device: torch.device, progress: ProgressCallback) -> Any:
    """Load the causal language model in float32 on ``device``. Return it. Raises LoadError. See ``load_weights``."""
    model = load_weights(directory, device, progress, transformers.AutoModelForCausalLM)
    if missing := NEEDED - set(inspect.signature(model.forward).parameters):
        raise cannot_step(directory.architecture, missing)
    return model


def load_weights(
    directory: ModelDir,
    device: torch.device,
    progress: ProgressCallback,
    library: Any,
    dtype: torch.dtype = torch.float32,
    unused: tuple[str, ...] = (),
) -> Any:
    """Load a model on ``device``, in eval mode. Return it.

    Only safetensors files of the directory are read, and no code of it is run. ``embedded.check`` must have checked the
    directory. ``progress`` counts bytes of the weights if the library reports its tensors, else one step for the whole
    load. Raises LoadError.

    library  the library's class that chooses the model's class, such as AutoModelForCausalLM
    unused   how the names of weights begin that may be missing, because nothing is computed with them
    """
    attention = _check_size(directory, library)
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
            loaded: Any = library.from_pretrained(
                str(directory.path),
                dtype=dtype,
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
        if wrong := sorted(name for name in map(str, info.get(what) or ()) if not name.startswith(unused)):
            raise LoadError(f"{directory.path}: the weights do not fit config.json: {what} {wrong[0]}")
    return model


def _check_size(directory: ModelDir, known: Any) -> str:
    """Return the attention that the library has for this model.

    Raises LoadError if config.json describes a much larger model than the weights hold. Otherwise the library would
    allocate and fill memory for all of it before it notices what is missing.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(directory.path), local_files_only=True, trust_remote_code=False
        )
        # Some architectures have no other attention than the library's own, which it calls eager (Gemma 2, GPT-J).
        attention = "sdpa" if known._model_mapping[type(config)]._supports_sdpa else "eager"
        with torch.device("meta"):
            skeleton: Any = known.from_config(config, attn_implementation=attention, trust_remote_code=False)
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


# A cache of keys and values for many sequences, one row each, allocated once.


class SlotCache(Cache):
    """A transformers cache of ``rows`` independent sequences of up to ``length`` tokens.

    ``select`` chooses the rows that the next forward pass computes, and the positions of its tokens. The model's
    attention then calls ``update`` once per layer. The mask must hide positions that do not belong to a row, because
    the returned keys reach up to the end of the longest row.

    Per layer: keys and values [rows, kv_heads, length + 1, head_dim], allocated when the layer first writes. The last
    position takes the padding of prompts of different lengths and is never returned.
    """

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(layers=[])
        self.rows, self._length = rows, length
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._index: torch.Tensor
        self._positions: torch.Tensor
        self._dense = True
        self._batch = self._span = 0

    def select(self, rows: torch.Tensor, positions: torch.Tensor, span: int, *, dense: bool) -> None:
        """Choose the rows and positions of the next forward pass.

        rows       int64 [n], on the cache's device
        positions  int64 [n, t], where each row's t tokens are written; positions beyond ``length`` are padding
        span       number of positions returned, from 0: the longest row's length after this pass
        dense      whether the rows are 0 to n-1 in order; they are returned as a view then, not as a copy
        """
        self._index, self._dense, self._batch, self._span = rows, dense, rows.shape[0], span
        self._positions = positions.clamp(max=self._length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's [n, kv_heads, t, head_dim]. Return [n, kv_heads, span, head_dim] of the selected rows."""
        if layer_idx not in self._keys:
            for store, states in ((self._keys, key_states), (self._values, value_states)):
                shape = (self.rows, states.shape[1], self._length + 1, states.shape[3])
                # Zeros, not empty: a masked weight of 0 times an uninitialised NaN is NaN.
                store[layer_idx] = torch.zeros(shape, dtype=states.dtype, device=states.device)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        # Another index is between the two advanced ones, so their dimensions [n, t] come first.
        rows = self._index[:, None]
        keys[rows, :, self._positions] = key_states.transpose(1, 2)
        values[rows, :, self._positions] = value_states.transpose(1, 2)
        if self._dense:
            return keys[: self._batch, :, : self._span], values[: self._batch, :, : self._span]
        return keys[self._index, :, : self._span], values[self._index, :, : self._span]

    @torch.inference_mode()  # a cancel calls this between steps, outside of a step's inference mode
    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first ``length`` tokens of two rows."""
        if a == b or not length:
            return
        for store in (*self._keys.values(), *self._values.values()):
            kept = store[a, :, :length].clone()
            store[a, :, :length] = store[b, :, :length]
            store[b, :, :length] = kept

    def drop(self) -> None:
        """Give the memory of all layers back. ``restore`` allocates it again."""
        for store in (self._keys, self._values):
            for layer, states in store.items():
                store[layer] = states.new_empty((0, *states.shape[1:]))

    def restore(self) -> None:
        """Allocate the memory again that ``drop`` has given back. It is filled with zeros."""
        for store in (self._keys, self._values):
            for layer, states in store.items():
                store[layer] = states.new_zeros((self.rows, *states.shape[1:]))

    # A model may call the following methods, although it also gets positions and a mask.

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return self._span - self._positions.shape[1] if self._batch else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0, *args: Any) -> tuple[int, int]:
        return self._span, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self._length

    @property
    def is_compileable(self) -> bool:
        return False


# Step a transformers model by hand: many sequences in one forward pass, each at its own position.


class SlotModel:
    """A causal language model over a SlotCache. Call its methods under ``torch.inference_mode()``.

    model   an AutoModelForCausalLM in eval mode on ``device``
    rows    number of sequences at once
    length  the largest number of tokens of a sequence
    """

    def __init__(self, model: Any, device: torch.device, rows: int, length: int) -> None:
        self._model, self._device = model, device
        # Only the logits of the last position are needed, and in prefill mostly none. Not every architecture has this
        # parameter.
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        self.cache = SlotCache(rows, length)
        self._places = torch.arange(length + 1, device=device)
        self._masked = torch.finfo(model.dtype).min
        self._zero = torch.zeros((), dtype=model.dtype, device=device)
        self._hidden = torch.full((), self._masked, dtype=model.dtype, device=device)

    def prefill(
        self, rows: Sequence[int], ids: Sequence[Sequence[int]], starts: Sequence[int], *, logits: bool = False
    ) -> torch.Tensor:
        """Put prompt tokens into rows: ``ids[i]`` from position ``starts[i]`` on. Shorter prompts are padded.

        Return logits [rows, tokens of the longest, vocab], which are complete only if ``logits`` asks for them.
        """
        longest = max(map(len, ids))
        tokens = torch.zeros((len(ids), longest), dtype=torch.int64)
        for i, row in enumerate(ids):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        first = torch.tensor(starts, device=self._device)
        positions = first[:, None] + self._places[:longest]
        for i, row in enumerate(ids):  # padding goes to the position that is never read
            positions[i, len(row) :] = self._places[-1]
        span = max(start + len(row) for start, row in zip(starts, ids, strict=True))
        # Only rows 0 to n-1 in order can be read without a copy.
        dense = list(rows) == list(range(len(rows)))
        return self._forward(tokens.to(self._device), list(rows), positions, span, dense=dense, logits=logits)

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return logits [n, vocab] after one more token in each of the rows 0 to n-1, at the given positions."""
        placed = torch.tensor(positions, device=self._device)[:, None]
        ids = torch.tensor(tokens, device=self._device)[:, None]
        logits = self._forward(ids, range(len(tokens)), placed, max(positions) + 1, dense=True)
        return logits[:, -1]

    def _forward(
        self,
        ids: torch.Tensor,
        rows: Sequence[int],
        positions: torch.Tensor,
        span: int,
        *,
        dense: bool,
        logits: bool = False,
    ) -> torch.Tensor:
        index = self._places[: len(rows)] if dense else torch.tensor(rows, device=self._device)
        self.cache.select(index, positions, span, dense=dense)
        visible = self._places[:span] <= positions[:, :, None]
        # Use an additive mask: every layer would turn a boolean mask into an additive one.
        mask = torch.where(visible, self._zero, self._hidden)[:, None]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            # The model's tables may not have the position of the padding.
            position_ids=positions.clamp(max=self._places.shape[0] - 2),
            past_key_values=self.cache,
            use_cache=True,
            **(dict.fromkeys(self._keep, 0) if logits else self._keep),  # 0 keeps all
        )
        computed: torch.Tensor = output.logits
        return computed

    @property
    def weight_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._model.parameters(), *self._model.buffers()))

    def sleep(self) -> None:
        """Keep the weights in host memory, and give all other memory back."""
        self.cache.drop()
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo ``sleep``. The cache holds zeros."""
        self._model.to(self._device)
        self.cache.restore()

    def check(self, name: str, vocab_size: int) -> None:
        """Compare logits with the model's own computation without a cache. Raises LoadError if they differ.

        This test works for every architecture. It finds an architecture that keeps state elsewhere, reads positions
        from its cache, or ignores the mask.
        """
        try:
            worst, scale = self._compare(vocab_size)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, NotImplementedError) as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            raise LoadError(
                f"architecture {name} cannot be computed with a slot cache ({type(e).__name__}: {one_line(e)}): it is "
                "not supported by engine transformers"
            ) from e
        if not worst <= 1e-3 * scale:  # also for NaN
            raise LoadError(
                f"architecture {name} does not compute the same with a slot cache (off by {worst:.3g}): "
                "it is not supported by engine transformers"
            )

    def _compare(self, vocab_size: int) -> tuple[float, float]:
        """Return the largest difference from the model's own logits, and the size of those."""
        generator = torch.Generator().manual_seed(0)
        length = max(2, min(12, self._places.shape[0] - 1))
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        own = self._model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[0]
        others = ids[::-1]
        rows = min(2, self.cache.rows)  # the two rows have different lengths, and are at different positions
        cut, short = length // 2, max(1, length // 4)
        self.prefill(range(rows), [ids[:cut], others[:short]][:rows], [0] * rows)
        self.prefill([0], [ids[cut : cut + 1]], [cut])
        worst = 0.0
        for step, at in enumerate(range(cut + 1, length)):
            tokens, positions = [ids[at], others[short + step]][:rows], [at, short + step][:rows]
            worst = max(worst, float((self.decode(tokens, positions)[0] - own[at]).abs().max()))
        return worst, max(1.0, float(own.abs().max()))
