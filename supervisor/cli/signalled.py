"""Turn signals into exceptions, so that a command ends its child process before it ends itself."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Signalled(BaseException):
    """A signal that has to end this process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def raised(*numbers: signal.Signals) -> Iterator[None]:
    """Make these signals raise Signalled in the body, except signals that the parent has set to be ignored (nohup).

    Call this in the main thread only (ValueError).
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        raise Signalled(number)

    former = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if former[number] != signal.SIG_IGN]
    try:
        for number in caught:
            signal.signal(number, handle)
        yield
    finally:
        for number in caught:
            signal.signal(number, former[number])
