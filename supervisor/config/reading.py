"""Read the values of models.yaml that have a form of their own: durations, GPUs, sizes of memory. Pure."""

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from protocol.answer_formats.families import FORMATS
from protocol.process.worker_spec import MAX_LEASE_S, OFF
from protocol.values import Allowed, Flaw, ReadWith, Unfit, Within, read
from supervisor.config.spelling import Limit, parse_duration, parse_limit, parse_size, quotes_for, spelled
from supervisor.keys.records import parse_listen

MIN_LEASE_S = 1.0
MOST_MARKER = 64
"""Characters of a marker of reasoning."""
MOST_DESCRIPTION = 300
"""Characters of a model's description. Every answer of GET /v1/models has it, once for each name."""
LEAST_HELD, MOST_HELD = 64 << 10, 64 << 30
"""Bytes of events that may wait for a slow client: the lowest and the highest limit."""
MOST_DAYS = 36_500
AUTO: Final = "auto"
"""The word for ``node``: the supervisor's own machine while it has room, then any other."""
OTHERS: Final = "others"
"""The word for ``node``: any machine but the supervisor's own."""


def parse_days(value: object) -> int:
    """Return the days of ``400d``, or of a number of days. Raises ValueError."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,5}d", value):
        value = int(value[:-1])
    if type(value) is not int or not 1 <= value <= MOST_DAYS:
        raise ValueError(f"must be a number of days such as 90d, from 1d to {MOST_DAYS}d")
    return value


def parse_gpu(value: object) -> str | int | tuple[int | str, ...]:
    """Return ``cpu``, ``auto``, an index of nvidia-smi, a GPU's UUID, or a tuple of indices and UUIDs.

    Raises ValueError.
    """
    one = (
        f"{value!r} is no GPU: must be cpu, auto, an index as nvidia-smi counts, GPU-<uuid>, or a list of the last two"
    )
    if value in ("cpu", "auto"):
        return str(value)
    if isinstance(value, list):
        if not value or len(set(map(str, value))) != len(value):
            raise ValueError("must name at least one GPU, and none twice")
        parsed = [parse_gpu(item) for item in value]
        if any(item in ("cpu", "auto") or isinstance(item, tuple) for item in parsed):
            raise ValueError(one)
        return tuple(item for item in parsed if not isinstance(item, tuple))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1024:
        return value
    if isinstance(value, str) and re.fullmatch(r"GPU-[0-9a-fA-F-]{8,64}", value):
        return value
    raise ValueError(one)


def parse_node(value: object) -> str:
    """Return the text of ``node``. Raises ValueError."""
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable() or value != value.strip():
        raise ValueError("must be auto, others, the name of a machine, or labels such as zone=a,disk=fast")
    if "=" in value:
        pairs = [part.partition("=") for part in value.split(",")]
        if any(not name or not wanted or "=" in wanted or " " in name + wanted for name, _, wanted in pairs):
            raise ValueError("must be labels as in zone=a,disk=fast, each with a name and a value, without blanks")
    return value


def labels_of(node: str) -> dict[str, str]:
    """Return the labels that a machine must have; empty if ``node`` is no list of labels."""
    if "=" not in node:
        return {}
    return {name: wanted for name, _, wanted in (part.partition("=") for part in node.split(","))}


def is_name(node: str) -> bool:
    """Return whether ``node`` is the name of one machine."""
    return node not in (AUTO, OTHERS) and "=" not in node


def parse_path(value: object) -> str:
    """Return a path as it was given. Raises ValueError if it is in a home directory that does not exist."""
    if not isinstance(value, str):
        raise ValueError(f"must be a path{quotes_for(value)}")
    try:
        Path(value).expanduser()
    except RuntimeError:
        user = value[1:].partition("/")[0]
        why = f"there is no user {user!r} on this machine" if user else "this user has no home directory"
        raise ValueError(f"{why}; write the whole path") from None
    return value


def parse_held(value: object) -> int:
    """Return the bytes of events that may wait for clients. Raises ValueError."""
    try:
        size = parse_size(value)
    except ValueError:
        size = 0
    if not LEAST_HELD <= size <= MOST_HELD:  # a whole answer with log-probabilities may be one event
        raise ValueError("must be a size such as 1MiB, from 64KiB to 64GiB")
    return size


def parse_vram(value: object) -> tuple[int, ...]:
    """Return bytes: one size, or a list of sizes, one for each GPU. Raises ValueError."""
    return tuple(map(parse_size, value)) if isinstance(value, list) and value else (parse_size(value),)


def parse_vram_limit(value: object) -> Limit | dict[str, Limit]:
    """Return one limit for every GPU, or a map from GPU to limit. Raises ValueError naming the GPU."""
    if not isinstance(value, dict):
        return parse_limit(value)
    limits = {}
    for gpu, limit in value.items():
        text = str(gpu)  # the keys of a YAML file arrive as text
        if not re.fullmatch(r"\d{1,3}|GPU-[0-9a-fA-F-]{8,64}", text):
            raise ValueError(f"{gpu!r} is no GPU: must be an index as nvidia-smi counts, or GPU-<uuid>")
        try:
            limits[text] = parse_limit(limit)
        except ValueError as e:
            raise ValueError(f"GPU {gpu}: {limit!r} {e}") from None
    return limits


def parse_description(value: object) -> str:
    """Return a text for people in one line. Raises ValueError."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    if not 0 < len(text) <= MOST_DESCRIPTION or not text.isprintable():
        raise ValueError(
            f"must be text of 1 to {MOST_DESCRIPTION} characters, without control characters{quotes_for(value)}"
        )
    return text


def parse_ttl(value: object) -> float | None:
    """Return seconds without a request, None for ``never``. Raises ValueError."""
    if value == "never":
        return None
    try:
        seconds = parse_duration(value)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError("must be never, or a duration above zero such as 30s, 10m or 1h, a week at most")
    return seconds


def parse_lease(value: object) -> float:
    """Return the seconds that a worker may go without a heartbeat. Raises ValueError."""
    seconds = parse_duration(value)
    if not MIN_LEASE_S <= seconds <= MAX_LEASE_S:  # an idle worker waits for 200 ms at a time
        raise ValueError("must be from 1s to 24h")
    return seconds


def parse_tool_format(value: object) -> str:
    """Return the name of a format of calls, or ``off``. Raises ValueError."""
    if value is False or value == OFF:  # YAML reads a bare `off` as false
        return OFF
    if value not in FORMATS:
        raise ValueError(f"must be off, or one of {', '.join(FORMATS)}")
    return str(value)


def parse_reasoning(value: object) -> tuple[str, str] | Literal["off"]:
    """Return the markers before and behind the reasoning, or ``off``. Raises ValueError."""
    if value is False or value == OFF:
        return "off"
    if not isinstance(value, dict) or set(value) != {"start", "end"}:
        raise ValueError("must be off, or the markers as {start: <think>, end: </think>}")
    start, end = value["start"], value["end"]
    for marker in (start, end):
        if not isinstance(marker, str) or not 0 < len(marker) <= MOST_MARKER or marker != marker.strip():
            raise ValueError(f"must have two texts of 1 to {MOST_MARKER} characters, without blanks around them")
    return start, end


def parse_sleep(value: object) -> Literal["ram", "off"]:
    """Return where a model may sleep, or ``off``. Raises ValueError."""
    if value is False or value == OFF:
        return "off"
    if value != "ram":
        raise ValueError("must be ram or off")
    return "ram"


UserPath = Annotated[str, ReadWith(parse_path, "path")]
Description = Annotated[str | None, ReadWith(parse_description, "line of text")]
Duration = Annotated[float, ReadWith(parse_duration, "duration")]
Days = Annotated[int, ReadWith(parse_days, "days")]
Ttl = Annotated[float | None, ReadWith(parse_ttl, "duration, or never")]
Lease = Annotated[float, ReadWith(parse_lease, "duration from 1s to 24h")]
Listen = Annotated[str | None, ReadWith(parse_listen, "tcp://ADDRESS:PORT")]
Gpu = Annotated[Any, ReadWith(parse_gpu, "cpu, auto, an index, a UUID, or a list of indices and UUIDs")]
Node = Annotated[str | None, ReadWith(parse_node, "auto, others, a name, or labels")]
Vram = Annotated[Any, ReadWith(parse_vram, "size, or a list of sizes")]
HeldSize = Annotated[int, ReadWith(parse_held, "size from 64KiB to 64GiB")]
StoreSize = Annotated[int, ReadWith(parse_size, "size")]
HostMemory = Annotated[int | None, ReadWith(parse_size, "size")]
VramLimit = Annotated[Any, ReadWith(parse_vram_limit, "size or share of a GPU, or a map from GPU to one of them")]
ToolFormat = Annotated[str | None, ReadWith(parse_tool_format, "name of a format, or off")]
Reasoning = Annotated[Any, ReadWith(parse_reasoning, "{start: TEXT, end: TEXT}, or off")]
Sleep = Annotated[Any, ReadWith(parse_sleep, "ram or off")]
Tokens = Annotated[int, Within(1, 1 << 24)]
Factor = Annotated[float, Within(0, 1e6, above=True)]
CacheMode = Literal["FP16", "Q8", "Q6", "Q4"]
Task = Literal["embed", "rerank"]
Pooling = Literal["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken"]


# Say in words what does not fit in a section of models.yaml. ``protocol.values`` reads the section. Pure.


T = TypeVar("T")
_NAMES: Mapping[type, str] = {
    str: "text", bool: "true or false", int: "a whole number", float: "a number", list: "a list",
    dict: "a mapping (key: value lines)",
}  # fmt: skip


def fit(kind: type[T], value: object) -> T:
    """Return an instance of a dataclass made from a mapping. Raises Unfit with all flaws, in words."""
    try:
        return read(kind, value, every=True)
    except Unfit as e:
        flaws: list[Flaw] = []
        for flaw in e.flaws:
            flaws.append(replace(flaw, message=_message(flaw, flaws)))
        raise Unfit(flaws) from None


def _message(flaw: Flaw, others: list[Flaw]) -> str:
    problem = flaw.problem
    if problem is None:
        return "is missing; add it"
    if isinstance(problem, Allowed):
        quotes = quotes_for(flaw.value) if problem.kind is str or isinstance(problem.kind, tuple) else ""
        return f"is {spelled(flaw.value)}: must be {_wanted(problem)}{quotes}"
    if isinstance(problem, str):
        return f"is {spelled(flaw.value)}: {problem}"
    assert isinstance(problem, Collection)
    return f"unknown key; {_hint(str(flaw.path[-1]), problem, others)}"


def _wanted(wanted: Allowed) -> str:
    if isinstance(wanted.kind, tuple):
        return f"one of {', '.join(map(repr, wanted.kind))}"
    return f"{_NAMES[wanted.kind]}{'' if wanted.bounds is None else f' {wanted.bounds}'}"


def _hint(key: str, known: Collection[str], others: list[Flaw]) -> str:
    """Return the known key that was probably meant, else all known keys. Only one fault lists them."""
    if near := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {near[0]!r}?"
    listed = f"known are {', '.join(sorted(known))}"
    place = next((flaw.path for flaw in others if flaw.message.endswith(listed)), None)
    return listed if place is None else f"the known keys are listed at {'.'.join(map(str, place))}"
