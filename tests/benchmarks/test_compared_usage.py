"""The ledger of usage equals what the clients of mixed requests count, with kills of workers and of the gateway.

``benchmarks.usage_ledger`` is the long version.
"""

import random

import pytest

from benchmarks.usage_ledger import compare_killed, compare_workers
from benchmarks.usage_requests import COUNTS


@pytest.mark.long
def test_after_kills_of_workers_the_ledger_equals_what_the_clients_counted() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    tally, kills, differences = compare_workers(160, 8, 0.3, seed, constrained=False)
    assert not tally.problems
    assert len(tally.kinds) == 8
    assert kills
    assert differences == dict.fromkeys(COUNTS, 0)


def test_after_a_kill_of_the_gateway_the_difference_is_within_the_bytes_in_flight() -> None:
    (found,) = compare_killed("gateway", 4, 1)
    assert found.over_http >= 0
    assert found.local == 0, "streams that do not pass through the gateway"
    assert found.bytes <= found.bytes_in_flight
