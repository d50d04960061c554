"""The constraints of one model: they are compiled, and the jobs wait for them. Does not import torch.

The comment below the imports describes what a constraint means for its answer.
"""

import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import llguidance
import numpy as np

from model_worker.engine import Job
from model_worker.engines.admission import excluded_ids
from model_worker.engines.constraint_compiler import Compilation, ConstraintCompiler
from model_worker.engines.constraint_grammar import TOO_COSTLY
from model_worker.engines.gates import GatedConstraint, Gates
from model_worker.text import Pieces
from protocol.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from model_worker.engines.tokenizer import Tokenizer


# Answers of a given shape: JSON of a schema, text of a regular expression, or one of several strings.
#
# llguidance (Rust; MIT licence; no dependencies) computes at each step which tokens may come next. This module does
# not import torch.
#
# * A constraint is compiled outside the step loop (constraint_compiler). A constraint that is unknown or costly is
#   compiled before its job may start (parking). Any other takes milliseconds: its job waits beside the engine, and
#   other jobs pass it. A constraint that cannot be compiled is refused with an error that names its field and the
#   reason.
# * The mask of allowed tokens is one more limit of the draw, beside allowed_tokens, banned_tokens and logit_bias. The
#   penalties and the sampling parameters work on the tokens that remain. If none remains at the first token, the
#   request is refused. If none remains later, the answer ends with finish_reason "banned_strings"
#   (FinishReason.BANNED).
# * An end token (the model's own, or one of stop_token_ids) is allowed where the answer is complete. Where nothing else
#   can follow, the answer ends by itself, with finish_reason "stop" and without an end token, also before min_tokens
#   and with ignore_eos. Until min_tokens no end token is drawn, so an answer that can go on goes on. * max_tokens, stop
#   strings, and stop_token_ids that have a text (allowed where their text is) may cut an answer short, as without a
#   constraint. Then the answer is only the beginning of a text of the shape. * banned_strings: the constraint goes back
#   with the answer. token_healing is refused together with a constraint, because the healed token belongs to the
#   prompt. Speculation works: a proposal of the draft is accepted only if it is the token that is drawn under the mask.
# * A resumed answer goes through the constraint first (``replay``).
# * A constraint may wait for the end of the reasoning, or for a call of a tool (``gates``). Its answer may begin before
#   it is compiled (``LateConstraint``).
# * A mask that exceeds the library's limits (constraint_grammar.LIMITS) ends the answer with an error. The limits hold
#   for each mask, so that no answer delays other answers for long.
# * The model chooses the tokens that spell a text: every spelling is allowed. JSON has no white space between its
#   parts, or little (``whitespace_flexible``). Its keys are in the order of the schema's properties, and none occurs
#   twice.
# * An answer's text is the joined text of its tokens. A tokenizer that drops the space before the first word of a text
#   does so here too, if nothing precedes the answer: then a shape that begins with a space is delivered without it.
#
# Measured on one core of a shared machine, in microseconds per mask (median, largest) along random answers:
#
#     vocabulary   object of a string and an integer   [a-z]+[0-9]{2,3}   \p{L}{1,1000}
#     32,000       4, 160                              12, 310            700, 2,900
#     128,000      12, 140                             11, 980            1,800, 8,100
#
# With a vocabulary of 128,000, making an array of bools of a mask, or an array of floats to add to logits, takes 10 to
# 40 microseconds more. Compiling takes 2 to 10 ms for ordinary schemas, 60 ms for 5,000 prefixItems, 80 ms for an enum
# of 20,000, and 300 ms for 180 kB of nested constants. The first mask takes under 0.1 ms. 10,000 optional keys exceed
# the library's limits after 90 ms, in the child. One object may have about 450 optional keys.


_BIAS_OF_BITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little"), 0, -np.inf)
_BIAS_OF_BITS = _BIAS_OF_BITS.astype(np.float32).reshape(256, 8)
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Bits = np.ndarray[Any, np.dtype[np.uint8]]


def write_bias(bits: Bits, bias: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Write 0 for ids that ``bits`` of a constraint has, and -inf for all others.

    bias  float32 [size]; size is at least that of the vocabulary, and a multiple of 8
    """
    known = 8 * len(bits)
    np.take(_BIAS_OF_BITS, bits, axis=0, out=bias[:known].reshape(-1, 8), mode="clip")
    bias[known:] = -np.inf


class Constraint:
    """The constraint of one answer. Positions count the answer's tokens; end tokens are not pushed.

    kind     the field of the request
    pieces   number of ids that the matcher knows, without its own id that ends every answer
    vocab    ids below this can be drawn
    end_ids  ids that end the answer: allowed wherever the answer is complete
    hidden   ids that may not be drawn: markers that would not be part of this answer's text
    """

    free: Final = False
    """Whether every token may be drawn next. Only a constraint that waits is free at times: see engines.gated."""
    dormant: Final = False

    def takes(self, token: int) -> bool:
        """Return whether a token that was drawn while the constraint was dormant may stay."""
        return False

    def __init__(
        self,
        kind: str,
        matcher: llguidance.LLMatcher,
        pieces: int,
        vocab: int,
        end_ids: Collection[int],
        hidden: Collection[int] = (),
    ) -> None:
        self._kind, self._matcher = kind, matcher
        self._pieces, self._vocab = pieces, vocab
        self._end_ids = np.array([token for token in end_ids if token < vocab], np.int64)
        self._hidden = [token for token in hidden if token < vocab]
        self._bits: Bits | None = None
        self._allowed: Mask | None = None
        self._accepting = False
        self.position = 0

    @property
    def allowed(self) -> Mask:
        """Return which ids may come next, as bool [vocab], which must not be changed. Computed once per position.

        Raises RequestError where the computation is too costly.
        """
        if self._allowed is None:
            self._allowed = np.unpackbits(self._mask(), count=self._vocab, bitorder="little").view(np.bool_)
        return self._allowed

    @property
    def bits(self) -> Bits:
        """Return which ids may come next, a bit for each, the lowest id first, as uint8. No bit is set beyond vocab.

        The array must not be changed. It is computed once per position.

        Raises RequestError where the computation is too costly.
        """
        return self._mask()

    def _mask(self) -> Bits:
        if self._bits is None:
            known = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()
            end = self._pieces  # the matcher's own end token is behind all ids (constraint_grammar.Vocabulary)
            self._accepting = bool(known[end >> 3] >> (end & 7) & 1)
            bits = np.zeros((self._vocab + 7) // 8, np.uint8)
            ids = min(self._vocab, self._pieces)
            shared = (ids + 7) // 8
            bits[:shared] = known[:shared]
            if ids & 7:
                bits[ids >> 3] &= (1 << (ids & 7)) - 1
            for token in self._hidden:
                bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
            if self._accepting:
                np.bitwise_or.at(bits, self._end_ids >> 3, (1 << (self._end_ids & 7)).astype(np.uint8))
            self._bits = bits
        return self._bits

    @property
    def accepting(self) -> bool:
        """Return whether the answer may end here."""
        self._mask()
        return self._accepting

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def push(self, token: int) -> None:
        """Add the next token, which is one of ``allowed`` and no end token. Raises RequestError."""
        bits = self._bits
        was_allowed = bits is not None and bool(bits[token >> 3] >> (token & 7) & 1)
        self._bits = self._allowed = None
        self._matcher.consume_token(token)
        # If the library runs out of states inside a token, it reports that the token does not match.
        self._check(too_costly=was_allowed)
        self.position += 1

    def replay(self, tokens: Iterable[int]) -> None:
        """Add the tokens that another worker delivered. Raises RequestError (field "resumed_ids") if they do not
        match."""
        for token in tokens:
            if self.finished or not self._matcher.consume_token(token):
                raise RequestError(f"resumed_ids do not satisfy {self._kind}", field="resumed_ids")
            self.position += 1
        self._bits = self._allowed = None

    def back_to(self, position: int) -> None:
        """Forget all tokens but the first ``position`` ones."""
        if position < self.position:
            self._matcher.rollback(self.position - position)
            self._check()
            self.position, self._bits, self._allowed = position, None, None

    def _check(self, *, too_costly: bool = False) -> None:
        """Raise RequestError if the library met an error. ``too_costly``: only the library's limits can be the
        reason."""
        if self._matcher.is_error():
            costs = too_costly or TOO_COSTLY.search(self._matcher.get_error())
            why = "has become too costly for the answer to go on" if costs else "does not allow what was drawn"
            raise RequestError(f"{self._kind} {why}", field=self._kind)


AnyConstraint = Constraint | GatedConstraint


# A constraint that is still being compiled, for an answer that does not need it yet.


class LateConstraint:
    """Stands for a constraint at the beginning of its answer, and waits for it at the first need.

    make  waits for the compilation, and returns the constraint. Raises RequestError

    A compilation takes 1 to 10 ms, and an answer that reasons or writes text needs its constraint later. So the prompt
    is read meanwhile.
    """

    def __init__(self, make: "Callable[[], Constraint]") -> None:
        self._make = make
        self._made: Constraint | None = None

    @property
    def _now(self) -> "Constraint":
        if self._made is None:
            self._made = self._make()
        return self._made

    def back_to(self, position: int) -> None:
        if self._made is not None:
            self._made.back_to(position)

    @property
    def position(self) -> int:
        return 0 if self._made is None else self._made.position

    @property
    def allowed(self) -> "Mask":
        return self._now.allowed

    @property
    def bits(self) -> "Bits":
        return self._now.bits

    @property
    def accepting(self) -> bool:
        return self._now.accepting

    @property
    def finished(self) -> bool:
        return self._now.finished

    def push(self, token: int) -> None:
        self._now.push(token)


OFFERED = frozenset({"json_schema", "regex", "choice", "tools", "reasoning_budget"})
WAIT_S = 0.005
"""Seconds that a step with nothing to compute waits, at most, for a constraint that is being compiled."""
MOST_LATE = 2
"""Jobs that may have started without their constraints. A step in which such a job needs its constraint waits for the
compilation. So a step waits at most for this many quick compilations."""


class Constraints:
    """The constraints of one model, and the jobs that wait until their constraint is compiled.

    pieces     the model's tokens
    vocab      ids below this can be drawn
    eos_ids    ids that end an answer
    tokenizer  knows the markers of reasoning and calls
    """

    def __init__(
        self, pieces: Pieces, vocab: int, eos_ids: Collection[int], tokenizer: "Tokenizer | None" = None
    ) -> None:
        spelled = [piece.encode(errors="surrogatepass") if isinstance(piece, str) else piece for piece in pieces.table]
        self._pieces = len(spelled)
        self._gates = Gates([piece or b"" for piece in spelled], vocab, eos_ids, tokenizer)
        self._vocab, self._eos_ids = vocab, frozenset(eos_ids)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        bell = self._bell
        self._compiler = ConstraintCompiler(self._gates.spelled, self._eos_ids, lambda: os.eventfd_write(bell, 1))
        self._waiting: dict[int, tuple[Job, Compilation]] = {}
        self._ahead: dict[int, Compilation] = {}
        self._untold: set[int] = set()
        """Jobs of ``_ahead`` that ``compiled_ahead`` has not returned yet."""
        self._late: list[Compilation] = []
        """What is being compiled for jobs that have started."""
        self._unwanted: set[int] = set()
        """Jobs of ``_untold`` that will not come."""

    def begin(self) -> None:
        """Start the compiler's process and threads, and wait for nothing. Otherwise the first constraint waits for
        them."""
        self._compiler.compile("regex", "a")

    # --- before the job may start -----------------------------------------------------------------------------------

    def is_at_hand(self, kind: str, text: str) -> bool:
        """Return whether a job with this constraint can start, or be refused, after some milliseconds at most."""
        return not _is_text(text) or self._compiler.is_at_hand(kind, text)

    def compile_ahead(self, job_id: int, party: int, kind: str, text: str) -> None:
        """Compile the constraint of a job that has not come yet. This takes a turn of the client ``party``, and the
        client bears its cost."""
        self._ahead[job_id] = self._compiler.compile(kind, text, party, ahead=True)
        self._untold.add(job_id)

    def compiled_ahead(self) -> list[tuple[int, float]]:
        """Return (job id, seconds of processor time) of each job whose constraint was compiled, or given up, since the
        last call.

        The constraint is kept until ``add`` gets the job, or ``forget`` is called.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        done = [(job_id, self._ahead[job_id]) for job_id in self._untold if self._ahead[job_id].future.done()]
        for job_id, _ in done:
            self._untold.remove(job_id)
            if job_id in self._unwanted:
                self._unwanted.remove(job_id)
                self.forget(job_id)
        return [(job_id, made.seconds) for job_id, made in done]

    def forget(self, job_id: int) -> bool:
        """Forget a job of ``compile_ahead`` that will not come, or that the engine has now.

        A compilation that has begun goes on to its end. Return whether ``compiled_ahead`` will still report its cost.
        """
        made = self._ahead.get(job_id)
        if made is None:
            return False
        if job_id in self._untold and not made.future.cancel():
            self._unwanted.add(job_id)
            return True
        self._untold.discard(job_id)
        self._compiler.release(self._ahead.pop(job_id))
        return False

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that become readable when ``compiled_ahead`` has news; none while no job waits for
        it."""
        return (self._bell,) if self._untold else ()

    # --- jobs of the engine -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return len(self._waiting)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._waiting

    def add(self, job: Job) -> None:
        """Have the constraint of a job compiled. Raises RequestError for options that cannot be combined with it."""
        assert job.constraint is not None
        kind, text = job.constraint
        if job.token_healing:
            raise RequestError(
                f"token_healing and {kind} are not offered together", field="token_healing", code=ErrorCode.UNSUPPORTED
            )
        if not _is_text(text):
            raise RequestError(f"{kind} is not valid Unicode text", field=kind)
        made = self._ahead.get(job.id)
        if made is None or job.id in self._untold or not made.is_kept:
            made = self._compiler.compile(kind, text)
        self.forget(job.id)
        self._waiting[job.id] = job, made

    def cancel(self, job_id: int) -> bool:
        """Forget a job. Return whether it was waiting here."""
        job, made = self._waiting.pop(job_id, (None, None))
        if made is not None:
            made.future.cancel()
        return job is not None

    def clear(self) -> None:
        for job_id in list(self._waiting):
            self.cancel(job_id)

    def ready(self, patience: float = 0.0) -> list[tuple[Job, Callable[[], AnyConstraint]]]:
        """Return the jobs that may start, each with a function that returns the job's constraint.

        A job starts when its constraint is compiled. A job that needs its constraint later may start before that, if
        the constraint is known and quick to compile.

        The constraint is at the position where the answer goes on. The function raises RequestError for a refused
        constraint, and WireError HELPER_FAILED if the helper process failed.

        patience  seconds to wait, at most, until one compilation has ended
        """
        done = self._startable()
        if patience and self._waiting and not done:
            wait([made.future for _, made in self._waiting.values()], patience, "FIRST_COMPLETED")
            done = self._startable()
        for job, _ in done:
            del self._waiting[job.id]
        return [(job, partial(self._result, job, made)) for job, made in done]

    def _startable(self) -> list[tuple[Job, Compilation]]:
        return [
            (job, made)
            for job, made in self._waiting.values()
            if made.future.done() or self._may_start_early(job, made)
        ]

    def _may_start_early(self, job: Job, made: Compilation) -> bool:
        """Return whether a job may start before its constraint is compiled."""
        assert job.constraint is not None
        self._late = [each for each in self._late if not each.future.done()]
        fits = len(self._late) < MOST_LATE and not job.resumed_ids and self._gates.begins_free(job)
        if not fits or not self._compiler.is_at_hand(*job.constraint):
            return False
        self._late.append(made)
        return True

    def _result(self, job: Job, made: Compilation) -> AnyConstraint:
        assert job.constraint is not None
        kind = job.constraint[0]
        end_ids = self._eos_ids.union(job.stop_token_ids)
        hidden = self._gates.hidden(job.layout.visible) if kind == "tools" else self._gates.special_ids

        def compiled() -> Constraint:
            matcher = made.future.result()
            assert matcher is not None
            return Constraint(kind, matcher, self._pieces, self._vocab, end_ids, hidden)

        constraint: AnyConstraint | None
        if made.future.done():
            inner = compiled()
            constraint = self._gates.around(job, inner) or inner
        else:
            constraint = self._gates.around(job, LateConstraint(compiled))
            assert constraint is not None
        constraint.replay(job.resumed_ids)
        self._check_draw(job, constraint)
        return constraint

    def of_reasoning(self, job: Job) -> GatedConstraint | None:
        """Return what limits the reasoning of a job without another constraint, at the position where the answer goes
        on; None if nothing does. Raises RequestError."""
        if job.layout.budget is None or (constraint := self._gates.around(job, None)) is None:
            return None
        constraint.replay(job.resumed_ids)
        return constraint

    def _check_draw(self, job: Job, constraint: AnyConstraint) -> None:
        """Raise RequestError if the first draw has no token left."""
        left = constraint.allowed.copy()
        left[[i for i in self._excluded(job, len(job.resumed_ids)) if i < self._vocab]] = False
        if only := job.sampling.allowed_tokens:
            left = left[list(only)]
        if not left.any() and not constraint.accepting:
            kind = job.constraint[0] if job.constraint else ""
            field = "allowed_tokens" if only else "banned_tokens" if job.sampling.banned_tokens else kind
            raise RequestError(f"{field}: no token is left that {kind} can begin with", field=field)

    def _excluded(self, job: Job, drawn: int) -> set[int]:
        return excluded_ids(job, self._eos_ids, early=drawn < job.min_new_tokens)

    def close(self) -> None:
        """End the compiler's threads and process. Closing again does nothing."""
        self.clear()
        for job_id in list(self._ahead):
            self.forget(job_id)
        self._compiler.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1


def _is_text(text: str) -> bool:
    """Return whether a string is valid Unicode text: a lone surrogate is a str, but no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
