"""Wake a worker that is asleep: wait for room on the GPUs that it was placed on, then tell it to take its memory."""

from typing import TYPE_CHECKING

from protocol.codec import encode
from protocol.messages import Wake as WakeMessage
from supervisor.fleet.admission import Admission, Stage
from supervisor.fleet.replica import Replica
from supervisor.placement.policy import Holding, PlacementRefused, rooms
from supervisor.placement.waking import room_to_wake
from supervisor.requests.in_flight import ToWorker

if TYPE_CHECKING:
    from supervisor.fleet.starts import Starts


class Wake(Admission):
    """The wake of one worker. ``Starts.begin_wake`` makes it.

    The worker's process has a context and addresses on its GPUs, so it wakes on these GPUs or not at all.
    """

    def __init__(self, starts: "Starts", replica: Replica, number: int) -> None:
        super().__init__(starts, replica, number)
        self.stage = Stage.TURN

    def _decide(self) -> None:
        starts, memory = self._starts, self.replica.memory
        reading = starts.vram.reading()
        if memory.placed is None or (reading is None and not starts.vram.late):  # on the CPU, or NVML tells nothing
            self._tell()
            return
        if reading is None:
            if not self._waits_for_reading():
                self._turn_away(PlacementRefused(f"the GPUs cannot be read: {starts.vram.trouble}"))
            return
        self._no_reading_since = None
        limits = starts.registry.config.supervisor.vram_limit
        refused = room_to_wake(memory.placed, memory.comes_back(reading), rooms(reading, starts.holdings(), limits))
        if refused is None:
            self._tell()
        elif not self._waits_for_room(refused):
            self._turn_away(refused)

    def _tell(self) -> None:
        """Send WAKE. From now on the memory counts as taken."""
        replica, starts = self.replica, self._starts
        if replica.process is not None:  # else the loop is about to see its end
            if replica.memory.placed is not None:
                placed = replica.memory.placed.bytes
                replica.memory.holding = Holding(replica.label, replica.process.pid, placed, loading=True)
            starts.effects.add([ToWorker(replica.name, replica.generation, encode(WakeMessage()))])
        self._end()
        starts.at_next_turn(starts.advance)

    def _refuse_place(self, why: str) -> None:
        self._turn_away(PlacementRefused(why))

    def _turn_away(self, refused: PlacementRefused) -> None:
        self._end()
        self._starts.sleepers.not_woken(self.replica, refused.message)
        self._starts.at_next_turn(self._starts.advance)

    def cancel(self) -> bool:
        """End the wake, because the worker was ordered down. Its process is ended by the stop ladder."""
        self._starts.vram.forget(self.replica.name)
        self._end()
        return False
