"""The GPUs of this machine, read from the answers of the process that asks NVML. Pure.

A GPU has the index that nvidia-smi gives it, whatever CUDA_VISIBLE_DEVICES of this process is. The pins of models.yaml
use the same indices, because workers get CUDA_DEVICE_ORDER=PCI_BUS_ID.

The process that asks NVML (``nvml_child``) may fail in any way, since the driver runs in it. So every value of its
messages is checked. ``gpu_reader`` sends the questions and receives the answers, each a JSON text:

    child to supervisor, once the driver is open   {"gpus": [{uuid, cpus, numa_nodes}]} or {"absent": why};
                                                   cpus and numa_nodes are masks, in words of 64 bits
    supervisor to child                            {number, only}; only: indices of GPUs, or null for all
    child to supervisor                            {number, took_s, "gpus": [{index, total, used, free,
                                                   processes: [[pid, bytes or null]], mig}]}; in an answer about
                                                   all GPUs also utilization (%), temperature (°C), power and
                                                   power_limit (mW), each null if the driver does not offer it
                                                   or {number, took_s, "error": why}
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

EVERY = "GPU-"
"""A pin that means each GPU: the beginning of all UUIDs."""
MAX_ANSWER = 1 << 17
"""The most bytes of an answer: enough for some 5,000 processes that hold memory."""
MOST_GPUS = 16
"""The most GPUs that a model may be divided among (``gpus`` in models.yaml)."""
MAX_GPUS = 256
MAX_TEXT = 200
_MOST = 1 << 64
"""NVML's numbers have 64 bits."""
_MOST_CELSIUS = 200
_MOST_MILLIWATTS = 10_000_000
_WORDS = 64
"""The most words of a mask."""


@dataclass(frozen=True, slots=True)
class Sensors:
    """Readings of a GPU's sensors. None where the driver does not offer one, or was not asked.

    utilization  percent of the driver's last sample period (up to 1 s) in which the GPU computed
    temperature  degrees Celsius
    power        watts
    power_limit  the most watts that the GPU takes
    """

    utilization: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. Sizes are in bytes.

    processes   pid → bytes that the process holds on this GPU; None where the driver does not say how many. In a
                container the pids may be those of another pid namespace, and processes may be missing.
    mig         whether the GPU is divided into MIG instances, which CUDA sees in its place
    cpus        CPUs of this machine that are nearest to the GPU; empty if that is not known
    numa_nodes  NUMA nodes that are nearest to the GPU; empty if that is not known
    sensors     what the GPU does, and how warm it is
    """

    index: int
    uuid: str
    total: int
    used: int
    free: int
    processes: Mapping[int, int | None] = field(default_factory=dict)
    mig: bool = False
    cpus: frozenset[int] = frozenset()
    numa_nodes: frozenset[int] = frozenset()
    sensors: Sensors = Sensors()

    def is_meant(self, pin: str) -> bool:
        """Return whether a pin of models.yaml means this GPU: its index, its UUID, or the beginning of its UUID."""
        return pin == str(self.index) or self.uuid.lower().startswith(pin.lower())


class GpusUnknown(Exception):
    """The GPUs cannot be read now. The message says why."""


class GpusAbsent(GpusUnknown):
    """The GPUs can never be read: the package or the driver is missing."""


class GpusLate(GpusUnknown):
    """The answer has not come yet. A later try may get it."""


class BadAnswer(ValueError):
    """The process that asks NVML sent something that cannot be an answer. The message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class FixedFacts:
    """The facts about a GPU that never change. ``Gpu`` explains the fields."""

    uuid: str
    cpus: frozenset[int]
    numa_nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first message of the process that asks NVML.

    gpus    the facts that never change, by the index of the GPU
    absent  why the driver cannot be opened; None if it is open
    """

    gpus: tuple[FixedFacts, ...] = ()
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """An answer of the process that asks NVML.

    took_s  seconds that the driver took
    gpus    the GPUs that were asked for
    error   why they cannot be read; None if they can
    """

    took_s: float
    gpus: list[Gpu]
    error: str | None = None


def encode_question(number: int, only: Collection[int] | None) -> bytes:
    """Return the message that asks for the GPUs with the indices ``only``, or for all GPUs if that is None."""
    return json.dumps({"number": number, "only": None if only is None else sorted(only)}).encode()


def read_greeting(frame: bytes) -> Greeting:
    """Read the first message of the process that asks NVML. Raises BadAnswer."""
    reply = _map(frame)
    if "absent" in reply:
        return Greeting(absent=_words(reply, "absent"))
    return Greeting(tuple(map(_fixed, _list(reply, "gpus", MAX_GPUS))))


def read_answer(frame: bytes, number: int, only: Collection[int] | None, fixed: Sequence[FixedFacts]) -> GpuReading:
    """Read the answer to question ``number`` about the GPUs ``only``. Raises BadAnswer.

    fixed  the facts about the GPUs from the greeting
    """
    reply = _map(frame)
    if _number(reply, "number") != number:
        raise BadAnswer("it answers what was not asked")
    took_s = reply.get("took_s")
    if not isinstance(took_s, float) or not 0 <= took_s < 1e9:
        raise BadAnswer("took_s is no time")
    if "error" in reply:
        return GpuReading(took_s, [], _words(reply, "error"))
    gpus = [_gpu(entry, fixed) for entry in _list(reply, "gpus", MAX_GPUS)]
    if [gpu.index for gpu in gpus] != [i for i in range(len(fixed)) if only is None or i in only]:
        raise BadAnswer("gpus are not those that were asked for")
    return GpuReading(took_s, gpus)


def _map(frame: bytes) -> dict[str, Any]:
    if len(frame) > MAX_ANSWER:
        raise BadAnswer(f"it is longer than {MAX_ANSWER} bytes")
    try:
        reply = json.loads(frame)
    except (ValueError, RecursionError):
        raise BadAnswer("it is no JSON") from None
    return _is_map(reply)


def _is_map(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadAnswer("a map is expected where there is none")
    return value


def _list(reply: dict[str, Any], key: str, most: int) -> list[Any]:
    value = reply.get(key)
    if not isinstance(value, list) or len(value) > most:
        raise BadAnswer(f"{key} is no list of at most {most}")
    return value


def _number(reply: dict[str, Any], key: str, below: int = _MOST) -> int:
    return _is_number(reply.get(key), key, below)


def _is_number(value: object, what: str, below: int = _MOST) -> int:
    if type(value) is not int or not 0 <= value < below:  # a bool is no number here
        raise BadAnswer(f"{what} is no whole number from 0 to {below - 1}")
    return value


def _words(reply: dict[str, Any], key: str) -> str:
    """Return a text for people, made fit for one line of a log."""
    value = reply[key]
    if not isinstance(value, str):
        raise BadAnswer(f"{key} is no text")
    return "".join(c if c.isprintable() else " " for c in value)[:MAX_TEXT]


def _fixed(entry: object) -> FixedFacts:
    reply = _is_map(entry)
    uuid = reply.get("uuid")
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_TEXT or not (uuid.isascii() and uuid.isprintable()):
        raise BadAnswer("uuid is none")
    cpus, numa_nodes = (
        _set_bits([_is_number(w, key) for w in _list(reply, key, _WORDS)]) for key in ("cpus", "numa_nodes")
    )
    return FixedFacts(uuid, cpus, numa_nodes)


def _gpu(entry: object, fixed: Sequence[FixedFacts]) -> Gpu:
    reply = _is_map(entry)
    index = _number(reply, "index", len(fixed))
    total = _number(reply, "total")
    used, free = (_number(reply, key, total + 1) for key in ("used", "free"))
    mig = reply.get("mig")
    if not isinstance(mig, bool):
        raise BadAnswer("mig is neither true nor false")
    held = dict(map(_process, _list(reply, "processes", MAX_ANSWER)))
    known = fixed[index]
    return Gpu(index, known.uuid, total, used, free, held, mig, known.cpus, known.numa_nodes, _sensors(reply))


def _sensors(reply: dict[str, Any]) -> Sensors:
    power, limit = (_sensor(reply, key, _MOST_MILLIWATTS) for key in ("power", "power_limit"))
    return Sensors(
        _sensor(reply, "utilization", 100),
        _sensor(reply, "temperature", _MOST_CELSIUS),
        None if power is None else power / 1000,
        None if limit is None else limit / 1000,
    )


def _sensor(reply: dict[str, Any], key: str, most: int) -> int | None:
    """Return a reading; None if there is none, or if it is greater than a GPU can have: a broken sensor."""
    value = reply.get(key)
    return None if value is None or _is_number(value, key) > most else int(value)


def _process(entry: object) -> tuple[int, int | None]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise BadAnswer("a process is no pair of pid and bytes")
    pid, size = entry
    return _is_number(pid, "pid", 1 << 32), None if size is None else _is_number(size, "a process's memory")


def _set_bits(words: Iterable[int]) -> frozenset[int]:
    return frozenset(64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1)


# A circuit breaker for questions to the GPU driver. Pure: times are arguments, monotonic seconds.
#
# The supervisor asks the driver on its one thread, and every token waits for that thread. So a driver that hangs or
# has become slow may cost TIMEOUT_S once. After that, no reading waits for an answer until one has come quickly.


TIMEOUT_S = 0.5
"""Seconds that the supervisor waits for an answer. Usual answers take 1 to 30 ms."""
QUIET_S = 2.0
"""Seconds without a question after a late answer. QUIET_S and TIMEOUT_S together limit the time that a driver costs
if it hangs again and again."""


class BreakerState(Enum):
    """The state of the breaker: may the driver be asked now, and does the supervisor wait for the answer?"""

    CLOSED = "closed"
    """Ask, and wait for the answer."""
    HALF_OPEN = "half open"
    """Ask, only to learn how long the driver takes. No reading waits for the answer."""
    OPEN = "open"
    """Do not ask: an older question has no answer yet, or it is too early for another."""


class CircuitBreaker:
    """Decides about the questions to one process. At most one question is without an answer."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._out: BreakerState | None = None
        self._gave_up = False
        self._slow = False
        self._quiet_until = 0.0

    def next(self, now: float) -> BreakerState:
        """Return whether to ask now, and whether to wait for the answer."""
        if self._out is not None or (self._slow and now < self._quiet_until):
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN if self._slow else BreakerState.CLOSED

    def asked(self, asking: BreakerState) -> None:
        """Note that a question was sent, in the state that ``next`` returned."""
        self._out, self._gave_up = asking, False

    def gave_up(self) -> None:
        """Note that the reading waits no longer. The answer, if it comes, is old."""
        self._slow = self._gave_up = True

    def answered(self, took_s: float, now: float) -> None:
        """Note that the answer came.

        took_s  seconds that the driver took
        """
        if self._gave_up or (self._slow and took_s >= self._timeout_s / 2):
            self._quiet_until = now + QUIET_S
        else:
            self._slow = False
        self._out, self._gave_up = None, False

    def forget(self) -> None:
        """Note that the process is gone, with its question. The next process has not been slow yet."""
        self._out, self._gave_up, self._slow = None, False, False

    @property
    def is_out(self) -> bool:
        """Return whether a question has no answer yet."""
        return self._out is not None
