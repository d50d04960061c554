"""The part that a start and a wake have in common: their turn, their places in groups, and the wait for GPU memory.

A start (``start.Start``) and a wake (``wake.Wake``) take GPU memory. ``starts`` says whose turn it is. One that finds
no room puts idle models to sleep or unloads them, or waits until busy models are idle.
"""

import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from supervisor.event_history import EventKind, noted
from supervisor.fleet.replica import Replica
from supervisor.placement.eviction import Eviction, EvictionCandidate, NoRoom, choose
from supervisor.placement.gpu_requests import gpu_request_of
from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import GpuRequest, PlacementRefused, gib
from supervisor.workers.lifecycle import GOING_DOWN, WorkerState

if TYPE_CHECKING:
    from supervisor.fleet.starts import Starts

_LEAVING = (*GOING_DOWN, WorkerState.FALLING_ASLEEP)
IDLE_WAIT_S = 60.0
"""Seconds that a start waits for busy models to become idle, if there would be room without them. The time in which
one of them is loading does not count. The wait for places in groups and the wait for memory each have this time."""
RETRY_S = 0.25
"""Seconds between two decisions about a start that waits for room or for a reading of the GPUs."""
READING_WAIT_S = 30.0
"""Seconds that a start waits for GPUs whose answer is late. A worker that is started without a reading may take memory
that other workers need."""


class Stage(Enum):
    ESTIMATE = "estimate"
    """The model's needs are not known yet."""
    TURN = "turn"
    """The start waits for others that are decided before it."""
    MEMORY = "memory"
    """The start waits for the memory of dead workers, or is being decided."""
    ROOM = "room"
    """There is no room, or no reading of the GPUs. The start is decided again later."""
    REFUSED = "refused"
    """The worker is not started. The next turn of the loop counts that as its end."""
    OVER = "over"
    """The process was launched, or the refusal was counted."""


class Admission:
    """One worker that is to take GPU memory.

    number  the place in the order in which starts and wakes began
    """

    def __init__(self, starts: "Starts", replica: Replica, number: int) -> None:
        self._starts = starts
        self.replica = replica
        self._spec = replica.spec
        self._gpu_request = gpu_request_of(replica.spec)
        self._number = number
        self.stage = Stage.ESTIMATE
        self.leaving: set[str] = set()
        """Workers that are put to sleep or unloaded to make room for this one."""
        self.has_places = False
        """Whether the model has its places in its groups. Without them this one holds no memory either."""
        self._claims = False
        """Whether workers were put to sleep or unloaded for this one. Their memory is reserved for it, even if a
        request needs one of those workers again at once."""
        self._no_room_since: float | None = None
        self._no_reading_since: float | None = None

    # --- what a start and a wake do differently -------------------------------------------------------------------

    def _decide(self) -> None:
        """Take the memory if there is room. Else wait for it, or end without it."""
        raise NotImplementedError

    def _refuse_place(self, why: str) -> None:
        """End without the memory, because a group of the model is full."""
        raise NotImplementedError

    def cancel(self) -> bool:
        """End this, because the worker was ordered down. Return whether that is reported as the end of a process."""
        raise NotImplementedError

    # --- the wait for places in groups ----------------------------------------------------------------------------

    def take_turn(self) -> None:
        """Take the model's places in its groups, then wait for memory. ``Starts`` calls this when the turn of this
        start has come."""
        if not self.has_places:
            missing = self._starts.places.missing(self.replica.model)
            if missing:
                self._wait_for_place(missing)
                return
            self.has_places, self._no_room_since = True, None
        self._wait_for_memory()

    def _wait_for_place(self, missing: Mapping[str, int]) -> None:
        """Make models of full groups leave, or wait until one is idle, or end without a place."""
        places = self._starts.places
        leaving = places.make_room(self.replica, missing)
        if not isinstance(leaving, NoRoom):
            self.stage, self.leaving = Stage.ROOM, set(leaving)
            return
        why = places.refusal(missing)
        if leaving is NoRoom.NEVER or not self._waits_for_idle(why, places.is_loading(missing)):
            self._refuse_place(why)

    # --- the wait for memory ------------------------------------------------------------------------------------

    def _wait_for_memory(self) -> None:
        """Decide now, or as soon as dead workers have given back their memory of the model's GPUs."""
        self.stage = Stage.MEMORY
        self._starts.vram.when_free(self.replica.name, self._decide)

    def _waits_for_reading(self) -> bool:
        """Return whether the start is decided again later, because the GPUs answer late."""
        now = time.monotonic()
        if self._no_reading_since is None:
            self._no_reading_since = now
            self._say(f"waits for the GPUs to be read: {self._starts.vram.trouble}")
        if now - self._no_reading_since >= READING_WAIT_S:
            return False
        self._decide_again_at(now + RETRY_S)
        return True

    def _waits_for_room(self, refused: PlacementRefused) -> bool:
        """Return whether the start is decided again later, because workers were unloaded or may soon be idle."""
        leaving = self._make_room(refused.missing)
        if not isinstance(leaving, NoRoom):
            self.stage, self.leaving, self._claims = Stage.ROOM, set(leaving), True
            return True
        loads = any(h.loading and h.placed.keys() & refused.missing.keys() for h in self._starts.holdings())
        return leaving is not NoRoom.NEVER and self._waits_for_idle(refused.message, loads)

    def _waits_for_idle(self, why: str, one_loads: bool) -> bool:
        """Return whether the start is decided again later, because a busy model may soon be idle.

        one_loads  whether one of these models is being loaded
        """
        now = time.monotonic()
        if self._no_room_since is None:
            self._no_room_since = now
            self._say(f"{why}; waits for busy models to become idle")
        if one_loads:
            self._no_room_since = now  # a worker that loads cannot be idle yet, and a large model may load for longer
        if now - self._no_room_since >= IDLE_WAIT_S:
            return False
        self._decide_again_at(now + RETRY_S)
        return True

    def _make_room(self, missing: Mapping[int, int]) -> tuple[str, ...] | NoRoom:
        """Put idle workers to sleep, or unload them, if this one needs their memory.

        Return their names, or the reason why none makes room.

        Workers that load now, or leave anyway, count as busy: the start waits for them.

        missing  GPU → bytes
        """
        assert self._gpu_request is not None
        registry, replica = self._starts.registry, self.replica
        now, reading = time.monotonic(), self._starts.vram.reading() or []
        candidates = [
            self._candidate(other, reading, now)
            for other in registry.replicas.values()
            if other.state in _LEAVING or (other.model != replica.model and other.may_be_evicted)
        ]
        host_room = self._starts.sleepers.room(registry.replicas.values())
        chosen = choose(missing, candidates, one_suffices=self._gpu_request.one_suffices, host_room=host_room)
        if isinstance(chosen, NoRoom):
            return chosen
        self._say_evicted(missing, chosen)
        for eviction in chosen:
            if eviction.sleeps:
                self._starts.control.put_to_sleep(eviction.worker, f"evicted for {replica.label}")
            else:
                self._starts.control.unload(eviction.worker, f"evicted for {replica.label}")
        return tuple(eviction.worker for eviction in chosen)

    def _candidate(self, other: Replica, reading: Sequence[Gpu], now: float) -> EvictionCandidate:
        held, may_sleep = other.memory.comes_back(reading), other.can_sleep and other.state is not WorkerState.ASLEEP
        left = other.memory.left_asleep
        return EvictionCandidate(
            other.name,
            held,
            busy=not (self._starts.registry.is_idle(other) or other.state is WorkerState.ASLEEP),
            priority=other.spec.config.priority,
            load_s=float(other.info.get("load_seconds", 0)),
            idle_s=now - other.last_active,
            slept={gpu: max(0, size - left.get(gpu, 0)) for gpu, size in held.items()} if may_sleep else None,
            wake_s=self._starts.sleepers.seconds(other),
            host_bytes=max(0, other.sleep_bytes - other.host_bytes),
        )

    def _say_evicted(self, missing: Mapping[int, int], chosen: Sequence[Eviction]) -> None:
        short = ", ".join(f"{gib(size)} GiB on GPU {gpu}" for gpu, size in missing.items())
        parts = [
            f"{verb} {', '.join(names)}"
            for verb, sleeps in (("putting to sleep", True), ("unloading", False))
            if (names := [eviction.worker for eviction in chosen if eviction.sleeps is sleeps])
        ]
        message = f"{self.replica.shown}: needs {short}: {'; '.join(parts)}"
        self._starts.log.info("%s", message, extra=noted(EventKind.EVICTION, self.replica.log_name))

    def _decide_again_at(self, when: float) -> None:
        self.stage = Stage.ROOM
        self._starts.timers.at(when, self.decide_again)

    def decide_again(self) -> None:
        """Have the start wait for its turn again, if it still waits for room or for a reading."""
        if self.stage is Stage.ROOM:
            self.stage = Stage.TURN
            self._starts.advance()

    # --- whose turn it is ---------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[bool, int]:
        """The place among the starts under way. Pinned models come first, then the starts that began earlier."""
        return self._gpu_request is None or self._gpu_request.pins is None, self._number

    def goes_before(self, other: "Admission") -> bool:
        """Return whether ``other`` has to wait until this start is decided."""
        if self is other or self.stage is Stage.REFUSED:
            return False
        # Places go to the start that began first, so that no start is overtaken again and again. A start with claims on
        # memory has its places, so that no two starts can wait for each other, one for memory and one for a place.
        want_places = not self.has_places and not other.has_places and self._number < other._number
        if want_places and self._starts.places.share(self.replica.model, other.replica.model):
            return True
        if not _may_want_same(self._gpu_request, other._gpu_request):
            return False
        if self._claims or other._claims:
            return self._claims and (not other._claims or self.order < other.order)
        pinned_waits = self._no_reading_since is not None and not self.order[0] and other.order[0]
        return self.order < other.order and (self.stage is Stage.ESTIMATE or pinned_waits)

    def _say(self, text: str) -> None:
        name = self.replica.name
        self._starts.log.info("%s", f"{name}: {text}", extra=noted(EventKind.PLACEMENT, name))

    def _end(self) -> None:
        self.stage = Stage.OVER
        self._starts.remove(self)


def _may_want_same(one: GpuRequest | None, other: GpuRequest | None) -> bool:
    """Return whether two models may want the same GPU."""
    if one is None or other is None:
        return False
    return one.pins is None or other.pins is None or bool({*one.pins} & {*other.pins})
