"""Compiles constraints off the step loop: a thread of the worker, and a child that tries first what may never end.

One thread, which takes one constraint after the other: what is new is tried by the child (constraint_child), which
answers, or dies of it, within a second; then the thread compiles it itself, without the interpreter's lock (verified:
another thread's longest wait beside 300 ms of compiling was 10 ms). Each answer has it compiled anew (1 to 10 ms for
usual schemas): the library's copies of a matcher share their states, and the bound of those, so that a long answer
would end all others of its schema. The child is started by the first constraint (0.2 s with a vocabulary of 500, a
second with 128,000), and again after one that it died of. It ends with the worker.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import llguidance
import msgpack

from model_worker.engines.constraint_grammar import LIMITS, Vocabulary, grammar, refusal
from protocol.errors import ErrorCode, RequestError
from protocol.helper_environment import helper_environment

KNOWN = 64
"""Constraints of which is known what the child said: those used last."""
_STACK = 16 << 20
_START_S = 60.0
"""Least patience with a child that starts."""
_ANSWER_S = 5.0
"""Patience with a child whose own timer is set to a second of computing."""
_END_S = 1.0
"""Patience with a child that has been told to end, or is dying."""
_ITS_FAULT = tuple(-number for number in (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
"""How a child ends that did not survive a constraint: out of time, of stack, of memory."""


class _NotTried(RequestError):
    """Says nothing about the constraint."""


class ConstraintCompiler:
    """Of one vocabulary; see the module. ``pieces`` and ``textless`` as Vocabulary has them."""

    def __init__(self, pieces: Sequence[bytes], textless: Collection[int]) -> None:
        self._pieces, self._textless = pieces, textless
        self._tokenizer = Vocabulary(pieces, textless).tokenizer()
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._known: OrderedDict[tuple[str, str], RequestError | None] = OrderedDict()

    def matcher(self, kind: str, text: str) -> "Future[llguidance.LLMatcher]":
        """A matcher at the beginning of an answer, or RequestError. Cancelling it spares what has not begun."""
        future: Future[llguidance.LLMatcher] = Future()

        def compile() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._matcher(kind, text))
            except BaseException as e:
                future.set_exception(e)

        if self._thread is None:
            # The setting is the process's; the engine starts no other thread meanwhile.
            before = threading.stack_size(_STACK)
            self._thread = threading.Thread(target=self._run, name="constraints", daemon=True)
            self._thread.start()
            threading.stack_size(before)
        self._asked.put(compile)
        return future

    def close(self) -> None:
        """End the thread and the child. Nothing may be asked for afterwards."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()

    def _run(self) -> None:
        # Only here is a child started: PR_SET_PDEATHSIG fires when the thread ends that started it.
        while (task := self._asked.get()) is not None:
            task()
        self._end_child()

    def _matcher(self, kind: str, text: str) -> llguidance.LLMatcher:
        key = (kind, text)
        if key not in self._known:
            try:
                self._try(kind, text)
                self._known[key] = None
            except _NotTried:
                raise
            except RequestError as e:
                self._known[key] = e
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if wrong := self._known[key]:
            raise RequestError(wrong.message, field=wrong.field, code=wrong.code)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar(kind, text), log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # its tables are filled here, not in the first step
        if matcher.is_error():
            raise refusal(kind, matcher.get_error())
        return matcher

    def _try(self, kind: str, text: str) -> None:
        """Raise RequestError for what the child refuses, or does not survive."""
        for _ in range(2):
            try:
                connection = self._connection or self._start_child()
            except OSError as e:
                self._end_child()
                raise _NotTried(
                    f"{kind}: the process that compiles it does not start: {type(e).__name__}", field=kind
                ) from e
            try:
                connection.send_bytes(msgpack.packb([kind, text]))
                if not connection.poll(_ANSWER_S):
                    raise TimeoutError
                wrong = msgpack.unpackb(connection.recv_bytes())
            except (EOFError, OSError) as e:
                if self._end_child() in _ITS_FAULT or isinstance(e, TimeoutError):
                    raise RequestError(
                        f"{kind}: compiling it takes more than a second, or more memory or depth than it is given",
                        field=kind,
                    ) from None
                continue  # somebody else has killed it, perhaps before
            if wrong is not None:
                raise RequestError(wrong[0], field=kind, code=ErrorCode(wrong[1]))
            return
        raise _NotTried(f"{kind}: the process that compiles it was killed, twice", field=kind)

    def _start_child(self) -> Connection:
        ours, theirs = Pipe()
        # Modules are found where they are here; -m alone would look into the current directory first.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from model_worker.engines.constraint_child import main; main(int(sys.argv[1]), int(sys.argv[2]))"
        )
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", program, str(os.getpid()), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=helper_environment(),
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        self._connection = ours
        try:
            ours.send_bytes(msgpack.packb({"pieces": self._pieces, "textless": list(self._textless)}))
            if not ours.poll(_START_S):
                raise TimeoutError
            ours.recv_bytes()
        except EOFError as e:
            raise ConnectionError from e
        return ours

    def _end_child(self) -> int:
        """How it ended: as Popen.returncode."""
        code = 0
        if self._connection is not None:
            self._connection.close()  # at which it ends, if it has not
        if self._child is not None:
            try:
                code = self._child.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                code = self._child.wait()
        self._connection = self._child = None
        return code
