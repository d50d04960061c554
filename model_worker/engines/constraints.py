"""The constraints of one model: they are compiled, and the jobs wait for them. Does not import torch.

``constraint`` describes what a constraint means for its answer.
"""

import os
from collections.abc import Callable, Collection
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from model_worker.engine import Job
from model_worker.engines.admission import excluded_ids
from model_worker.engines.constraint import AnyConstraint, Constraint
from model_worker.engines.constraint_compiler import Compilation, ConstraintCompiler
from model_worker.engines.gated import GatedConstraint
from model_worker.engines.gates import Gates
from model_worker.engines.late import LateConstraint
from model_worker.text import Pieces
from protocol.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    from model_worker.engines.tokenizer import Tokenizer

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
