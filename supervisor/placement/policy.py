"""Choose the GPUs for a worker. Pure: readings, holdings and limits are arguments; sizes are in bytes.

The memory of a worker that still loads is counted once: the bytes that NVML already lists for the worker are subtracted
from the bytes that it is about to take. A GPU has the index that nvidia-smi gives it, also in the supervisor's own
CUDA_VISIBLE_DEVICES. Workers get only GPUs that this variable names.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.process.worker_spec import DEFAULT_RESERVE_MB
from supervisor.config.spelling import Limit
from supervisor.placement.gpus import MOST_GPUS, Gpu

# The GPU memory that a worker needs, and its division among several GPUs. Pure; sizes in bytes.


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
        return sum(self.parts(gpus).values())

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


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """The GPUs that a model asks for in models.yaml.

    pins   indices and UUIDs (or their beginnings); None: ``auto``
    split  the way in which the model is divided among several GPUs
    count  the number of GPUs
    """

    pins: tuple[str, ...] | None
    split: Split = field(default_factory=Split)
    count: int = 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the numbers of GPUs for which the needs must be known.

        For ``auto`` they are its own number and all larger ones: if so few GPUs have no room, the error proposes the
        number that has.
        """
        if self.pins is not None or self.split.by_hand is not None:
            return (self.count if self.pins is None else len(self.pins),)
        return tuple(range(self.count, MOST_GPUS + 1))

    @property
    def one_suffices(self) -> bool:
        """Return whether room on any one GPU is enough."""
        return self.pins is None and self.count == 1


@dataclass(frozen=True, slots=True)
class Holding:
    """The GPU memory of one of our workers.

    placed   GPU → bytes that the worker was admitted with
    loading  whether the worker still loads, and so may not hold all these bytes yet
    """

    worker: str
    pid: int | None
    placed: Mapping[int, int]
    loading: bool


@dataclass(frozen=True, slots=True)
class Room:
    """The room on one GPU for the next worker.

    limit   the most bytes that our workers may hold here together; None: no limit
    ours    worker → bytes that it holds
    coming  worker → bytes that it is about to take in addition
    """

    gpu: Gpu
    limit: int | None = None
    ours: Mapping[str, int] = field(default_factory=dict)
    coming: Mapping[str, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return max(0, self.gpu.free - sum(self.coming.values()))

    @property
    def under_limit(self) -> int | None:
        if self.limit is None:
            return None
        return max(0, self.limit - sum(self.ours.values()) - sum(self.coming.values()))

    @property
    def bytes(self) -> int:
        """Return the bytes that the next worker may take."""
        return self.free if self.under_limit is None else min(self.free, self.under_limit)

    @property
    def held(self) -> Mapping[str, int]:
        """Return worker → bytes that it holds, and is about to take."""
        return Counter(self.ours) + Counter(self.coming)

    @property
    def others(self) -> int:
        """Return the bytes that the driver and processes other than our workers hold."""
        return max(0, self.gpu.total - self.gpu.free - sum(self.ours.values()))


@dataclass(frozen=True, slots=True)
class Placed:
    """The GPUs on which a worker is placed.

    bytes    GPU → bytes that the worker will hold there; empty if its needs are not known
    devices  the worker's CUDA_VISIBLE_DEVICES
    """

    gpus: tuple[Gpu, ...]
    bytes: Mapping[int, int]
    devices: str


@dataclass(frozen=True, slots=True)
class PlacementRefused:
    """The reason why a worker cannot be placed.

    message  one line
    missing  GPU → bytes by which the GPU is too full; empty if more room would not help
    """

    message: str
    missing: Mapping[int, int] = field(default_factory=dict)


def rooms(
    reading: Sequence[Gpu], holdings: Sequence[Holding], limits: Mapping[str, Limit] | Limit | None = None
) -> list[Room]:
    """Return the room on every GPU, with the bytes that our workers hold and are about to take there.

    limits  one limit for all GPUs, or GPU (index or UUID) → limit
    """
    return [_room(gpu, holdings, limit_of(gpu, limits)) for gpu in reading]


def _room(gpu: Gpu, holdings: Sequence[Holding], limit: int | None) -> Room:
    ours: Counter[str] = Counter()  # two holdings have the same name while one worker replaces the other
    coming: Counter[str] = Counter()
    for holding in holdings:
        placed = holding.placed.get(gpu.index, 0)
        held = gpu.processes.get(holding.pid) if holding.pid is not None else None
        if holding.loading:
            coming[holding.worker] += max(0, placed - (held or 0))
        elif held is None:
            held = placed  # NVML does not list this pid (another pid namespace), or does not say how many bytes
        ours[holding.worker] += held or 0
    return Room(gpu, limit, +ours, +coming)  # without those that hold nothing


def limit_of(gpu: Gpu, limits: Mapping[str, Limit] | Limit | None) -> int | None:
    """Return how many bytes of a GPU all workers together may hold; None for no limit. ``limits`` as for ``rooms``."""
    if limits is None or isinstance(limits, Limit):
        return limits.of(gpu.total) if limits else None
    return next((limit.of(gpu.total) for pin, limit in limits.items() if gpu.is_meant(pin)), None)


def place(
    gpu_request: GpuRequest, needs: Mapping[int, Needs] | None, rooms: Sequence[Room], outer: str | None = None
) -> Placed | PlacementRefused:
    """Return the GPUs for a worker, or the reason why it cannot be placed.

    needs  by number of GPUs, see ``GpuRequest.counts``; None: not known, and then nothing is refused for lack of room
    rooms  all GPUs of the machine
    outer  the supervisor's CUDA_VISIBLE_DEVICES; None: all GPUs
    """
    allowed = visible(rooms, outer)
    if isinstance(allowed, PlacementRefused):
        return allowed
    if gpu_request.pins is None:
        return _auto(gpu_request, needs, allowed, outer)
    chosen = []
    for pin in gpu_request.pins:
        meant = [room for room in rooms if room.gpu.is_meant(pin)]
        if refusal := _unusable(pin, meant, rooms, allowed, outer):
            return refusal
        if meant[0] in chosen:
            return PlacementRefused(
                f"gpu names GPU {meant[0].gpu.index} twice, as {pin} the second time: remove one of them"
            )
        chosen += meant
    verdict = _on(chosen, needs[len(chosen)] if needs else None, gpu_request.split, ",".join(gpu_request.pins))
    if isinstance(verdict, PlacementRefused) and needs and len(chosen) == 1:
        other = [str(room.gpu.index) for room in allowed if room.bytes >= needs[1].total(1) and not room.gpu.mig]
        if other:
            which = f"GPUs {', '.join(other)} have" if len(other) > 1 else f"GPU {other[0]} has"
            return PlacementRefused(f"{verdict.message}; {which} room", verdict.missing)
    return verdict


def visible(rooms: Sequence[Room], outer: str | None) -> list[Room] | PlacementRefused:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names. As in CUDA, an entry that means no GPU ends the list."""
    if outer is None:
        return list(rooms)
    found: list[Room] = []
    for entry in outer.split(","):
        text = entry.strip()
        if text.startswith("MIG-"):
            return PlacementRefused(
                f"CUDA_VISIBLE_DEVICES={outer} of the supervisor names a MIG instance, which is not supported"
            )
        room = next((r for r in rooms if text and _is_entry(r.gpu, text)), None)
        if room is None:
            break
        if room not in found:
            found.append(room)
    return found


def _is_entry(gpu: Gpu, text: str) -> bool:
    return gpu.index == int(text) if text.isdecimal() else gpu.is_meant(text)


def _unusable(
    pin: str, meant: Sequence[Room], rooms: Sequence[Room], allowed: Sequence[Room], outer: str | None
) -> PlacementRefused | None:
    if not meant:
        there = ", ".join(str(room.gpu.index) for room in rooms) or "none"
        return PlacementRefused(
            f"GPU {pin} does not exist: there is {there}" if rooms else f"GPU {pin}: this box has no GPU"
        )
    if len(meant) > 1:
        both = " and ".join(f"{room.gpu.index} ({room.gpu.uuid})" for room in meant)
        return PlacementRefused(f"{pin} means several GPUs, {both}: write more of the UUID")
    if meant[0] not in allowed:
        left = ", ".join(str(room.gpu.index) for room in allowed) or "none"
        return PlacementRefused(
            f"CUDA_VISIBLE_DEVICES={outer} of the supervisor does not leave GPU {pin}: it leaves {left}"
        )
    if meant[0].gpu.mig:
        return PlacementRefused(
            f"GPU {pin} is in MIG mode, which is not supported: pin another, or end that (nvidia-smi -mig 0)"
        )
    return None


def place_unseen(gpu_request: GpuRequest, outer: str | None) -> Placed | PlacementRefused:
    """Return the placement of a worker while the GPUs cannot be read: on its pins as models.yaml has them.

    outer  the supervisor's CUDA_VISIBLE_DEVICES. It is compared with the pins only where both are indices
    """
    if gpu_request.pins is None:
        return PlacementRefused(
            "gpu: auto needs NVML, which does not answer here (the supervisor's log says why): pin a GPU"
        )
    entries = [entry.strip() for entry in outer.split(",")] if outer is not None else []
    if outer is not None and all(entry.isdecimal() for entry in entries if entry):
        hidden = [pin for pin in gpu_request.pins if pin.isdecimal() and pin not in entries]
        if hidden or not any(entries):
            pin = (hidden or gpu_request.pins)[0]
            return PlacementRefused(f"CUDA_VISIBLE_DEVICES={outer} of the supervisor does not leave GPU {pin}")
    return Placed((), {}, ",".join(gpu_request.pins))


def _auto(
    gpu_request: GpuRequest, needs: Mapping[int, Needs] | None, allowed: Sequence[Room], outer: str | None
) -> Placed | PlacementRefused:
    usable = [room for room in allowed if not room.gpu.mig]
    if not usable:
        why = "every GPU is in MIG mode, which is not supported" if allowed else "this box has no GPU"
        if outer is not None and not allowed:
            why = f"CUDA_VISIBLE_DEVICES={outer} of the supervisor leaves no GPU"
        return PlacementRefused(f"gpu: auto: {why}")
    # Of GPUs that are equally free, take the one with fewer of our workers: how much these will take may not be known.
    order = sorted(usable, key=lambda room: (-room.bytes, len(room.ours) + len(room.coming), room.gpu.index))
    count = gpu_request.count
    if len(order) < count:
        return PlacementRefused(f"gpu: auto: {count} GPUs are wanted (gpus), and {len(order)} can be used")
    chosen = sorted(order[:count], key=lambda room: room.gpu.index)
    devices = ",".join(room.gpu.uuid for room in chosen)
    verdict = _on(chosen, needs[count] if needs else None, gpu_request.split, devices)
    if isinstance(verdict, Placed) or needs is None:
        return verdict
    text, missing = verdict.message, verdict.missing
    if count == 1:
        best, wanted = order[0], needs[1].total(1)
        text = f"{needs[1].text(1)}, no GPU has that much: {room_text(best)}, {gib(wanted - best.bytes)} missing"
        missing = {room.gpu.index: wanted - room.bytes for room in order}
    for more in range(count + 1, len(order) + 1):
        among = sorted(order[:more], key=lambda room: room.gpu.index)
        split = Split(tensors=gpu_request.split.tensors, engine_chooses=True)
        if more in needs and isinstance(_on(among, needs[more], split, ""), Placed):
            *first, last = (room.gpu.index for room in among)
            text += f"; `gpus: {more}` would divide it among GPUs {', '.join(map(str, first))} and {last}"
            break
    return PlacementRefused(text, missing)


def _on(chosen: Sequence[Room], needs: Needs | None, split: Split, devices: str) -> Placed | PlacementRefused:
    """Return the placement on exactly these GPUs, or the reason why the worker cannot be placed there."""
    gpus = tuple(room.gpu for room in chosen)
    limited = [room for room in chosen if room.under_limit is not None and room.under_limit < room.free]
    if limited and split.engine_chooses:
        number = limited[0].gpu.index
        return PlacementRefused(
            f"{room_text(limited[0])}; the engine's own split would fill GPU {number} beyond that: add gpu_split, or "
            "raise vram_limit"
        )
    if needs is None:
        return Placed(gpus, {}, devices)
    shares = divide(needs, [room.bytes for room in chosen], split)
    missing = {room.gpu.index: share - room.bytes for room, share in zip(chosen, shares, strict=True)}
    if all(short <= 0 for short in missing.values()):
        return Placed(gpus, dict(zip((gpu.index for gpu in gpus), shares, strict=True)), devices)
    text = f"{needs.text(len(chosen))}, {'; '.join(map(room_text, chosen))}"
    if len(chosen) > 1:
        parts = ", ".join(
            f"{gib(share)} on GPU {gpu.index}" for gpu, share in zip(gpus, shares, strict=True)
        )  # fmt: skip
        text += f"; it would take {parts}"
    elif enough := [name for name, held in chosen[0].held.items() if held >= missing[gpus[0].index]]:
        text += f"; without {enough[0]} it would fit"
    return PlacementRefused(text, {index: short for index, short in missing.items() if short > 0})


def room_text(room: Room) -> str:
    """Return a text such as ``GPU 1 has 8.9 of 24.0 free: qwen 12.0, other processes 3.1``."""
    limit = room.under_limit
    if limit is not None and limit < room.free:
        head = f"GPU {room.gpu.index} has {gib(limit)} left of its vram_limit, {gib(room.limit or 0)}"
        holders = []
    else:
        head = f"GPU {room.gpu.index} has {gib(room.free)} of {gib(room.gpu.total)} free"
        holders = [f"other processes {gib(room.others)}"] if room.others else []
    ours = [f"{name} {gib(size)}" for name, size in room.ours.items()]
    coming = [f"{name} about to load {gib(size)}" for name, size in room.coming.items()]
    who = ", ".join([*ours, *coming, *holders])
    return f"{head}: {who}" if who else head


def gib(size: int) -> str:
    """Return a size in GiB, such as ``21.4``. Sizes below 0.5 GiB get two digits behind the point."""
    return f"{size / 2**30:.1f}" if size >= 2**30 / 2 else f"{size / 2**30:.2f}"


# Decide whether a worker that sleeps has room to wake. Pure; sizes are in bytes.


def room_to_wake(placed: Placed, held: Mapping[int, int], rooms: Sequence[Room]) -> PlacementRefused | None:
    """Return None if the worker has room on all its GPUs, else the arithmetic.

    placed  where the worker was placed, and what it holds there when it is awake
    held    GPU → bytes that its process holds there now
    """
    short, texts = {}, []
    for room in rooms:
        gpu = room.gpu.index
        wanted = max(0, placed.bytes.get(gpu, 0) - held.get(gpu, 0))
        if wanted > room.bytes:
            short[gpu] = wanted - room.bytes
            texts.append(f"needs {gib(wanted)} GiB more on GPU {gpu} to wake, {room_text(room)}")
    return PlacementRefused("; ".join(texts), short) if short else None


# The choice of a worker's CPUs: those next to its GPUs. Pure.
#
# No memory policy is needed: Linux takes each page from the NUMA node of the CPU that first touches the page.


def near_cpus(gpus: Sequence[Gpu], allowed: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs that a worker with these GPUs should run on. Empty if there is no need or no way to choose.

    allowed  the CPUs that the supervisor itself may use
    """
    if not gpus or not all(gpu.cpus for gpu in gpus):
        return ()
    near = frozenset[int]().union(*(gpu.cpus for gpu in gpus)) & frozenset(allowed)
    return tuple(sorted(near)) if near and near != frozenset(allowed) else ()


def numa_nodes(gpus: Sequence[Gpu], cpus: Collection[int]) -> frozenset[int]:
    """Return the NUMA nodes next to the GPUs of a worker that is kept to these CPUs. Empty for one that is not kept."""
    return frozenset[int]().union(*(gpu.numa_nodes for gpu in gpus)) if cpus else frozenset()


def ranges(numbers: Collection[int]) -> str:
    """Return the numbers in the kernel's form for lists of CPUs, for example ``0-15,32-47``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
