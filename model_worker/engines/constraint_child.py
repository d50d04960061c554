"""A process that tries grammars before the worker compiles them: it may hang, overflow its stack, or die.

Measured (llguidance 1.9.1, one core, a vocabulary of 128,000): the library bounds repetition counts, ambiguity and
huge alternations by itself, but a multipleOf of 1,000,003 computes for minutes, a chain of 5,000 $refs overflows the
stack, and 60 kB of schema can take a second. So a grammar is compiled here first, and a few masks are computed along a
random answer. A timer ends the process after a second of computing, wherever it is.

The worker starts it with ``main(parent, descriptor)``; see constraint_compiler. Over the descriptor come the
vocabulary, {pieces, textless}, answered by an empty message, and then constraints, [kind, text], each answered by what
is wrong with it, nil or [message, code].
"""

import random
import resource
import signal
import threading
from multiprocessing.connection import Connection

import llguidance
import msgpack
import numpy as np

from model_worker.engines.constraint_grammar import LIMITS, Vocabulary, grammar, refusal
from model_worker.parent_death import die_with
from protocol.errors import RequestError

SECONDS = 1.0
"""Of this process's computing time, not of the clock's: a grammar that takes longer is refused."""
MEMORY = 2 << 30
"""Bytes of address space of this process."""
STACK = 2 << 20
"""Bytes of stack that a grammar is compiled with: an eighth of what the worker has for it."""
_TOKENS = 16
"""Length of the answer that is tried."""


def main(parent: int, descriptor: int) -> None:
    """Answer until the worker closes the connection."""
    if not die_with(parent):
        return
    # a look at the worker's stacks is sent to its whole group; Ctrl-C is the supervisor's business
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(STACK)
    serving = threading.Thread(target=_serve, args=(Connection(descriptor),), daemon=True)
    serving.start()
    serving.join()


def _serve(connection: Connection) -> None:
    try:
        given = msgpack.unpackb(connection.recv_bytes())
        tokenizer = Vocabulary(given["pieces"], frozenset(given["textless"])).tokenizer()
        connection.send_bytes(b"")
        while True:
            kind, text = msgpack.unpackb(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            wrong = attempt(tokenizer, kind, text)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(msgpack.packb(wrong and [wrong.message, int(wrong.code)]))
    except (EOFError, OSError):
        return  # the worker has left


def attempt(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> RequestError | None:
    """What is wrong with a constraint: None if it compiles and the beginning of a random answer goes through it."""
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
    if matcher.is_error():
        return refusal(kind, matcher.get_error())
    return None
