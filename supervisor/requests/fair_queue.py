"""The queue of requests that wait for one model. It is fair between clients and weighted by priority. Pure.

The method is start-time fair queueing (Goyal, Vin, Cheng 1996) on two levels. Clients share tokens, as in VTC (Sheng et
al., "Fairness in Serving Large Language Models", 2024). Each client has an account for each priority. The account
counts the tokens that were computed for the client. The next request is one of the account that was served least.
Priorities share in the same way, by weight. A priority that is seldom used goes first when it is used. The lowest
priority still moves while the others have requests waiting, so no client starves. A client that comes, or comes back,
begins where the other clients are: idle time earns no claim.

A client is a party, see ``InFlight``: a connection over ipc, or a key with all its requests.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.requests.request import InFlight

WEIGHTS = {"interactive": 16, "normal": 4, "batch": 1}
"""The share of each priority, in parts of 21, while all three have requests waiting."""
MOST_EMPTY = 64
"""Accounts without waiting requests that may always stay in the heap of a priority."""
_ties = count()


@dataclass(slots=True, eq=False)
class Band:
    """One priority.

    served   tokens that were computed for it, divided by its weight
    clock    ``served`` of the account that was chosen last
    waiting  requests that wait
    """

    weight: int
    served: float = 0.0
    clock: float = 0
    waiting: int = 0
    accounts: dict[int, "Account"] = field(default_factory=dict)
    heap: list[tuple[float, int, "Account"]] = field(default_factory=list)
    """(served, tie, account) of the accounts with requests waiting, and of some whose requests were all cancelled.
    ``served`` may be outdated: then it is too low."""

    def compact(self) -> None:
        """Remove accounts without waiting requests from the heap, if most of it may be such accounts.

        Otherwise they would stay until they are first in the heap. A place in the queue takes time for each of them.
        """
        if len(self.heap) <= MOST_EMPTY + 2 * self.waiting:
            return
        for _, _, account in self.heap:
            account.in_heap = bool(account.requests)
        self.heap = [entry for entry in self.heap if entry[2].in_heap]
        heapq.heapify(self.heap)


@dataclass(slots=True, eq=False)
class Account:
    """One client within one priority. ``served``: tokens that were computed for it."""

    band: Band
    served: float = 0
    requests: list["InFlight"] = field(default_factory=list)
    """The requests that wait, in order. A list, because most accounts have none, and an empty deque takes 600 bytes."""
    in_heap: bool = False

    def charge(self, tokens: int) -> None:
        """Count tokens that were computed for this client."""
        self.served += tokens
        # A new client begins at the share of the clients that wait. Otherwise a stream of new clients could keep those
        # waiting for ever.
        self.band.clock += tokens / max(1, len(self.band.heap))
        self.band.served += tokens / self.band.weight


class FairQueue:
    """Requests in the order in which they are to be given to workers."""

    def __init__(self) -> None:
        self._bands = {name: Band(weight) for name, weight in WEIGHTS.items()}
        self._clock = 0.0
        """``served`` of the band that was chosen last."""
        self.cost = 0
        """Tokens of the prompts of all requests that wait."""

    def __len__(self) -> int:
        return sum(band.waiting for band in self._bands.values())

    def __iter__(self) -> Iterator["InFlight"]:
        for band in self._bands.values():
            for account in band.accounts.values():
                yield from account.requests

    def account(self, party: int, priority: str) -> Account:
        """Return a client's account. It is made at the client's first request of this priority."""
        band = self._bands[priority]
        account = band.accounts.get(party)
        if account is None:
            account = band.accounts[party] = Account(band)
        return account

    def charge(self, party: int, tokens: int) -> None:
        """Charge a client for something that is not part of an answer. A client that is gone is not charged."""
        accounts = (band.accounts.get(party) for band in self._bands.values())
        if (account := next(filter(None, accounts), None)) is not None:
            account.charge(tokens)

    def forget(self, party: int) -> None:
        """Forget a client that is gone. None of its requests may wait here."""
        for band in self._bands.values():
            band.accounts.pop(party, None)
            band.compact()

    def push(self, request: "InFlight") -> None:
        """Let a request wait."""
        account = request.account
        band = account.band
        if not band.waiting:
            band.served = max(band.served, self._clock)
        if not account.requests:
            account.served = max(account.served, band.clock)
        if request.charged:  # it has had its turn already, and was given back
            account.requests.insert(0, request)
        else:
            account.requests.append(request)
        band.waiting += 1
        self.cost += request.cost
        if not account.in_heap:
            account.in_heap = True
            heapq.heappush(band.heap, (account.served, next(_ties), account))

    def pop(self) -> "InFlight":
        """Remove the next request, and charge its prompt the first time. At least one request must wait."""
        band = min((b for b in self._bands.values() if b.waiting), key=lambda b: b.served)
        self._clock = max(self._clock, band.served)
        while True:
            served, _, account = band.heap[0]
            if not account.requests:  # all were cancelled
                heapq.heappop(band.heap)
                account.in_heap = False
            elif served < account.served:  # tokens were computed for the client meanwhile
                heapq.heapreplace(band.heap, (account.served, next(_ties), account))
            else:
                break
        band.clock = max(band.clock, account.served)
        request = account.requests.pop(0)
        if not account.requests:
            heapq.heappop(band.heap)
            account.in_heap = False
        band.waiting -= 1
        self.cost -= request.cost
        if not request.charged:
            account.charge(request.cost)
            request.charged = True
        return request

    def remove(self, request: "InFlight") -> None:
        """Take out a request that waits here. Raises ValueError if it does not wait here."""
        request.account.requests.remove(request)
        request.account.band.waiting -= 1
        self.cost -= request.cost
        request.account.band.compact()

    def position(self, request: "InFlight") -> int:
        """Return about how many requests are before this one. Higher priorities go first; clients take turns."""
        own = request.account.requests.index(request)
        ahead = own
        for band in self._bands.values():
            if band is request.account.band:
                break
            ahead += band.waiting
        for _, _, account in request.account.band.heap:  # an account with nothing waiting is not before it
            if account is not request.account:
                ahead += min(len(account.requests), own + (account.served <= request.account.served))
        return ahead
