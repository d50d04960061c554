"""What the last lines of a worker's log say about its end: which kind of fault, and what a person can do. Pure.

The lines are those of Python's tracebacks and of C++'s ``terminate``;
the wordings are those of PyTorch 2, CUDA and numpy.
A log goes on over many workers: only the last traceback, or what stands between the last two aborts, is this one's.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_TRACEBACK = "Traceback (most recent call last):"
_CAUSED = "The above exception was the direct cause of the following exception:"
_ABORTED = "Fatal Python error: Aborted"  # faulthandler, which every worker has enabled
_TERMINATE = "terminate called after throwing an instance of"

_STACK = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")

_OUT_OF_VRAM = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|^(\w+\.)*OutOfMemoryError\b"
)
_OUT_OF_MEMORY = re.compile(
    r"^(\w+\.)*_?(Array)?MemoryError\b|DefaultCPUAllocator: (can't|not enough)|std::bad_alloc|Cannot allocate memory"
)
_CUDA_ERROR = re.compile(
    r"(?:CUDA error|Triton Error \[CUDA\]): *(?P<what>.+)|(?P<status>\b(?:CUBLAS|CUDNN)_STATUS_[A-Z_]+)"
)
_WANTED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")
_TOTAL = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)|([\d.]+ [KMGT]iB) total capacity")
_FREE = re.compile(r"of which ([\d.]+ (?:[KMGT]i)?B(?:ytes)?|0 bytes) is free|([\d.]+ (?:[KMGT]i)?B(?:ytes)?) free")


@dataclass(frozen=True, slots=True)
class Fault:
    """reason   "out of VRAM", "out of memory", "CUDA error" or "engine fault"
    message  for a person: what happened and, where it is known, what to do
    """

    reason: str
    message: str


def engine_fault(tail: Sequence[str]) -> Fault:
    """Of a worker whose engine raised: by the exception that ended it, or the one that this was raised from."""
    lines = _exceptions(tail)
    for line in lines:
        if fault := _known(line):
            return fault
    return Fault("engine fault", lines[-1] if lines else "the engine raised")


def last_lines(tail: Sequence[str], count: int) -> list[str]:
    """At most ``count`` lines that say most of how it ended: the last ones, or, if stacks were the last thing written,
    the beginning of the last stack, which is the main thread's. Empty lines are left out."""
    lines = [line for line in tail if line.strip()]
    stacks = [number for number, line in enumerate(lines) if _STACK.match(line)]
    if stacks and all(line.startswith('  File "') for line in lines[stacks[-1] + 1 :]):
        return lines[stacks[-1] :][:count]
    return lines[-count:]


def abort_fault(tail: Sequence[str]) -> Fault | None:
    """Of a worker that ended by SIGABRT: by what C++ said before it, if that is known."""
    ends = [number for number, line in enumerate(tail) if line.startswith(_ABORTED)]
    begin, end = (ends[-2] + 1 if len(ends) > 1 else 0), (ends[-1] if ends else len(tail))
    started = [number for number in range(begin, end) if tail[number].startswith(_TERMINATE)]
    if not started:
        return None
    what = next((line for line in tail[started[-1] : end] if line.lstrip().startswith("what():")), tail[started[-1]])
    return _known(what.strip().removeprefix("what():").strip())


def _exceptions(tail: Sequence[str]) -> list[str]:
    """The first line of each exception of the last traceback, from the cause to what was raised last.

    Not simply the last line: CUDA's errors end in lines of advice on debugging.
    """
    starts = [number for number, line in enumerate(tail) if line.strip() == _TRACEBACK]
    # 8 KiB of a log may not hold the beginning of a long traceback: then all there is belongs to it
    blocks = [tail[a:b] for a, b in itertools.pairwise([*(starts or [0]), len(tail)])]
    lines = [_exception_line(blocks[-1])]
    for block in reversed(blocks[:-1]):
        if not any(line.strip() == _CAUSED for line in block):
            break
        lines.insert(0, _exception_line(block))
    return [line for line in lines if line]


def _exception_line(block: Sequence[str]) -> str:
    frames = [number for number, line in enumerate(block) if line.startswith('  File "')]
    if frames:
        for line in block[frames[-1] + 1 :]:
            if line.strip() and not line.startswith(" "):
                return line.strip()
    return next((line.strip() for line in reversed(block) if line.strip()), "")


def _known(line: str) -> Fault | None:
    if _OUT_OF_VRAM.search(line):
        return Fault("out of VRAM", _vram_message(line))
    if _OUT_OF_MEMORY.search(line):
        message = "" if line == "MemoryError" else f" ({line})"
        return Fault(
            "out of memory",
            "the machine is out of memory (RAM, not VRAM): stop other models or programs, or raise the memory limit "
            f"that the supervisor runs under{message}",
        )
    if found := _CUDA_ERROR.search(line):
        what = (found["what"] or found["status"]).strip()
        return Fault("CUDA error", f"CUDA error: {what}; {_cuda_advice(what)}")
    return None


def _vram_message(line: str) -> str:
    """Without the number of the GPU, which in a worker counts only its own."""
    wanted, free, total = (_first(pattern, line) for pattern in (_WANTED, _FREE, _TOTAL))
    figures = f": {wanted} more were wanted" if wanted else ""
    if wanted and free:
        figures += f", {free}{f' of {total}' if total else ''} were free"
    return (
        f"the GPU's memory is used up{figures}; give the model a smaller cache_size, max_batch_size or max_seq_len, a "
        "smaller cache_mode, or a GPU with more room (`modelctl ps` shows who holds VRAM)"
    )


def _cuda_advice(what: str) -> str:
    if "device-side assert" in what:
        return "a kernel was given a value out of its range: the lines before the traceback in the log say which check"
    if "no kernel image" in what:
        return "this build of PyTorch or of an extension was not made for this GPU: install one for its architecture"
    return "if it comes again, `dmesg | grep -i xid` tells a failing GPU from a failing kernel"


def _first(pattern: re.Pattern[str], line: str) -> str | None:
    found = pattern.search(line)
    return next(group for group in found.groups() if group) if found else None
