"""Check the reports of workers. The supervisor keeps the reports, shows them to people and packs them for clients.

A worker is our own program, but it reads files of others. So no report of a worker may stop the supervisor.
"""

from typing import Any

from protocol import __version__
from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError

MAX_KEYS = 64
MAX_TEXT = 1000
_READY: dict[str, tuple[type, ...]] = {
    "context": (int,),
    "max_jobs": (int,),
    "load_seconds": (int, float),
    "device": (str,),
    "attention": (str,),
    "decoding": (str,),
    "chat": (bool,),
    "template": (str,),
    "end_tokens": (str,),
    "parallel_tool_calls": (bool,),
    "tool_format": (str, type(None)),
    "tools_tried": (bool,),
    "sleep_bytes": (int, type(None)),
    "no_sleep": (str,),
    "reasoning_start": (str, type(None)),
    "reasoning_end": (str, type(None)),
}
_MOVED: dict[str, tuple[type, ...]] = {"seconds": (int, float), "host_bytes": (int,)}
_PROGRESS: dict[str, tuple[type, ...]] = {"phase": (str,), "done": (int,), "total": (int,), "unit": (str,)}


def checked_hello(body: bytes) -> None:
    """Raise FrameError unless the worker has the supervisor's own version."""
    build = _flat(body, {"build": (str,)})["build"]
    if build != __version__:
        raise FrameError(ErrorCode.BAD_VERSION, f"a worker of build {build}, the supervisor is {__version__}")


def checked_ready(body: bytes) -> dict[str, Any]:
    """Return the report of a loaded model: the keys of ``_READY``, with max_jobs at least 1. Raises FrameError."""
    ready = _flat(body, _READY)
    if ready["max_jobs"] < 1 or ready["context"] < 1:
        raise FrameError(ErrorCode.BAD_FRAME, "READY with no room for a job")
    return ready


def checked_progress(body: bytes) -> dict[str, Any]:
    """Return phase, done, total and unit. Raises FrameError."""
    return _flat(body, _PROGRESS)


def checked_slept(body: bytes) -> dict[str, Any]:
    """Return refused, seconds and host_bytes. Raises FrameError."""
    return _flat(body, {**_MOVED, "refused": (str,)})


def checked_woke(body: bytes) -> dict[str, Any]:
    """Return seconds and host_bytes. Raises FrameError."""
    return _flat(body, _MOVED)


def checked_stats(body: bytes) -> dict[str, Any]:
    """Return a map of names, each with a plain value such as a number or a short text. Raises FrameError."""
    return _flat(body, {})


def _flat(body: bytes, wanted: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """Return a map that holds no containers. The codec could not pack a map that is nested a thousand levels deep."""
    report = unpack_body(body)
    if len(report) > MAX_KEYS:
        raise FrameError(ErrorCode.BAD_FRAME, f"a report of {len(report)} entries (at most {MAX_KEYS})")
    for key, value in report.items():
        if type(key) is not str or len(key) > MAX_TEXT or type(value) not in (int, float, str, bool, type(None)):
            raise FrameError(ErrorCode.BAD_FRAME, "a report holds something else than names and plain values")
        if type(value) is str and len(value) > MAX_TEXT:
            raise FrameError(ErrorCode.BAD_FRAME, f"a report's text has {len(value)} characters (at most {MAX_TEXT})")
    for key, types in wanted.items():
        if type(report.get(key)) not in types:
            raise FrameError(ErrorCode.BAD_FRAME, f"a report without {key}")
    return report
