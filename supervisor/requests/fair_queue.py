"""The line of requests that wait for one model: fair between clients, weighted by priority, nobody starves. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996) on two levels, with tokens as the service, as VTC (Sheng et al.,
"Fairness in Serving Large Language Models", 2024) has it: each client of each priority has an account of the tokens
that were computed for it, and the next request is that of the account served least. Priorities share in the same way,
by weight: one that is seldom used goes first whenever it is, and the least of them still moves while the others queue.
Who comes (back) begins where the others are: idle time saves nothing up.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.requests.in_flight import InFlight

WEIGHTS = {"interactive": 16, "normal": 4, "batch": 1}
"""Of 21 tokens, while all three have requests waiting."""
_ties = count()


@dataclass(slots=True, eq=False)
class Band:
    """One priority. ``served``: tokens divided by the weight; ``clock``: what the account chosen last had got."""

    weight: int
    served: float = 0.0
    clock: float = 0
    waiting: int = 0
    accounts: dict[int, "Account"] = field(default_factory=dict)
    heap: list[tuple[float, int, "Account"]] = field(default_factory=list)
    """(served, tie, account) of those with requests waiting. ``served`` may be outdated: the true one is no less."""


@dataclass(slots=True, eq=False)
class Account:
    """One client within one priority. ``served``: tokens."""

    band: Band
    served: float = 0
    requests: list["InFlight"] = field(default_factory=list)
    """In order. A list, since most are empty while their requests run: an empty deque takes 600 bytes."""
    in_heap: bool = False

    def charge(self, tokens: int) -> None:
        """So many tokens were computed for this client."""
        self.served += tokens
        # Who comes new begins at the share of those that wait, or a stream of newcomers would keep them out for ever.
        self.band.clock += tokens / max(1, len(self.band.heap))
        self.band.served += tokens / self.band.weight


class FairQueue:
    """Requests in the order in which they are to be given to workers."""

    def __init__(self) -> None:
        self._bands = {name: Band(weight) for name, weight in WEIGHTS.items()}
        self._clock = 0.0
        """What the band that was chosen last had got."""
        self.cost = 0
        """Tokens of all prompts waiting."""

    def __len__(self) -> int:
        return sum(band.waiting for band in self._bands.values())

    def __iter__(self) -> Iterator["InFlight"]:
        for band in self._bands.values():
            for account in band.accounts.values():
                yield from account.requests

    def account(self, channel: int, priority: str) -> Account:
        """A client's account; made at its first request."""
        band = self._bands[priority]
        account = band.accounts.get(channel)
        if account is None:
            account = band.accounts[channel] = Account(band)
        return account

    def charge(self, channel: int, tokens: int) -> None:
        """Charge a client for something that is not part of an answer. Nothing if it is gone."""
        accounts = (band.accounts.get(channel) for band in self._bands.values())
        if (account := next(filter(None, accounts), None)) is not None:
            account.charge(tokens)

    def forget(self, channel: int) -> None:
        """The client is gone, and none of its requests waits here."""
        for band in self._bands.values():
            band.accounts.pop(channel, None)
            if len(band.heap) > 64 + 2 * len(band.accounts):  # those that left
                for _, _, account in band.heap:
                    account.in_heap = bool(account.requests)
                band.heap = [entry for entry in band.heap if entry[2].in_heap]
                heapq.heapify(band.heap)

    def push(self, request: "InFlight") -> None:
        account = request.account
        band = account.band
        if not band.waiting:
            band.served = max(band.served, self._clock)
        if not account.requests:
            account.served = max(account.served, band.clock)
        if request.charged:  # it has had its turn, and comes back
            account.requests.insert(0, request)
        else:
            account.requests.append(request)
        band.waiting += 1
        self.cost += request.cost
        if not account.in_heap:
            account.in_heap = True
            heapq.heappush(band.heap, (account.served, next(_ties), account))

    def pop(self) -> "InFlight":
        """Remove the next request, and charge its prompt the first time. There must be one."""
        band = min((b for b in self._bands.values() if b.waiting), key=lambda b: b.served)
        self._clock = max(self._clock, band.served)
        while True:
            served, _, account = band.heap[0]
            if not account.requests:  # they were cancelled
                heapq.heappop(band.heap)
                account.in_heap = False
            elif served < account.served:  # it got tokens meanwhile
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
        """Take a request out that waits here. Raises ValueError if it does not."""
        request.account.requests.remove(request)
        request.account.band.waiting -= 1
        self.cost -= request.cost

    def position(self, request: "InFlight") -> int:
        """About how many requests are before this one: those of higher priority, and in turns with other clients."""
        own = request.account.requests.index(request)
        ahead = own
        for band in self._bands.values():
            if band is request.account.band:
                break
            ahead += band.waiting
        for _, _, account in request.account.band.heap:  # who has nothing waiting is not before it
            if account is not request.account:
                ahead += min(len(account.requests), own + (account.served <= request.account.served))
        return ahead
