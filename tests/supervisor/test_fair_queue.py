"""The queue is fair between clients, weights requests by priority, and starves no client."""

from supervisor.requests.queue import FairQueue
from supervisor.requests.request import InFlight, Route, SendBuffer


def push(line: FairQueue, channel: int, number: int, *, priority: str = "normal", cost: int = 10) -> InFlight:
    route = Route(priority=priority)
    account = line.account(channel, priority)
    request = InFlight(channel, number, "m", route, b"", cost, account, accepted=0.0, window=1, held=SendBuffer())
    line.push(request)
    return request


def drain(line: FairQueue, answer: int = 100) -> list[tuple[int, int]]:
    """Return (channel, number) in the order of service. ``answer``: the tokens of each answer."""
    order = []
    while line:
        request = line.pop()
        request.account.charge(answer)
        order.append(request.key)
    return order


def test_one_client_is_served_in_order() -> None:
    line = FairQueue()
    for number in range(5):
        push(line, 1, number)
    assert drain(line) == [(1, number) for number in range(5)]


def test_a_flood_does_not_delay_another_clients_few() -> None:
    line = FairQueue()
    for number in range(100):
        push(line, 1, number)
    for _ in range(8):
        line.pop().account.charge(100)
    for number in range(3):
        push(line, 2, number)
    order = drain(line)
    assert max(order.index((2, number)) for number in range(3)) <= 5, "in turns from where the first client is"


def test_shares_are_of_tokens_not_of_requests() -> None:
    line = FairQueue()
    for number in range(60):
        push(line, 1, number)
        push(line, 2, number)
    served = {1: 0, 2: 0}
    for _ in range(60):
        request = line.pop()
        tokens = 300 if request.channel == 1 else 100
        request.account.charge(tokens)
        served[request.channel] += tokens + request.cost
    assert abs(served[1] - served[2]) <= 310


def test_idle_time_saves_nothing_up() -> None:
    line = FairQueue()
    push(line, 2, 0)
    drain(line)
    for number in range(50):
        push(line, 1, number)
    for _ in range(20):
        line.pop().account.charge(100)
    for number in range(1, 21):
        push(line, 2, number)
    order = [channel for channel, _ in drain(line)]
    assert 8 <= order[:20].count(1) <= 12


def test_priorities_share_by_weight_and_none_starves() -> None:
    line = FairQueue()
    for number in range(400):
        for channel, priority in (1, "interactive"), (2, "normal"), (3, "batch"):
            push(line, channel, number, priority=priority)
    first = [line.pop() for _ in range(210)]  # only prompts are charged here
    counts = [sum(request.channel == channel for request in first) for channel in (1, 2, 3)]
    assert counts[0] > 3 * counts[1] > 6 * counts[2] > 0


def test_a_rare_interactive_request_goes_first() -> None:
    line = FairQueue()
    for number in range(50):
        push(line, 1, number)
    for _ in range(10):
        line.pop().account.charge(100)
    push(line, 2, 0, priority="interactive")
    assert line.pop().key == (2, 0)


def test_removing_and_forgetting() -> None:
    line = FairQueue()
    requests = [push(line, 1, number, cost=7) for number in range(3)]
    other = push(line, 2, 0)
    assert (len(line), line.cost) == (4, 31)
    for request in requests:
        line.remove(request)
    line.forget(1)
    assert (len(line), line.cost, list(line)) == (1, 10, [other])
    assert drain(line) == [(2, 0)]


def test_positions_count_turns() -> None:
    line = FairQueue()
    flood = [push(line, 1, number) for number in range(10)]
    few = [push(line, 2, number) for number in range(2)]
    urgent = push(line, 3, 0, priority="interactive")
    assert line.position(urgent) == 0
    assert line.position(flood[0]) in (1, 2)
    assert line.position(few[1]) <= 4
    assert line.position(flood[9]) == 12


def test_newcomers_do_not_keep_out_who_stays() -> None:
    """Each newcomer sends one request and leaves. Newcomers share with the client that stays, and cannot starve it."""
    line = FairQueue()
    for number in range(50):
        push(line, 1, number)
    line.pop().account.charge(100)
    served = 0
    for newcomer in range(2, 202):
        push(line, newcomer, 0)
        request = line.pop()
        request.account.charge(100)
        served += request.channel == 1
        if request.channel != 1:
            line.forget(request.channel)
    assert served >= 5


def test_who_comes_and_leaves_is_forgotten() -> None:
    line = FairQueue()
    push(line, 1, 0)
    for channel in range(2, 2000):
        line.remove(push(line, channel, 0))
        line.forget(channel)
    band = line._bands["normal"]
    assert len(band.heap) < 200
    assert len(band.accounts) == 1
    assert drain(line) == [(1, 0)]


def test_clients_that_cancel_while_no_request_is_served_cost_the_others_nothing() -> None:
    """Regression: their accounts stayed in the heap, and computing a place in the queue took time for all of them."""
    line = FairQueue()
    kept = [push(line, client, 1) for client in range(1, 21)]
    for client in range(100, 5100):
        line.remove(push(line, client, 1))
    (heap,) = [band.heap for band in line._bands.values() if band.heap]
    assert len(heap) <= 64 + 2 * len(kept) + 1
    assert all(line.position(request) < len(kept) for request in kept)
    assert drain(line) == [(client, 1) for client in range(1, 21)]
    for client in range(100, 200):
        push(line, client, 2)
    assert len(drain(line)) == 100, "an account that left the heap comes back"
