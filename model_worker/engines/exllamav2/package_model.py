"""Make the package compute models as transformers computes them.

``meaning`` says what config.json means. Some of that the package cannot be told: which layers have a sliding window,
which layers have no rotary embedding, and which parameters a scaled rotary embedding has. So this module sets them in
the package's objects, and computes the frequencies of yarn and longrope itself.
"""

import importlib
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch

from model_worker.engines.exllamav2.meaning import LONGROPE, layer_kinds, open_directory
from model_worker.engines.model_dir import ModelDir, weight_files
from model_worker.engines.vetting import Bounds

_NO_POSITIONS = math.inf
"""The rotary base that stands for a table without rotation."""
_RMS_HEADS = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures whose norms of heads are RMS norms. The package subtracts the mean."""


def compute_as_transformers() -> None:
    """Change the package, once. Its converter can use this, too."""
    config: Any = importlib.import_module("exllamav2.config")
    if hasattr(config, "modelctl_prepare"):
        return
    config.modelctl_prepare = config.ExLlamaV2Config.prepare
    config.ExLlamaV2Config.prepare = _prepare
    # transformers writes the names of GPT-2 with this prefix; the first files had none.
    importlib.import_module("exllamav2.architecture").gpt2_keymap.insert(0, ("$transformer.", ""))
    model: Any = importlib.import_module("exllamav2.model").ExLlamaV2
    build = model.__init__

    def build_with_windows(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        _set_windows(self)

    model.__init__ = build_with_windows
    rope: Any = importlib.import_module("exllamav2.rope")
    plain = rope.get_rope_params
    rope.get_rope_params = lambda device, cfg, base: _rope_params(plain, device, cfg, base)


def _prepare(self: Any, no_tensors: bool = False) -> None:
    """Read a model's directory as ``ExLlamaV2Config.prepare`` does, in its translation and for text only.

    Without its tensors the package also leaves out what it reads for images, such as preprocessor_config.json.
    """
    package: Any = importlib.import_module("exllamav2.config")
    directory: ModelDir = getattr(self, "modelctl_directory", None) or open_directory(self.model_dir)
    self.modelctl_directory = directory

    def load(file: IO[str]) -> Any:
        return json.loads(json.dumps(directory.config)) if file.name.endswith("/config.json") else json.load(file)

    original, package.json = package.json, SimpleNamespace(load=load)
    try:
        package.modelctl_prepare(self, no_tensors=True)
    finally:
        package.json = original
    lm, name = self.arch.lm, directory.architecture
    lm.rope_freq_half = False  # a frequency in 16 bits is wrong after some hundred tokens
    if name in _RMS_HEADS:
        lm.headnorm = "rmsnorm"
    if name == "Cohere2ForCausalLM":
        self.rotary_embedding_base_alt, self.scale_pos_emb_alt = _NO_POSITIONS, 1
    self.vision_model_type = None
    self.checkpoint_fused_mlp = False
    if no_tensors:
        return
    files = importlib.import_module("exllamav2.stloader")
    self.tensor_files = [str(file) for file in directory.weights]
    self.tensor_file_map = {
        key: file for file in self.tensor_files for key in files.STFile.open(file, keymap=self.arch.keymap).get_dict()
    }
    files.cleanup_stfiles()
    if "model.layers.0.mlp.swiglu.w12.weight" in self.tensor_file_map:
        self.checkpoint_fused_mlp = True
        self.arch.make_fused_mlp()
    _find_all(self)


def _find_all(config: Any) -> None:
    """Raise ValueError, as the package does, if a matrix or norm of the language model is missing."""
    lm, prefix = config.arch.lm, config.arch.lm_prefix
    wanted = list(lm.expect_keys)
    places = itertools.product(range(config.num_hidden_layers), range(config.num_experts or 1), lm.layer_keys)
    for layer, expert, names in places:
        wanted += [[f"model.layers.{layer}.{name.replace('.*.', f'.{expert}.')}" for name in names]]
    for names in wanted:
        found = (f"{prefix}{name}{end}" for name in names for end in (".q_weight", ".qweight", ".weight", ""))
        if not any(name in config.tensor_file_map for name in found):
            raise ValueError(f"Could not find {prefix}{names[-1]} in the weights")


def _set_windows(model: Any) -> None:
    """Give each layer its sliding window, and the table of positions that belongs to it."""
    cfg = model.config
    directory: ModelDir | None = getattr(cfg, "modelctl_directory", None)
    if directory is None or not hasattr(model, "modules"):
        return
    kinds, name = layer_kinds(directory), directory.architecture
    window = directory.text_config["sliding_window"] if any(kinds) else 0
    context = getattr(cfg, "modelctl_context", cfg.max_seq_len)
    for module in model.modules:
        layer = getattr(module, "attn", module)
        if not hasattr(layer, "sliding_window") or layer.layer_idx >= len(kinds):
            continue
        slides = kinds[layer.layer_idx]
        # The package's window is the number of tokens before a token. That of transformers counts the token, too.
        layer.sliding_window = window - 1 if slides and 1 < window < context else 0
        if cfg.rotary_embedding_base_alt:
            layer.rope_index = int(slides != (name == "Cohere2ForCausalLM"))


def _rope_params(plain: Any, device: Any, cfg: Any, base: float) -> tuple[torch.Tensor, float]:
    """Return (inverse frequencies, factor of sines and cosines), as transformers' modeling_rope_utils computes them."""
    directory: ModelDir | None = getattr(cfg, "modelctl_directory", None)
    dim = int(cfg.head_dim * cfg.partial_rotary_factor)
    if base == _NO_POSITIONS:
        return torch.zeros(dim // 2, device=device), 1.0
    text = {} if directory is None else directory.text_config
    scaling = text.get("rope_scaling") or {}
    kind = scaling.get("rope_type")
    if kind != "yarn" and kind not in LONGROPE:
        found: tuple[torch.Tensor, float] = plain(device, cfg, base)
        return found
    if cfg.scale_alpha_value and cfg.scale_alpha_value != 1.0:
        base *= cfg.scale_alpha_value ** (dim / (dim - 2))
    powers = base ** (torch.arange(0, dim, 2, device=device, dtype=torch.float) / dim)
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or text.get("max_position_embeddings", original) / original
    if kind in LONGROPE:
        context = getattr(cfg, "modelctl_context", cfg.max_seq_len)
        parts = scaling["long_factor" if context > original else "short_factor"]
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        frequencies = 1.0 / (torch.tensor(parts, dtype=torch.float, device=device) * powers)
    else:
        given = _mscale(factor, scaling.get("mscale") or 1) if _both(scaling) else _mscale(factor)
        if _both(scaling):
            given /= _mscale(factor, scaling["mscale_all_dim"])
        kept = _kept(scaling, base, dim, original).to(device)
        frequencies = (1 / (factor * powers)) * (1 - kept) + (1 / powers) * kept
    attention = scaling.get("attention_factor")
    return frequencies, float(given if attention is None else attention)


def _both(scaling: dict[str, Any]) -> bool:
    return bool(scaling.get("mscale") and scaling.get("mscale_all_dim"))


def _mscale(factor: float, weight: float = 1) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _kept(scaling: dict[str, Any], base: float, dim: int, original: int) -> torch.Tensor:
    """Return how much of each frequency yarn leaves as it is, from 0 to 1."""

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float) - low) / ((high - low) or 0.001)
    return 1 - ramp.clamp(0, 1)


# Make the package take the weights of a directory that are its model. Does not import torch.


def only_the_models_weights(bounds: Bounds | None = None) -> AbstractContextManager[None]:
    """Make the package take the files that ``weight_files`` returns. It would take every safetensors file of a
    directory, and for each tensor the last file that has its name.

    bounds  where the files may be; None: in their directory
    """

    def glob(pattern: str) -> list[str]:
        return [str(file) for file in weight_files(Path(pattern).parent, bounds)]

    return replaced("exllamav2.config", "glob", SimpleNamespace(glob=glob))


@contextmanager
def replaced(module: str, name: str, value: Any) -> Iterator[None]:
    """Give a module of the package another value of a name for a while."""
    changed = importlib.import_module(module)
    before = getattr(changed, name)
    setattr(changed, name, value)
    try:
        yield
    finally:
        setattr(changed, name, before)
