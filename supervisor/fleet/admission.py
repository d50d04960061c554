"""The part that a start and a wake have in common: their turn, their places in groups, and the wait for GPU memory.

A start (``start.Start``) and a wake (``wake.Wake``) take GPU memory. ``starts`` says whose turn it is. One that finds
no room puts idle models to sleep or unloads them, or waits until busy models are idle. ``placement.turns`` says when
busy models have to take no new requests for that.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from supervisor.event_history import EventKind, noted
from supervisor.fleet.replica import Replica
from supervisor.placement.eviction import Eviction, EvictionCandidate, NoRoom, Sizes, choose, who_yields
from supervisor.placement.gpu_requests import gpu_request_of
from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import GpuRequest, PlacementRefused, gib
from supervisor.placement.turns import Turn, behind
from supervisor.requests.in_flight import Awaited
from supervisor.requests.reports import awaited_text
from supervisor.workers.lifecycle import GOING_DOWN, WorkerState

if TYPE_CHECKING:
    from supervisor.fleet.starts import Starts

_LEAVING = (*GOING_DOWN, WorkerState.FALLING_ASLEEP)
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
        self.number = number
        self.stage = Stage.ESTIMATE
        self.leaving: set[str] = set()
        """Workers that are put to sleep or unloaded to make room for this one."""
        self.has_places = False
        """Whether the model has its places in its groups. Without them this one holds no memory either."""
        self._claims = False
        """Whether workers were put to sleep or unloaded for this one. Their memory is reserved for it, even if a
        request needs one of those workers again at once."""
        self.yielding: tuple[str, ...] = ()
        """Workers that take no new requests, because this one waits for their places or their memory."""
        self.awaited: frozenset[Any] = frozenset()
        """GPUs on which this one waits for busy models. Later starts make no model leave there."""
        self._turn = Turn(time.monotonic())
        crashed = bool(replica.life.history.recent)
        self._for_requests = replica.spec.config.lazy and (crashed or starts.registry.lacks_worker(replica.model))
        """Whether a model yields to this one only while requests wait for it. Else somebody has ordered the worker up,
        or it is to be up at all times."""
        self._has_waited = False
        self._shown: Awaited = ()
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
            self.has_places = True
            self._turn.begin_again()
            self._stop_waiting()
        self._wait_for_memory()

    def _wait_for_place(self, missing: Mapping[str, int]) -> None:
        """Make models of full groups leave, or wait until one is idle, or end without a place."""
        places = self._starts.places
        leaving = places.make_room(self.replica, missing)
        if not isinstance(leaving, NoRoom):
            self.stage, self.leaving = Stage.ROOM, set(leaving)
            self._stop_waiting()
            return
        why, (wanted, models) = places.refusal(missing), places.in_the_way(missing)
        yielding = self._turn.look(
            time.monotonic(), wanted, models, wanted=self.is_wanted, one_loads=places.is_loading(missing)
        )
        if leaving is NoRoom.NEVER or yielding is None:
            self._refuse_place(why)
            return
        in_the_way = yielding or who_yields(wanted, [replace(model, stays_s=0.0) for model in models])
        self._wait_for_busy(why, places.workers_of(yielding), places.workers_of(in_the_way))

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
        assert self._gpu_request is not None
        now, missing, one_suffices = time.monotonic(), refused.missing, self._gpu_request.one_suffices
        others = self._candidates(self._starts.vram.reading() or [], now)
        others = behind(others, self._starts.awaited_before(self.number))
        leaving = self._make_room(missing, others)
        if not isinstance(leaving, NoRoom):
            self.stage, self.leaving, self._claims = Stage.ROOM, set(leaving), True
            self._stop_waiting()
            return True
        one_loads = any(h.loading and h.placed.keys() & missing.keys() for h in self._starts.holdings())
        yielding = self._turn.look(
            now, missing, others, one_suffices=one_suffices, wanted=self.is_wanted, one_loads=one_loads
        )
        if leaving is NoRoom.NEVER or yielding is None:
            self._stop_waiting()
            return False
        at_last = [replace(other, stays_s=0.0) for other in others]
        in_the_way = yielding or who_yields(missing, at_last, one_suffices=one_suffices)
        held = [gpu for other in others if other.worker in yielding for gpu in other.held]
        self.awaited = frozenset(held or missing) if self.is_wanted else frozenset()
        self._wait_for_busy(refused.message, yielding, in_the_way)
        return True

    @property
    def is_wanted(self) -> bool:
        """Whether busy models have to make room: somebody has ordered the worker up, or requests wait for it and for no
        other worker of its model."""
        return not self._for_requests or self._starts.registry.lacks_worker(self.replica.model)

    def _wait_for_busy(self, why: str, yielding: tuple[str, ...], in_the_way: Sequence[str]) -> None:
        """Have the start decided again later, because busy models are in the way.

        yielding    the workers that take no new requests until then
        in_the_way  those that do not make room yet, too
        """
        if not self._has_waited:
            self._has_waited = True
            self._say(f"{why}; waits for busy models to become idle")
        self._starts.let_yield(self, yielding)
        self._show(self._starts.registry.awaited(in_the_way))
        self._decide_again_at(time.monotonic() + RETRY_S)

    def _stop_waiting(self) -> None:
        """Let all models go on that have yielded to this start, since it waits for busy models no more."""
        self.awaited = frozenset()
        self._starts.let_yield(self, ())
        self._show(())

    def _show(self, awaited: Awaited) -> None:
        """Show in ``status``, and to clients that wait, what this start waits for."""
        if awaited != self._shown:
            self._shown = awaited
            self.replica.waits = f"queued: waits for {awaited_text(awaited)}" if awaited else ""
            self._starts.fleet.waits_for(self.replica.model, awaited)

    def _make_room(
        self, missing: Mapping[int, int], candidates: Sequence[EvictionCandidate]
    ) -> tuple[str, ...] | NoRoom:
        """Put idle workers to sleep, or unload them, if this one needs their memory.

        Return their names, or the reason why none makes room.

        Workers that load now, or leave anyway, count as busy: the start waits for them.

        missing     GPU → bytes
        candidates  the workers that may leave
        """
        assert self._gpu_request is not None
        registry, replica = self._starts.registry, self.replica
        host_room = self._starts.sleepers.room(registry.replicas.values())
        chosen = choose(missing, candidates, one_suffices=self._gpu_request.one_suffices, host_room=host_room)
        if isinstance(chosen, NoRoom):
            return chosen
        self._say_evicted(missing, chosen)
        for eviction in chosen:
            self._starts.sleepers.evict(eviction.worker, f"evicted for {replica.label}", sleeps=eviction.sleeps)
        return tuple(eviction.worker for eviction in chosen)

    def _candidates(self, reading: Sequence[Gpu], now: float) -> list[EvictionCandidate]:
        """Return the workers that may make room: those of other models, and those that leave anyway."""
        return [
            self._candidate(other, reading, now)
            for other in self._starts.registry.replicas.values()
            if other.state in _LEAVING or (other.model != self.replica.model and other.may_be_evicted)
        ]

    def _candidate(self, other: Replica, reading: Sequence[Gpu], now: float) -> EvictionCandidate:
        leases = {} if other.process is None else other.process.leases
        held: Sizes = {**other.memory.comes_back(reading), **leases}
        may_sleep, left = other.can_sleep and other.state is not WorkerState.ASLEEP, other.memory.left_asleep
        return EvictionCandidate(
            other.name,
            held,
            busy=not (self._starts.registry.may_leave(other) or other.state is WorkerState.ASLEEP),
            priority=other.spec.config.priority,
            load_s=float(other.info.get("load_seconds", 0)),
            idle_s=now - other.last_active,
            slept={gpu: max(0, size - left.get(gpu, 0)) for gpu, size in held.items()} if may_sleep else None,
            wake_s=self._starts.sleepers.seconds(other),
            host_bytes=max(0, other.sleep_bytes - other.host_bytes),
            leaves=other.state in _LEAVING,
            stays_s=other.stays_s(now),
            yields=bool(other.yields_to),
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
        return self._gpu_request is None or self._gpu_request.pins is None, self.number

    def goes_before(self, other: "Admission") -> bool:
        """Return whether ``other`` has to wait until this start is decided."""
        if self is other or self.stage is Stage.REFUSED:
            return False
        # Places go to the start that began first, so that no start is overtaken again and again. A start with claims on
        # memory has its places, so that no two starts can wait for each other, one for memory and one for a place.
        want_places = not self.has_places and not other.has_places and self.number < other.number
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
        self._stop_waiting()
        self._starts.remove(self)


def _may_want_same(one: GpuRequest | None, other: GpuRequest | None) -> bool:
    """Return whether two models may want the same GPU."""
    if one is None or other is None:
        return False
    return one.pins is None or other.pins is None or bool({*one.pins} & {*other.pins})
