"""The GPU memory that a worker needs, and its division among several GPUs. Pure; sizes in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.process.worker_spec import DEFAULT_RESERVE_MB

CONTEXT_BYTES = 612 << 20
"""Bytes that the CUDA context of a process takes on each GPU. Measured on an H200, driver 580, torch 2.11. Other GPUs
may differ."""
HELD_BACK_BYTES = 256 << 20
"""Bytes that ExLlamaV2's automatic split keeps free on each GPU, beside its reserve, until all layers are loaded
(model.py, ``minimum_reserve_vram`` of ``load_autosplit_gen``)."""


@dataclass(frozen=True, slots=True)
class Split:
    """The way in which layers are divided among several GPUs.

    by_hand         bytes of weights on each GPU
    reserve         bytes that the automatic split leaves free on each GPU
    tensors         whether every layer is divided among all GPUs
    engine_chooses  whether the engine itself divides by the free memory that it finds when it loads
    """

    by_hand: tuple[int, ...] | None = None
    reserve: tuple[int, ...] | None = None
    tensors: bool = False
    engine_chooses: bool = False


def split_of(engine: str, options: Mapping[str, Any], count: int) -> Split:
    """Return the way in which an engine divides a model.

    options  the engine's keys of models.yaml
    count    the number of the worker's GPUs
    """
    by_hand, reserve = options.get("gpu_split"), options.get("autosplit_reserve")
    return Split(
        tuple(int(gb * 2**30) for gb in by_hand) if by_hand else None,
        tuple(mb << 20 for mb in reserve) if reserve else None,
        bool(options.get("tensor_parallel")),
        engine == "exllamav2" and count > 1 and not by_hand,
    )


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a worker takes on its GPUs together: an estimate without CUDA contexts, or ``vram`` of models.yaml.

    per_gpu   part of the workspace that every GPU needs for itself; ``workspace`` includes it once for each GPU
    declared  ``vram`` of models.yaml, which includes CUDA contexts; one size, or one for each GPU
    """

    weights: int = 0
    cache: int = 0
    draft: int = 0
    workspace: int = 0
    per_gpu: int = 0
    declared: tuple[int, ...] | None = None

    def total(self, gpus: int) -> int:
        """Return the bytes on this number of GPUs together, CUDA contexts included."""
        if self.declared is not None:
            return sum(self.declared)
        return self.weights + self.cache + self.draft + self.workspace + gpus * CONTEXT_BYTES

    def parts(self, gpus: int) -> dict[str, int]:
        """Return the bytes by name, as ``plan`` and ``status`` show them. Parts of zero bytes are left out."""
        if self.declared is not None:
            return {"declared": sum(self.declared)}
        named = {"weights": self.weights, "cache": self.cache, "draft": self.draft, "workspace": self.workspace}
        return {name: size for name, size in (named | {"context": gpus * CONTEXT_BYTES}).items() if size}

    def text(self, gpus: int) -> str:
        """Return a text such as ``needs 21.4 GiB (weights 16.1, cache 4.0, workspace 0.7, context 0.6)``."""
        return needs_text(self.parts(gpus))


def needs_text(parts: Mapping[str, int]) -> str:
    """Return ``Needs.text`` of needs with these ``Needs.parts``."""
    named = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
    source = "vram in models.yaml" if parts.keys() == {"declared"} else named
    return f"needs {sum(parts.values()) / 2**30:.1f} GiB ({source})"


def divide(needs: Needs, rooms: Sequence[int], split: Split) -> list[int]:
    """Return the bytes that the worker will take on each of its GPUs. If it does not fit, one size exceeds its room.

    rooms  bytes that may be taken on each GPU, in the order in which models.yaml names the GPUs
    """
    count = len(rooms)
    if needs.declared is not None:
        return list(needs.declared) if len(needs.declared) == count else [-(-needs.declared[0] // count)] * count
    if count == 1:
        return [needs.total(1)]
    fixed = _fixed(needs, count)
    rest = needs.weights + needs.cache + needs.workspace - count * needs.per_gpu
    if split.by_hand is not None:
        weights = _filled(needs.weights, split.by_hand)
        # the cache of a layer lies where the layer does
        return [own + rest * part // max(1, needs.weights) for own, part in zip(fixed, weights, strict=True)]
    spare = [max(0, room - own) for room, own in zip(rooms, fixed, strict=True)]
    if split.tensors:
        # in proportion to the free memory, as the package does
        spare = spare if any(spare) else [1] * count
        return [own + rest * part // sum(spare) for own, part in zip(fixed, spare, strict=True)]
    reserve = split.reserve or (DEFAULT_RESERVE_MB << 20,) * count
    held_back = [left + HELD_BACK_BYTES for left in reserve]
    spare = [max(0, part - left) for part, left in zip(spare, held_back, strict=True)]
    parts = _filled(rest, spare)
    if parts[-1] > spare[-1]:
        parts[-1] += held_back[-1]  # it would fit only without the bytes that are held back during the load
    return [own + part for own, part in zip(fixed, parts, strict=True)]


def parts_on(needs: Needs, share: int, number: int, count: int) -> dict[str, int]:
    """Return the parts of a share that ``divide`` returned, by name. ``number`` counts the worker's GPUs from 0."""
    if needs.declared is not None or count == 1:
        return needs.parts(1) if count == 1 else {"declared": share}
    own = _fixed(needs, count)[number]
    rest = needs.weights + needs.cache + needs.workspace - count * needs.per_gpu
    part = (share - own) / rest if rest else 0.0
    named = {
        "weights": int(needs.weights * part),
        "cache": int(needs.cache * part),
        "draft": needs.draft if number == 0 else 0,
        "workspace": needs.per_gpu + int((needs.workspace - count * needs.per_gpu) * part),
        "context": CONTEXT_BYTES,
    }
    return {name: size for name, size in named.items() if size}


def _fixed(needs: Needs, count: int) -> list[int]:
    """Return the bytes that cannot be divided: a context and a workspace on each GPU, the draft model on the first."""
    return [CONTEXT_BYTES + needs.per_gpu + (needs.draft if index == 0 else 0) for index in range(count)]


def _filled(size: int, rooms: Sequence[int]) -> list[int]:
    """Fill one room after the other. The last one also gets the bytes that fit nowhere."""
    parts = []
    for room in rooms[:-1]:
        parts.append(min(size, room))
        size -= parts[-1]
    return [*parts, size]
