"""The fields of a request that change with every event.

If the compiled module can be used (see ``protocol.process.compiled``), the class is ``fast_path.RequestProgress``. Its
fields are C's own, and ``fast_path`` reads and writes them without Python.

phase             where the request is
resumable         whether another worker may go on with it. Only then ``ids`` are kept
credit            events that may go to the client before it grants more
sent              events that have gone to the client
delivered_tokens  tokens in those events
unpaid            tokens that the client's account has not been charged for yet
has_tokens        whether any token has come
first_token       when the first token came, in monotonic seconds; 0 before it
holds             whether events wait for the client's credit. Read for every event
ids               token ids of the answer so far, those of held events included (u32, little endian)
counters          the numbers of the ledger to which tokens are added as they go to the client, see ``usage.counters``.
                  None: nobody counts. Set by ``count_in``
"""

from typing import TYPE_CHECKING

from protocol.process.compiled import find
from supervisor.requests.request_phase import RequestPhase
from supervisor.usage.counters import Counters


class PlainRequestProgress:
    __slots__ = (
        *("counters", "credit", "delivered_tokens", "has_tokens", "holds", "ids", "phase", "resumable", "sent"),
        *("first_token", "unpaid"),
    )

    def __init__(self, credit: int, resumable: bool) -> None:
        self.phase, self.ids, self.credit, self.resumable = RequestPhase.WAITING, bytearray(), credit, resumable
        self.sent = self.delivered_tokens = self.unpaid = 0
        self.has_tokens = self.holds = False
        self.first_token = 0.0
        self.counters: Counters | None = None

    def count_in(self, counters: Counters) -> None:
        self.counters = counters


if TYPE_CHECKING:
    from supervisor.requests.fast_path import RequestProgress as RequestProgress
else:
    compiled = find("supervisor.requests.fast_path")
    RequestProgress = PlainRequestProgress if compiled is None else compiled.RequestProgress
