"""Compile constraints outside the step loop, in threads of the worker, after a process has tried each constraint.

The helper process (constraint_helper) first tries a new constraint, because compiling it may never end. A trial has one
second of processor time. Parties take turns in trials. The result of a trial is remembered: from then on the constraint
is known. Then the worker compiles it without the interpreter's lock. (Verified: beside 300 ms of compiling, another
thread waited at most 10 ms.)

There are three threads, so that a known constraint never waits behind an unknown one, nor a quick one behind a costly
one: one for trials, one for known constraints that take less than QUICK_S to compile, one for other known constraints.

Each answer has its constraint compiled again (1 to 10 ms for ordinary schemas). The library's copies of a matcher share
their states and the limit on the number of states. So one long answer would end all other answers of its schema. The
first constraint starts the threads and the helper (0.2 s with a vocabulary of 500, a second with 128,000). They end
with the worker.
"""

import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import llguidance
import msgpack

from model_worker.engines.constraint_grammar import LIMITS, Vocabulary, grammar, loosened, refusal
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.process.birth import helper_environment
from protocol.process.helper_process import HelperProcess

# A thread that does tasks of several parties in turns. A party with many tasks delays another party by one task only.


T = TypeVar("T")
STACK = 16 << 20
"""Bytes of stack of the thread, because a grammar may be nested deeply."""


class Turns(Generic[T]):
    """The order in which tasks are done. This class has no thread and no lock.

    A party is a client connection, or a key with all its connections. Parties take turns. The tasks of one party are
    done in the order in which they came.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[T]] = {}
        self._last: int | None = None
        """The party that had the last turn."""

    def put(self, party: int, task: T) -> None:
        self._waiting.setdefault(party, deque()).append(task)

    def take(self, held: Collection[int] = ()) -> tuple[int, T] | None:
        """Take out the next task, with its party; return None if there is none. Parties in ``held`` are skipped."""
        if self._last in self._waiting:
            # The last party moves to the end only now. So parties that came while its task was being done go before it.
            self._waiting[self._last] = self._waiting.pop(self._last)
        party = next((party for party in self._waiting if party not in held), None)
        if party is None:
            return None
        self._last = party
        task = self._waiting[party].popleft()
        if not self._waiting[party]:
            del self._waiting[party]
        return party, task


class TurnsThread(Generic[T]):
    """Does tasks in a thread.

    do  does a task, given the party whose turn it is; it must not raise
    """

    def __init__(self, name: str, do: Callable[[int, T], None]) -> None:
        self._name, self._do = name, do
        self._turns: Turns[T] = Turns()
        self._changed = threading.Condition()
        self._held: frozenset[int] = frozenset()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self) -> None:
        """Start the thread. No other thread may be started meanwhile, because the stack size is a setting of the
        process."""
        before = threading.stack_size(STACK)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        threading.stack_size(before)

    def put(self, party: int, task: T) -> None:
        with self._changed:
            self._turns.put(party, task)
            self._changed.notify()

    def hold(self, parties: frozenset[int]) -> None:
        """Replace the set of held parties. Their tasks wait until the parties are no longer held."""
        with self._changed:
            self._held = parties
            self._changed.notify()

    def close(self) -> None:
        """End the thread after its present task, and forget the other tasks."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            self._do(*turn)

    def _next(self) -> tuple[int, T] | None:
        with self._changed:
            while not self._closing:
                if (turn := self._turns.take(self._held)) is not None:
                    return turn
                self._changed.wait()
        return None


# The worker's end of the process that tries constraints (constraint_child): start it, ask it, replace it.
#
# A helper that was killed, or that has stopped working, is not evidence against its constraint. The constraint is
# tried once more in a new process. If that fails too, the request ends with ``helper_failed``, which clients may
# retry, and nothing is remembered.


START_S = 30.0
"""Seconds that the process may take to start. It takes 0.2 with a vocabulary of 500, a second with 128,000, and more on
a busy machine."""
LEASE_S = 10.0
"""Seconds of wall-clock time that a trial may take. The kernel ends a trial after a second of its own processor time. A
trial that has neither answered nor used that second by then has stopped working."""
RETRY_MS = 1000
"""``retry_after_ms`` of a request whose helper failed."""


class ConstraintHelper:
    """The helper process of one vocabulary. One thread uses it, and the process ends with that thread
    (PR_SET_PDEATHSIG).

    pieces, textless  as Vocabulary has them
    """

    def __init__(self, pieces: Sequence[bytes], textless: Collection[int]) -> None:
        self._pieces, self._textless = pieces, textless
        self._process: HelperProcess | None = None

    def attempt(self, kind: str, text: str) -> tuple[float, RequestError | None, frozenset[str]]:
        """Try a constraint. Return the seconds of processor time that it took, why it is refused (None if it is not),
        and the names of the tools that have to be ``loosened``.

        Raises WireError HELPER_FAILED if two processes in turn were killed or stopped working.
        """
        how = ""
        for _ in range(2):
            try:
                process = self._process or self._start()
                process.send(msgpack.packb([kind, text]))
                if (answer := process.receive(LEASE_S)) is None:
                    raise TimeoutError
                seconds, wrong, ended_by, loose = msgpack.unpackb(answer)
            except (EOFError, OSError) as e:
                how = "stood still" if isinstance(e, TimeoutError) else "was killed or did not start"
                self.close()
                continue
            if ended_by:
                how = f"was ended by signal {ended_by}"
                continue
            error = wrong and RequestError(wrong[0], field=wrong[2], code=ErrorCode(wrong[1]))
            return seconds, error, frozenset(loose)
        raise WireError(
            ErrorCode.HELPER_FAILED,
            f"{kind}: the process that tries it {how}, and so did the next one: send the request again",
            field=kind,
            retry_after_ms=RETRY_MS,
        )

    def _start(self) -> HelperProcess:
        """Start the process. Raises OSError or EOFError."""
        # Give the child this process's module path: -m alone would look into the current directory first.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from model_worker.engines.constraint_child import main; main()"
        )
        command = [sys.executable, "-P", "-c", program]
        self._process = HelperProcess(command, helper_environment(), apart=False, errors=None)
        self._process.send(msgpack.packb({"pieces": self._pieces, "textless": list(self._textless)}))
        if self._process.receive(START_S) is None:
            raise TimeoutError
        return self._process

    def close(self) -> None:
        """Kill the process and the trial that it runs. Neither has anything to clean up. Another try starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


KNOWN = 256
"""The number of trial results that are remembered: those of the constraints used last. A failure of the helper process
is not remembered, because it is not evidence against the constraint."""
QUICK_S = 0.02
"""Seconds of processor time below which a compilation is quick."""
MOST_AHEAD = 4
"""The most costly constraints that are kept compiled for one party before their jobs start. Each takes up to some
megabytes."""

Key = tuple[str, str]
"""The field of the request, and its text."""


@dataclass(slots=True)
class _Verdict:
    """The result of a trial: why the constraint is refused, or None; the seconds that compiling it takes; and the tools
    whose schemas are not enforced."""

    wrong: RequestError | None
    seconds: float
    loose: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class Compilation:
    """A constraint that is being compiled.

    party    the client whose turn it takes
    ahead    whether the job waits elsewhere. Then only a costly constraint is compiled, and it is kept for the job
    future   gets a matcher at the beginning of an answer, or None if the constraint is quick and ``ahead``. Gets a
             RequestError if the constraint is refused, and a WireError HELPER_FAILED if it could not be tried.
             Cancelling the future skips work that has not begun
    seconds  processor time that was spent on it, known once the future is done
    loose    names of tools whose schemas are not enforced, because they cannot be and need not be
    """

    key: Key
    party: int
    ahead: bool
    future: "Future[llguidance.LLMatcher | None]" = field(default_factory=Future)
    seconds: float = 0.0
    loose: frozenset[str] = frozenset()
    _begun: bool = False

    @property
    def is_kept(self) -> bool:
        """Return whether the future has a matcher, or an error, for the job. Call this when the compilation is done."""
        future = self.future
        return not future.cancelled() and (future.exception() is not None or future.result() is not None)

    def begin(self) -> bool:
        """Mark the compilation as begun, so that it cannot be cancelled any more. Return False if it was cancelled
        before, however often this is asked: the future itself can be asked only once after it was cancelled."""
        if not self._begun and not self.future.cancelled():
            self._begun = self.future.set_running_or_notify_cancel()
        return self._begun


class ConstraintCompiler:
    """Compiles the constraints of one vocabulary. One thread, the worker's loop, calls its methods.

    pieces, textless  as Vocabulary has them
    done              called by another thread when a compilation ahead is done
    """

    def __init__(self, pieces: Sequence[bytes], textless: Collection[int], done: Callable[[], None]) -> None:
        self._done = done
        self._helper = ConstraintHelper(pieces, textless)
        self._tokenizer = Vocabulary(pieces, textless).tokenizer()
        self._started = False
        self._trials = TurnsThread("constraint trials", self._try)
        self._quick = TurnsThread("quick constraints", self._compile)
        self._costly = TurnsThread("costly constraints", self._compile)
        self._lock = threading.Lock()
        # under the lock:
        self._known: OrderedDict[Key, _Verdict] = OrderedDict()
        self._untried: dict[Key, list[Compilation]] = {}
        self._ahead: Counter[int] = Counter()

    def is_at_hand(self, kind: str, text: str) -> bool:
        """Return whether a constraint is known, and either refused or quick to compile."""
        with self._lock:
            verdict = self._known.get((kind, text))
        return verdict is not None and (verdict.wrong is not None or verdict.seconds < QUICK_S)

    def compile(self, kind: str, text: str, party: int = 0, *, ahead: bool = False) -> Compilation:
        """Have a constraint tried, if it is unknown, and compiled. A compilation ahead needs ``release`` afterwards."""
        if not self._started:
            self._started = True
            for thread in (self._trials, self._quick, self._costly):
                thread.start()
        made = Compilation((kind, text), party, ahead)
        with self._lock:
            verdict = self._known.get(made.key)
            if verdict is None:
                self._untried.setdefault(made.key, []).append(made)
            else:
                self._known.move_to_end(made.key)
        if verdict is None:
            # Put it even if another party already waits for this trial: that party's turn may come later.
            self._trials.put(party, made.key)
        else:
            self._pass_on(made, verdict)
        return made

    def release(self, made: Compilation) -> None:
        """End a compilation ahead that is done, because its job has come, or will not come."""
        if made.ahead and made.is_kept and made.future.exception() is None:
            self._count_ahead(made.party, -1)

    def close(self) -> None:
        """End the threads and the helper. Do not ask for anything afterwards."""
        if self._started:
            for thread in (self._trials, self._quick, self._costly):
                thread.close()
        self._helper.close()

    def _try(self, party: int, key: Key) -> None:
        """Try a constraint, unless it is known by now.

        A waiting compilation of ``party``, whose turn it is, pays for the trial. If there is none, another one pays.
        """
        with self._lock:
            waiting = sorted(self._untried.get(key, ()), key=lambda made: made.party != party)
        payer = next((made for made in waiting if made.begin()), None)
        if payer is None:
            return
        try:
            payer.seconds, wrong, loose = self._helper.attempt(*key)
        except WireError as e:
            for made in self._pop_untried(key):
                self._settle(made, None, WireError(e.code, e.message, field=e.field, retry_after_ms=e.retry_after_ms))
            return
        verdict = _Verdict(wrong, payer.seconds, loose)
        for made in self._pop_untried(key, verdict):
            self._pass_on(made, verdict)

    def _pop_untried(self, key: Key, verdict: _Verdict | None = None) -> list[Compilation]:
        """Remember the verdict, if there is one. Return the compilations that waited for the trial."""
        with self._lock:
            if verdict is not None:
                self._known[key] = verdict
                if len(self._known) > KNOWN:
                    self._known.popitem(last=False)
            return self._untried.pop(key, [])

    def _pass_on(self, made: Compilation, verdict: _Verdict) -> None:
        """Have a known constraint compiled, if that is needed."""
        wrong, quick = verdict.wrong, verdict.seconds < QUICK_S
        made.loose = verdict.loose
        if wrong is not None:
            self._settle(made, None, RequestError(wrong.message, field=wrong.field, code=wrong.code))
        elif made.ahead and quick:
            self._settle(made, None)
        else:
            (self._quick if quick else self._costly).put(made.party, made)

    def _compile(self, _: int, made: Compilation) -> None:
        if not made.begin():
            return
        before = time.thread_time()
        try:
            kind, text = made.key
            matcher, error = self._matcher(kind, loosened(text, made.loose)), None
        except BaseException as e:
            matcher, error = None, e
        seconds = time.thread_time() - before
        made.seconds += seconds
        with self._lock:
            if made.key in self._known:
                self._known[made.key].seconds = seconds
        if made.ahead and matcher is not None:
            self._count_ahead(made.party, 1)
        self._settle(made, matcher, error)

    def _settle(
        self, made: Compilation, matcher: llguidance.LLMatcher | None, error: BaseException | None = None
    ) -> None:
        if not made.begin():
            return
        if error is None:
            made.future.set_result(matcher)
        else:
            made.future.set_exception(error)
        if made.ahead:
            self._done()

    def _count_ahead(self, party: int, change: int) -> None:
        """Change a party's number of kept constraints. A party with MOST_AHEAD waits until its jobs have come for
        them."""
        with self._lock:
            self._ahead[party] += change
            self._ahead += Counter()  # removes the parties with none
            held = frozenset(party for party, count in self._ahead.items() if count >= MOST_AHEAD)
            self._costly.hold(held)

    def _matcher(self, kind: str, text: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar(kind, text), log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # fills the matcher's tables here, not in the first step
        if matcher.is_error():
            raise refusal(kind, matcher.get_error())
        return matcher
