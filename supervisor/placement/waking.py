"""Decide whether a worker that sleeps has room to wake. Pure; sizes are in bytes."""

from collections.abc import Mapping, Sequence

from supervisor.placement.policy import Placed, PlacementRefused, Room, gib, room_text


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
