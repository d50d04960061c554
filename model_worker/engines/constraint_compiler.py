"""Compiles constraints beside the step loop: in a thread of the worker, after a trial in a process of its own.

The thread takes one constraint after the other. A new constraint is tried by the helper process (constraint_helper),
which gives it a second of processor time. Then the thread compiles it, without the interpreter's lock (verified:
another thread's longest wait beside 300 ms of compiling was 10 ms). Each answer has its constraint compiled anew (1 to
10 ms for usual schemas). The reason is that copies of a matcher share their states and the limit on their number, so a
long answer would end all other answers of its schema. The first constraint starts the helper (0.2 s with a vocabulary
of 500, a second with 128,000). The helper ends with the worker.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import llguidance

from model_worker.engines.constraint_grammar import LIMITS, Vocabulary, grammar, refusal
from model_worker.engines.constraint_helper import ConstraintHelper
from protocol.errors import RequestError

KNOWN = 64
"""How many constraints have the result of their trial remembered: those used last. A failure of the helper process is
not remembered, because it says nothing about the constraint."""
_STACK = 16 << 20


class ConstraintCompiler:
    """Compiles the constraints of one vocabulary. ``pieces`` and ``textless`` are those of Vocabulary."""

    def __init__(self, pieces: Sequence[bytes], textless: Collection[int]) -> None:
        self._helper = ConstraintHelper(pieces, textless)
        self._tokenizer = Vocabulary(pieces, textless).tokenizer()
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._known: OrderedDict[tuple[str, str], RequestError | None] = OrderedDict()

    def matcher(self, kind: str, text: str) -> "Future[llguidance.LLMatcher]":
        """Compile a constraint. Return a future of its matcher, which stands at the beginning of an answer.

        The future raises RequestError if the constraint is refused, and WireError HELPER_FAILED if the helper process
        failed. Cancelling the future drops a compilation that has not begun.
        """
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
        """End the thread and the helper. Nothing may be asked for afterwards."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
        self._helper.close()

    def _run(self) -> None:
        while (task := self._asked.get()) is not None:
            task()

    def _matcher(self, kind: str, text: str) -> llguidance.LLMatcher:
        key = (kind, text)
        if key not in self._known:
            _, self._known[key] = self._helper.attempt(kind, text)
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if wrong := self._known[key]:
            raise RequestError(wrong.message, field=wrong.field, code=wrong.code)  # each raise adds to a traceback
        matcher = llguidance.LLMatcher(self._tokenizer, grammar(kind, text), log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # its tables are filled here, not in the first step
        if matcher.is_error():
            raise refusal(kind, matcher.get_error())
        return matcher
