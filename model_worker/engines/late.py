"""A constraint that is still being compiled, for an answer that does not need it yet."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_worker.engines.constraint import Bits, Constraint, Mask


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
