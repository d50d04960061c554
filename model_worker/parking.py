"""Jobs that go back to the supervisor while their constraints are compiled, so that they hold no slot meanwhile.

A job whose constraint is at hand starts at once. Any other is parked: the supervisor gets PARKED, keeps the request,
and gives the slot to another one. When the constraint is compiled, the supervisor gets COMPILED and sends the job again
when it is that request's turn. The compiled constraint waits here for it.
"""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from model_worker.link import SupervisorLink

if TYPE_CHECKING:
    from model_worker.engines.constraint import Constraints


@dataclass(frozen=True, slots=True)
class _Parked:
    channel: int
    request: int
    party: int


class Parking:
    """The parked jobs of one worker.

    constraints  the engine's; None if it offers none
    """

    def __init__(self, constraints: "Constraints | None", link: SupervisorLink) -> None:
        self._constraints, self._link = constraints, link
        self._compiling: dict[int, _Parked] = {}
        """By job id, also those that were cancelled: what was spent on them has to be told."""
        self._ids: dict[tuple[int, int], int] = {}
        """Job ids of the requests that are to come again."""

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
        """A job has come: return the id under which its constraint was compiled, None if it was not parked."""
        return self._ids.pop((channel, request), None)

    def forget(self, job_id: int) -> None:
        """A job that ``take`` returned is the engine's now, or has ended."""
        if self._constraints is not None and not self._constraints.forget(job_id):
            self._compiling.pop(job_id, None)

    def cancel(self, channel: int, request: int) -> bool:
        """Forget a parked request. Return whether there was one."""
        job_id = self.take(channel, request)
        if job_id is not None:
            self.forget(job_id)
        return job_id is not None

    def tell(self) -> None:
        """Tell the supervisor what was compiled."""
        if self._compiling and self._constraints is not None:
            for job_id, seconds in self._constraints.compiled_ahead():
                parked = self._compiling.pop(job_id)
                self._link.compiled(parked.channel, parked.request, parked.party, ceil(1000 * seconds))

    @property
    def busy(self) -> bool:
        """Whether ``tell`` will have something to tell."""
        return bool(self._compiling)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when ``tell`` has something to tell."""
        return () if self._constraints is None or not self._compiling else self._constraints.descriptors
