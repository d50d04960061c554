"""Compiles constraints off the step loop: a thread of the worker, and a process that first tries what may never end.

The thread takes one constraint after the other. A new constraint is tried by the helper process (constraint_helper),
which gives it a second of processor time. Then the thread compiles it, without the interpreter's lock (verified:
another thread's longest wait beside 300 ms of compiling was 10 ms). Each answer has its constraint compiled anew (1 to
10 ms for usual schemas): the library's copies of a matcher share their states, and the bound of those, so that a long
answer would end all others of its schema. The first constraint starts the helper (0.2 s with a vocabulary of 500, a
second with 128,000). The helper ends with the worker.
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
"""Constraints whose trial is remembered, those used last. That the helper failed is not remembered: the constraint is
not to blame for it."""
_STACK = 16 << 20


class ConstraintCompiler:
    """Of one vocabulary; see the module. ``pieces`` and ``textless`` as Vocabulary has them."""

    def __init__(self, pieces: Sequence[bytes], textless: Collection[int]) -> None:
        self._helper = ConstraintHelper(pieces, textless)
        self._tokenizer = Vocabulary(pieces, textless).tokenizer()
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._known: OrderedDict[tuple[str, str], RequestError | None] = OrderedDict()

    def matcher(self, kind: str, text: str) -> "Future[llguidance.LLMatcher]":
        """Compile a constraint. The future gets a matcher at the beginning of an answer. It gets a RequestError if the
        constraint is refused, and a WireError HELPER_FAILED if it could not be tried. Cancelling the future spares a
        compilation that has not begun."""
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
