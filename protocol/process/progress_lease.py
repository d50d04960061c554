"""The progress lease: how a worker shows the supervisor that it makes progress.

The lease is one word in a page of memory that both processes have mapped.

The supervisor reads the word without any help of the worker. So the supervisor notices a worker that is stopped, that
holds the GIL for ever, or that waits for a GPU kernel that never ends. The thread that loads and steps writes the word
between its steps. A separate thread would go on writing while the engine hangs.

    bits 63..32  counter, one more with each heartbeat (modulo 2**32)
    bits 31..28  phase, a number of ``WorkerPhase``
    bits 27..0   lease in milliseconds: the next heartbeat comes within this time

The processor writes and reads an aligned word whole. So the supervisor never reads half of an old word and half of a
new one.
"""

import fcntl
import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

PAGE_BYTES = mmap.PAGESIZE
MAX_LEASE_S = 24 * 3600.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class WorkerPhase(IntEnum):
    """The work that the worker is about to do when it writes its lease."""

    STARTING = 0
    """The worker's process has just been started. The supervisor writes this phase."""
    LOADING = 1
    """Importing its engine, reading a part of the weights, or a step of the warm-up."""
    IDLE = 2
    """Waiting for a message, for a fraction of a second."""
    STEP = 3
    """One step of the engine, or the work on one message, such as encoding a prompt."""
    MOVING = 4
    """Going to sleep or waking: copying the weights between the GPU and host memory."""


@dataclass(frozen=True)
class Leases:
    """The longest times until the next heartbeat, in seconds, by phase. Each is from 0.001 to MAX_LEASE_S."""

    start_s: float = 60.0
    load_s: float = 300.0
    idle_s: float = 10.0
    step_s: float = 60.0
    move_s: float = 60.0


DEFAULT_LEASES = Leases()


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a page when the supervisor read it.

    word   differs from the word of the last reading if and only if there was a heartbeat between (or 2**32 of them)
    phase  None if the page holds something that no worker writes
    """

    word: int
    phase: WorkerPhase | None
    lease_s: float


def read_word(word: int) -> Reading:
    number = word >> 28 & 0xF
    return Reading(word, WorkerPhase(number) if number < len(WorkerPhase) else None, (word & 0xFFFFFFF) / 1000)


def _low_bits(phase: WorkerPhase, lease_s: float) -> int:
    if not 0.001 <= lease_s <= MAX_LEASE_S:
        raise ValueError(f"a lease of {lease_s} s: must be between 1 ms and {MAX_LEASE_S:.0f} s")
    return phase << 28 | round(lease_s * 1000)


class WatchedPage:
    """The supervisor's end of the lease. The worker gets ``descriptor``. The constructor raises OSError.

    The page is a memfd, so it needs no disk, and no file is left after a crash. Its size is sealed. Otherwise a faulty
    worker could make it shorter, and the supervisor would die of SIGBUS when it reads the page.
    """

    def __init__(self, start_s: float) -> None:
        self.descriptor = os.memfd_create("beat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, PAGE_BYTES)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.descriptor, PAGE_BYTES)
        except OSError:
            os.close(self.descriptor)
            raise
        self._words = memoryview(self._map).cast("Q")
        self._words[0] = _low_bits(WorkerPhase.STARTING, start_s)

    def expect(self, start_s: float) -> None:
        """Give the process a new first lease. Call this while it waits, since it writes leases, too."""
        counter = self._words[0] >> 32
        self._words[0] = (counter + 1 & 0xFFFFFFFF) << 32 | _low_bits(WorkerPhase.STARTING, start_s)

    def read(self) -> Reading:
        return read_word(self._words[0])

    def handed_over(self) -> None:
        """Close the descriptor, because the worker has a copy of its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self.handed_over()
        self._words.release()
        self._map.close()


class ProgressLease:
    """The worker's end of the lease. The worker calls a method before each piece of work that cannot be interrupted.

    A call takes a fraction of a microsecond.

    descriptor  the descriptor of the page, which the constructor closes. None if no supervisor watches: heartbeats are
                then written to private memory

    ``words`` and ``step_bits`` are for code that does the work of ``step`` without calling it. Such code adds one to
    the counter in the first word, and sets the other bits of that word to ``step_bits``.
    """

    def __init__(self, leases: Leases = DEFAULT_LEASES, descriptor: int | None = None) -> None:
        if descriptor is None:
            self.words = memoryview(bytearray(8)).cast("Q")
        else:
            self.words = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")
            os.close(descriptor)  # no child of the worker may inherit it. The mapping stays
        self._loading = _low_bits(WorkerPhase.LOADING, leases.load_s)
        self._idle = _low_bits(WorkerPhase.IDLE, leases.idle_s)
        self.step_bits = _low_bits(WorkerPhase.STEP, leases.step_s)
        self._moving = _low_bits(WorkerPhase.MOVING, leases.move_s)

    def loading(self) -> None:
        """Write that a part of the load follows."""
        self._write(self._loading)

    def idle(self) -> None:
        """Write that a wait for messages follows."""
        self._write(self._idle)

    def step(self) -> None:
        """Write that a step of the engine follows, or the work on one message."""
        self._write(self.step_bits)

    def moving(self) -> None:
        """Write that the model is about to go to sleep or to wake."""
        self._write(self._moving)

    def _write(self, bits: int) -> None:
        self.words[0] = ((self.words[0] >> 32) + 1 & 0xFFFFFFFF) << 32 | bits
