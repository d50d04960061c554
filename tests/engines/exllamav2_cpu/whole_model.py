"""Compute whole models with the package's own Python on the CPU, in fp16 over a paged cache.

The functions below stand in for kernels of ``exllamav2_ext`` and for flash-attn. They follow cuda/rms_norm.cu,
layer_norm.cu, head_norm.cu, rope.cu and softcap.cu.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.engines.exllamav2.package_model import compute_as_transformers
from tests.engines.exllamav2_cpu.package import import_package

PAGE = 256


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, epsilon: float) -> None:
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float())


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, epsilon: float) -> None:
    added = None if bias.is_meta else bias.float()
    out.copy_(torch.nn.functional.layer_norm(x.float(), (x.shape[-1],), weight.float(), added, epsilon))


def head_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, epsilon: float, rms: bool
) -> None:
    wide = x.float()
    if not rms:
        wide = wide - wide.mean(-1, keepdim=True)
    out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float())


def softcap_(x: torch.Tensor, cap: float) -> None:
    x.copy_(torch.tanh(x.float() / cap) * cap)


def rope_(
    x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, past: int, heads: int, head_dim: int, offsets: torch.Tensor,
    neox: bool,
) -> None:  # fmt: skip
    size, width = x.shape[1], sin.shape[-1]
    for row in range(x.shape[0]):
        at = past + int(offsets[row])
        s, c = (table[0, 0, at : at + size, None].float() for table in (sin, cos))
        values = x[row].view(size, heads, head_dim)
        part = values[..., :width].float()
        if neox:
            turned = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
        else:
            turned = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        values[..., :width] = part * c + turned * s


def stloader_read(file: str, begin: int, size: int, tensor: torch.Tensor) -> None:
    with open(file, "rb") as f:
        f.seek(begin)
        data = bytearray(f.read(size))
    tensor.view(torch.uint8).view(-1).copy_(torch.frombuffer(data, dtype=torch.uint8))


def attend(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor, block_table: torch.Tensor, causal: bool, softmax_scale: float,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Do what flash-attn's ``flash_attn_with_kvcache`` does, for one row whose pages are in order."""
    assert causal
    size = q.shape[1]
    past = int(cache_seqlens[0]) - (size if k is None else 0)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    if k is not None:
        assert v is not None
        keys[past : past + size], values[past : past + size] = k[0], v[0]
    shared = q.shape[2] // keys.shape[1]
    keys, values = (t[: past + size].float().repeat_interleave(shared, 1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q[0].float(), keys) * softmax_scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    distance = torch.arange(past, past + size)[:, None] - torch.arange(past + size)
    hidden = distance < 0
    if window_size[0] >= 0:
        hidden |= distance > window_size[0]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).half()[None].contiguous()


class _Cache:
    """Keys and values of one sequence in order, as the package's attention wants them."""

    q_block = 0
    current_seq_len = 0

    def __init__(self, config: Any, size: int) -> None:
        shape = (1, size, config.num_key_value_heads, config.head_dim)
        self._states = [[torch.zeros(shape, dtype=torch.half) for _ in "kv"] for _ in range(config.num_hidden_layers)]

    def get_kv_state(self, layer: int, *_: object) -> list[torch.Tensor]:
        return self._states[layer]

    def store_kv_state(self, *_: object) -> None:
        pass


def logits(
    directory: Path, ids: torch.Tensor, chunks: Sequence[int], context: int, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Return the logits [tokens, vocab] of ids [1, tokens], computed in chunks that end at the given places."""
    core = import_package()
    compute_as_transformers()
    for function in (rms_norm, layer_norm, head_norm, softcap_, rope_, stloader_read):
        monkeypatch.setattr(sys.modules["exllamav2_ext"], function.__name__, function, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    attention: Any = importlib.import_module("exllamav2.attn")
    monkeypatch.setattr(attention, "flash_attn_with_kvcache", attend, raising=False)
    for feature in ("has_flash_attn_with_window", "has_flash_attn_with_softcap"):
        monkeypatch.setattr(attention, feature, True)
    for name in ("attn_params", "module"):
        module = importlib.import_module(f"exllamav2.{name}")
        monkeypatch.setattr(module, "safe_move_tensor", lambda tensor, *_, **__: tensor)
    config = core.ExLlamaV2Config()
    config.model_dir = str(directory)
    config.prepare()
    config.max_seq_len, config.no_graphs = context, True
    model = core.ExLlamaV2(config)
    for module in model.modules:
        module.set_device_idx(-1)
    tables = object.__new__(importlib.import_module("exllamav2.device").ExLlamaV2DeviceContext)
    tables.model, tables.device_idx, tables.archparams = model, -1, config.arch.lm
    tables.prepare_sincos()
    model.get_device_context = lambda *_, **__: tables
    size = -(-context // PAGE) * PAGE
    cache, pages, found, past = _Cache(config, size), torch.arange(size // PAGE, dtype=torch.int32)[None], [], 0
    with torch.inference_mode():
        for module in model.modules:
            module.load()
        for end in (*chunks, ids.shape[1]):
            lengths = torch.tensor([past], dtype=torch.int32)
            params = attention.ExLlamaV2Attention.PagedParams(1, pages, lengths, past, PAGE, end - past)
            found.append(model.forward_chunk(ids[:, past:end], cache=cache, attn_params=params)["logits"][0])
            past = end
    return torch.cat(found).float()
