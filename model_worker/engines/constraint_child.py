"""Try constraints before the worker compiles them, in a process of its own: a trial may hang, overflow its stack, or
die.

Measured (llguidance 1.9.1, one core, a vocabulary of 128,000): the library limits repetition counts, ambiguity and huge
alternations by itself. But a multipleOf of 1,000,003 computes for minutes, a chain of 5,000 $refs overflows the stack,
and 60 kB of schema can take a second. So a constraint is compiled here first, and a few masks are computed along a
random answer.

Each constraint is tried in a fork of this process. The kernel ends a fork that has used its second of processor time.
The fork has the vocabulary already, which takes a second to read. So a constraint that kills its fork does not cost the
next one a new start. A fork takes 4 ms. Its exit status and its own processor time show what ended it: the constraint,
or another process.

The worker starts this process with ``main``, and sends records over its link (``helper_link``). The first one is the
vocabulary, {pieces, textless}. An empty record says that it has been read. Then the worker sends constraints,
[kind, text]. Each is answered by [seconds, refusal, signal, loose]: the
processor time that the trial took; the reason for refusing the constraint as [message, code, field], nil for none; the
number of the signal by which another process ended the trial, 0 for none; and the names of the tools whose schemas
cannot be enforced and need not be. The constraint compiles with these tools ``loosened``.
"""

import os
import random
import resource
import signal
import threading
from contextlib import suppress
from typing import Any, NoReturn

import llguidance
import msgpack
import numpy as np

from model_worker.engines.constraint_grammar import (
    LIMITS,
    Vocabulary,
    grammar,
    loosened,
    may_be_loose,
    refusal,
    shape_of,
    tools_alone,
)
from protocol.errors import ErrorCode, RequestError
from protocol.process.birth import die_with
from protocol.process.helper_link import become_helper, serve

SECONDS = 1
"""Seconds of processor time of one trial. A constraint that takes longer is refused."""
MEMORY = 2 << 30
"""Bytes of address space of this process and of each trial."""
STACK = 2 << 20
"""Bytes of stack of a trial: an eighth of the stack with which the worker compiles the constraint."""
_TOKENS = 16
"""Tokens of the random answer that is tried."""
_ITS_FAULT = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
"""Signals that end a trial by the fault of its constraint: the trial ran out of time, stack or memory."""


def main() -> None:
    """Try the constraints that the worker sends, and send the results, until the worker closes the connection."""
    # The supervisor asks for a worker's stacks by SIGUSR1 to the worker's whole process group. On Ctrl-C the supervisor
    # itself ends the worker.
    link = become_helper("constraint child", ignored=(signal.SIGUSR1, signal.SIGINT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    given = msgpack.unpackb(link.receive(None) or b"")
    tokenizer = Vocabulary(given["pieces"], frozenset(given["textless"])).tokenizer()
    link.send(b"")
    serve(link, lambda record: link.send(_try_apart(tokenizer, *msgpack.unpackb(record))))


def _try_apart(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> bytes:
    """Try a constraint in a fork. Return the packed answer for the worker: [seconds, refusal, signal, loose]."""
    seconds, result, ended_by = _fork(tokenizer, kind, text)
    if result is None and not ended_by and kind == "tools" and (names := may_be_loose(text)):
        # Nobody knows which of the schemas took the time.
        more, result, ended_by = _fork(tokenizer, kind, loosened(text, names))
        seconds += more
        result = result and [result[0], sorted(names)]
    if result is None and not ended_by:
        costs = f"{kind}: compiling it takes more than a second, or more memory or depth than it is given"
        result = [[costs, int(ErrorCode.INVALID_REQUEST), kind], []]
    wrong, loose = result or [None, []]
    return bytes(msgpack.packb([seconds, wrong, ended_by, loose]))


def _fork(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> tuple[float, list[Any] | None, int]:
    """Try a constraint in a fork. Return (seconds of processor time, [refusal, loose], 0).

    The second one is None if the trial did not end: by the fault of its constraint, or by another process. Then the
    third one is the number of that process's signal.
    """
    reading, writing = os.pipe()
    server = os.getpid()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _be_the_trial(server, writing, tokenizer, kind, text)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    seconds = usage.ru_utime + usage.ru_stime
    code = os.waitstatus_to_exitcode(status)
    if not code and result:
        return seconds, msgpack.unpackb(result), 0
    return seconds, None, -code if code < 0 and -code not in _ITS_FAULT else 0


def _be_the_trial(server: int, writing: int, tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> NoReturn:
    """Try a constraint, write the result into the pipe, and end the process."""
    code = 1  # the exit code if Python runs out of memory
    try:
        if die_with(server):
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
            threading.stack_size(STACK)
            found: list[tuple[RequestError | None, list[str]]] = []

            def run() -> None:
                with suppress(BaseException):  # Python would print the message, which may quote the constraint
                    found.append(judge(tokenizer, kind, text))

            trying = threading.Thread(target=run)
            trying.start()
            trying.join()
            if found:
                wrong, loose = found[0]
                with open(writing, "wb") as pipe:
                    pipe.write(msgpack.packb([wrong and [wrong.message, int(wrong.code), wrong.field], loose]))
                code = 0
    finally:
        os._exit(code)


def judge(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> tuple[RequestError | None, list[str]]:
    """Return (the error of a constraint, None if it can be compiled; the names of the tools that have to be
    ``loosened`` for that)."""
    wrong = attempt(tokenizer, kind, text)
    if wrong is None or kind != "tools":
        return wrong, []
    names = may_be_loose(text)
    bad = {name for name, alone in tools_alone(text) if name in names and attempt(tokenizer, kind, alone) is not None}
    for loose in (bad, names):
        if loose and attempt(tokenizer, kind, loosened(text, loose)) is None:
            return None, sorted(loose)
    return wrong, []


def attempt(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> RequestError | None:
    """Return the error of a constraint; None if it compiles and the beginning of a random answer matches it."""
    try:
        matcher = llguidance.LLMatcher(tokenizer, grammar(kind, text), log_level=0, limits=LIMITS)
    except RequestError as e:
        return e
    rng = random.Random(0)
    for number in range(_TOKENS):
        if matcher.is_error():
            break
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, count=tokenizer.vocab_size - 1, bitorder="little"))
        if not number and not len(allowed) and not matcher.is_accepting():
            return refusal(kind, "NoExtension")
        if matcher.is_error() or not len(allowed):
            break
        matcher.consume_token(int(rng.choice(allowed)))
    return _refusal(tokenizer, kind, text, matcher.get_error()) if matcher.is_error() else None


def _refusal(tokenizer: llguidance.LLTokenizer, kind: str, text: str, message: str) -> RequestError:
    """Return the client's error for a message of the library. If one tool is the reason, the error names the tool."""
    if kind == "tools":
        for name, alone in tools_alone(text):
            matcher = llguidance.LLMatcher(tokenizer, grammar(kind, alone), log_level=0, limits=LIMITS)
            if matcher.is_error():
                return refusal(kind, matcher.get_error(), name)
        if (shape := shape_of(text)) is not None and (wrong := attempt(tokenizer, *shape)) is not None:
            return wrong
    return refusal(kind, message)
