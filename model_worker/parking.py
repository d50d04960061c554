"""Give jobs back to the supervisor while their constraints are compiled, so that they hold no slot meanwhile.

A job whose constraint is at hand starts at once. Any other is parked: the supervisor gets PARKED, keeps the request,
and gives the slot to another request. When the constraint is compiled, the worker sends COMPILED. The supervisor sends
the job again when it is that request's turn. The compiled constraint waits in the worker.
"""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from model_worker.link import SupervisorLink

if TYPE_CHECKING:
    from model_worker.engines.constraints import Constraints


@dataclass(frozen=True, slots=True)
class _Parked:
    channel: int
    request: int
    party: int


class Parking:
    """The parked jobs of one worker.

    constraints  the engine's constraints; None if it offers none
    """

    def __init__(self, constraints: "Constraints | None", link: SupervisorLink) -> None:
        self._constraints, self._link = constraints, link
        self._compiling: dict[int, _Parked] = {}
        """The parked jobs by job id. Cancelled jobs stay here until their costs have been reported."""
        self._ids: dict[tuple[int, int], int] = {}
        """Job ids of the requests that the supervisor will send again."""

    def park(
        self, job_id: int, channel: int, request: int, carry: dict[str, Any], constraint: tuple[str, str] | None
    ) -> bool:
        """Give a job back if its constraint is not at hand. Return whether that was done."""
        constraints = self._constraints
        if constraints is None or constraint is None or carry.get("stay") or constraints.is_at_hand(*constraint):
            return False
        party = carry.get("party", channel)
        constraints.compile_ahead(job_id, party, *constraint)
        self._compiling[job_id] = _Parked(channel, request, party)
        self._ids[channel, request] = job_id
        self._link.parked(channel, request)
        return True

    def take(self, channel: int, request: int) -> int | None:
        """Return the id under which the constraint of a job was compiled; None if the job was not parked."""
        return self._ids.pop((channel, request), None)

    def forget(self, job_id: int) -> None:
        """Forget a job that ``take`` returned, because the engine has it now, or because it has ended."""
        if self._constraints is not None and not self._constraints.forget(job_id):
            self._compiling.pop(job_id, None)

    def cancel(self, channel: int, request: int) -> bool:
        """Forget a parked request. Return whether there was one."""
        job_id = self.take(channel, request)
        if job_id is not None:
            self.forget(job_id)
        return job_id is not None

    def tell(self) -> None:
        """Tell the supervisor which constraints were compiled."""
        if self._compiling and self._constraints is not None:
            for job_id, seconds in self._constraints.compiled_ahead():
                parked = self._compiling.pop(job_id)
                self._link.compiled(parked.channel, parked.request, parked.party, ceil(1000 * seconds))

    @property
    def busy(self) -> bool:
        """Return whether constraints are being compiled, so that ``tell`` will have something to report."""
        return bool(self._compiling)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return descriptors that become readable when ``tell`` has something to report."""
        return () if self._constraints is None or not self._compiling else self._constraints.descriptors
