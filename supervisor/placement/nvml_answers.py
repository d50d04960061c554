"""What the supervisor and the process that asks NVML say to each other. Pure: nothing is believed that cannot be.

→ {"gpus": [{uuid, cpus, nodes}]}, or {"absent": why}    once, when the driver is open; masks in words of 64 bits
← {number, only}                                         indices, or null for all
→ {number, took_s, "gpus": [{index, total, used, free, processes: [[pid, bytes or null]], mig}]}, or
  {number, took_s, "error": why}
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from supervisor.placement.gpus import Gpu

MAX_ANSWER = 1 << 17
"""Bytes: some 5,000 processes that hold memory."""
MAX_GPUS = 256
MAX_TEXT = 200
_MOST = 1 << 64
"""NVML's numbers have 64 bits."""
_WORDS = 64


class Nonsense(Exception):
    """This cannot be an answer: whoever sent it is not to be asked again. The message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What does not change of a GPU, see ``Gpu``."""

    uuid: str
    cpus: frozenset[int]
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Greeting:
    """``gpus`` by index, or why there will be none."""

    gpus: tuple[Fixed, ...] = ()
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """``gpus``, or why they cannot be read. ``took_s``: how long the driver took."""

    took_s: float
    gpus: list[Gpu]
    error: str | None = None


def question(number: int, only: Collection[int] | None) -> bytes:
    return json.dumps({"number": number, "only": None if only is None else sorted(only)}).encode()


def read_greeting(frame: bytes) -> Greeting:
    """Raises Nonsense."""
    reply = _map(frame)
    if "absent" in reply:
        return Greeting(absent=_words(reply, "absent"))
    return Greeting(tuple(map(_fixed, _list(reply, "gpus", MAX_GPUS))))


def read_answer(frame: bytes, number: int, only: Collection[int] | None, fixed: Sequence[Fixed]) -> Answer:
    """The answer to a question about the GPUs of a greeting. Raises Nonsense."""
    reply = _map(frame)
    if _number(reply, "number") != number:
        raise Nonsense("it answers what was not asked")
    took_s = reply.get("took_s")
    if not isinstance(took_s, float) or not 0 <= took_s < 1e9:
        raise Nonsense("took_s is no time")
    if "error" in reply:
        return Answer(took_s, [], _words(reply, "error"))
    gpus = [_gpu(entry, fixed) for entry in _list(reply, "gpus", MAX_GPUS)]
    if [gpu.index for gpu in gpus] != [i for i in range(len(fixed)) if only is None or i in only]:
        raise Nonsense("gpus are not those that were asked for")
    return Answer(took_s, gpus)


def _map(frame: bytes) -> dict[str, Any]:
    if len(frame) > MAX_ANSWER:
        raise Nonsense(f"it is longer than {MAX_ANSWER} bytes")
    try:
        reply = json.loads(frame)
    except (ValueError, RecursionError):
        raise Nonsense("it is no JSON") from None
    return _is_map(reply)


def _is_map(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Nonsense("a map is expected where there is none")
    return value


def _list(reply: dict[str, Any], key: str, most: int) -> list[Any]:
    value = reply.get(key)
    if not isinstance(value, list) or len(value) > most:
        raise Nonsense(f"{key} is no list of at most {most}")
    return value


def _number(reply: dict[str, Any], key: str, below: int = _MOST) -> int:
    return _is_number(reply.get(key), key, below)


def _is_number(value: object, what: str, below: int = _MOST) -> int:
    if type(value) is not int or not 0 <= value < below:  # a bool is no number here
        raise Nonsense(f"{what} is no whole number from 0 to {below - 1}")
    return value


def _words(reply: dict[str, Any], key: str) -> str:
    """Text for people, on one line of a log."""
    value = reply[key]
    if not isinstance(value, str):
        raise Nonsense(f"{key} is no text")
    return "".join(c if c.isprintable() else " " for c in value)[:MAX_TEXT]


def _fixed(entry: object) -> Fixed:
    reply = _is_map(entry)
    uuid = reply.get("uuid")
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_TEXT or not (uuid.isascii() and uuid.isprintable()):
        raise Nonsense("uuid is none")
    cpus, nodes = (_set_bits([_is_number(w, key) for w in _list(reply, key, _WORDS)]) for key in ("cpus", "nodes"))
    return Fixed(uuid, cpus, nodes)


def _gpu(entry: object, fixed: Sequence[Fixed]) -> Gpu:
    reply = _is_map(entry)
    index = _number(reply, "index", len(fixed))
    total = _number(reply, "total")
    used, free = (_number(reply, key, total + 1) for key in ("used", "free"))
    mig = reply.get("mig")
    if not isinstance(mig, bool):
        raise Nonsense("mig is neither true nor false")
    held = dict(map(_process, _list(reply, "processes", MAX_ANSWER)))
    known = fixed[index]
    return Gpu(index, known.uuid, total, used, free, held, mig, known.cpus, known.nodes)


def _process(entry: object) -> tuple[int, int | None]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise Nonsense("a process is no pair of pid and bytes")
    pid, size = entry
    return _is_number(pid, "pid", 1 << 32), None if size is None else _is_number(size, "a process's memory")


def _set_bits(words: Iterable[int]) -> frozenset[int]:
    return frozenset(64 * n + bit for n, word in enumerate(words) for bit in range(64) if word >> bit & 1)
