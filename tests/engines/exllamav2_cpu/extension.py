"""A stand-in in numpy for the functions of ``exllamav2_ext`` 0.3.2 that the generator, sampler and cache call.

The functions follow exllamav2_ext/ext_sampling.cpp, cpp/sampling.cpp, cpp/generator.cpp, ext_cache.cpp and
cuda/cache.cu, with their order of operations and their quirks. top_p, top_a, min_p and XTC are left out, since the
engine does not use them. Where the kernel would read invalid memory, these functions raise: that is an engine's bug.
"""

import itertools
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def count_match(a: torch.Tensor, b: torch.Tensor, max_a: int) -> int:
    """Count the equal elements at the beginning of a [1, n] and b [1, m], at most max_a."""
    size = min(max_a, b.shape[1])
    if size <= 0:
        return 0
    differs = np.flatnonzero(a[0, :size].numpy() != b[0, :size].numpy())
    return int(differs[0]) if differs.size else size


def partial_strings_match(text: Any, offsets: Any, strings: Any) -> int:
    raise AssertionError("the engine looks for strings itself")


def cache_rotate(cache: torch.Tensor, order: torch.Tensor, temp: torch.Tensor) -> None:
    """Copy page order[i + 1] to page order[i] of the cache [pages, ...], and the first of them to the last."""
    pages = order.tolist()
    temp.view(-1).copy_(cache[pages[0]].view(-1))
    for target, source in itertools.pairwise(pages):
        cache[target].copy_(cache[source])
    cache[pages[-1]].copy_(temp.view_as(cache[pages[-1]]))


def fast_fill_cpu_ones_bool(tensor: torch.Tensor) -> None:
    tensor.fill_(True)


def fast_fadd_cpu(a: torch.Tensor, b: torch.Tensor) -> None:
    """Add b to every len(b) elements of a. Both are float32, and a is contiguous."""
    assert a.dtype == b.dtype == torch.float32
    assert a.is_contiguous()
    assert a.numel() % b.numel() == 0, "a and b are incompatible sizes"
    a.view(-1, b.numel()).add_(b)


def logit_filter_exclusive(filter: torch.Tensor, lists: list[list[int]]) -> None:
    for row, allowed in zip(filter, lists, strict=True):
        keep = row[allowed].clone()
        row.fill_(False)
        row[allowed] = keep


def apply_rep_penalty(
    sequence: torch.Tensor, penalty: float, sustain: int, decay: int, frequency: float, presence: float,
    logits: torch.Tensor,
) -> None:  # fmt: skip
    """Apply the penalties, newest token first: full strength for ``sustain`` tokens (-1: all), then fading out over
    ``decay`` more tokens."""
    row = logits[0, 0].numpy()
    ids = sequence[0].tolist()
    left = len(ids) if sustain == -1 else sustain
    begin = max(len(ids) - left - decay, 0)
    d_penalty = (1 - penalty) / decay if decay else 0.0
    d_frequency, d_presence = (-frequency / decay, -presence / decay) if decay else (0.0, 0.0)
    seen: set[int] = set()
    for token in reversed(ids[begin:]):
        if token < len(row):
            if token not in seen:
                with np.errstate(divide="ignore"):
                    value = row[token] / np.float32(penalty) if row[token] > 0 else row[token] * np.float32(penalty)
                row[token] = value - presence
                seen.add(token)
            row[token] -= frequency
        left -= 1
        if left < 0:
            penalty, frequency, presence = penalty + d_penalty, frequency + d_frequency, presence + d_presence


def sample_basic(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, top_a: float, min_p: float, tfs: float,
    typical: float, random: float, output_tokens: torch.Tensor, output_probs: torch.Tensor,
    output_kprobs: torch.Tensor, output_ktokens: torch.Tensor, logit_filter: torch.Tensor, mirostat: bool,
    mirostat_mu: list[float], mirostat_tau: float, mirostat_eta: float, post_temperature: float,
    xtc_mask: torch.Tensor, xtc_probability: float, xtc_threshold: float, min_temp: float, max_temp: float,
    temp_exponent: float, smoothing_factor: float, skew: float,
) -> list[float]:  # fmt: skip
    """Draw one token from logits [1, 1, vocab] (float32), at ``random`` in [0, 1) of the cumulated probabilities."""
    assert logits.dtype == torch.float32
    assert logits.shape[:2] == (1, 1)
    assert not any((top_p % 1, top_a, min_p % 1, xtc_probability)), "the package's own are wrong, and not used"
    temperature, smoothing_factor = float(np.float32(temperature)), float(np.float32(smoothing_factor))
    if temperature < 0.01:
        temperature, top_k = 1.0, 1
    exponent = 1.0
    if smoothing_factor > 0:
        exponent, temperature = 2.0, temperature / smoothing_factor
    row = logits[0, 0].numpy()
    allowed = np.ones(len(row), bool) if logit_filter.is_meta else logit_filter[0].numpy()
    if not (row[allowed] > -1e38).any() and (top_k == 1 or not np.isnan(row).any()):
        raise AssertionError("no token is left: the kernel would index with what is on its stack")
    probs, ids = _softmax(row, allowed, temperature, exponent)
    if 0 < top_k < len(row):
        order = np.argsort(-probs, kind="stable")[:top_k]
        probs, ids = _normal(probs[order]), ids[order]
    if len(ids) > 1 and 0 < tfs < 1:
        probs, ids = _tail_free(probs, ids, tfs)
    if len(ids) > 1 and 0 < typical < 1:
        probs, ids = _typical(probs, ids, typical)
    if mirostat and not mirostat_mu[0]:
        mirostat_mu = [2 * mirostat_tau]
    if len(ids) > 1 and mirostat:
        probs, ids = _sorted(probs, ids)
        likely = probs >= 2.0 ** -mirostat_mu[0]
        likely[0] = True
        probs, ids = _keep(probs, ids, likely)
    if len(ids) > 1 and (post_temperature != 1.0 or max_temp > min_temp):
        if max_temp > min_temp:
            positive = probs[probs > 0]
            entropy = float(-(positive * np.log(positive)).sum()) / (np.log(len(ids)) or 1.0)
            post_temperature = min_temp + (max_temp - min_temp) * entropy**temp_exponent
        with np.errstate(all="ignore"):
            probs = _normal(np.power(probs, np.float32(1 / post_temperature if post_temperature else np.inf)))
    size = 0 if output_kprobs.is_meta else output_kprobs.shape[2]
    if size or skew:
        probs, ids = _sorted(probs, ids, keep_all=True)
    if size:
        shown = [i for i in range(min(size, len(ids))) if probs[i] > 0]
        others = (i for i in range(len(row)) if i not in set(ids[: len(shown)].tolist()))
        for rank in range(size):
            fake = rank >= len(shown)
            output_ktokens[0, 0, rank] = next(others) if fake else int(ids[rank])
            output_kprobs[0, 0, rank] = 0.0 if fake else float(probs[rank])
    if skew:
        random = random ** float(np.exp(-skew))
    sums = np.cumsum(probs, dtype=np.float32)
    at = int(np.searchsorted(sums, np.float32(random * 0.9998)))
    at = min(at, len(ids) - 1)
    while at and probs[at] == 0:
        at -= 1
    output_tokens[0, 0] = int(ids[at])
    output_probs[0, 0] = float(probs[at])
    if mirostat:
        return [mirostat_mu[0] + mirostat_eta * (mirostat_tau + float(np.log2(probs[at])))]
    return mirostat_mu


def _softmax(row: Array, allowed: Array, temperature: float, exponent: float) -> tuple[Array, Array]:
    with np.errstate(all="ignore"):
        x = np.where(allowed, row, np.float32(-1e38)) - row[allowed].max()
        x = -(x * x) if exponent == 2.0 else x
        probs = np.exp(np.maximum(x / np.float32(temperature), -88.37)).astype(np.float32)
    return _normal(np.where(allowed, probs, np.float32(0))), np.arange(len(row))


def _normal(probs: Array) -> Array:
    with np.errstate(all="ignore"):
        normal: Array = (probs / probs.sum()).astype(np.float32)
    return normal


def _keep(probs: Array, ids: Array, kept: Array) -> tuple[Array, Array]:
    return _normal(probs[kept]), ids[kept]


def _sorted(probs: Array, ids: Array, keep_all: bool = False) -> tuple[Array, Array]:
    """Sort by probability, likeliest first. Drop tokens below 1e-8 unless ``keep_all``."""
    order = np.argsort(-probs, kind="stable")
    if not keep_all:
        order = order[probs[order] >= 1e-8]
    return probs[order], ids[order]


def _tail_free(probs: Array, ids: Array, tfs: float) -> tuple[Array, Array]:
    if len(ids) < 3:
        return probs, ids
    probs, ids = _sorted(probs, ids)
    bend = np.abs(-probs[:-2] + 2 * probs[1:-1] - probs[2:])
    with np.errstate(all="ignore"):
        size = 1 + int((np.cumsum(bend) / bend.sum() <= tfs).sum())
    return _normal(probs[:size]), ids[:size]


def _typical(probs: Array, ids: Array, typical: float) -> tuple[Array, Array]:
    likely = probs >= 1e-8
    probs, ids = probs[likely], ids[likely]
    information = probs + np.log(probs + np.float32(1e-10))
    order = np.argsort(np.abs(information - (probs * information).sum()), kind="stable")
    size = max(1, int((np.cumsum(probs[order]) < typical).sum()))
    return _normal(probs[order][:size]), ids[order][:size]
