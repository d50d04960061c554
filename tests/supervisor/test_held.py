"""Held events come out in the order in which they went in, however adding and taking alternate."""

import os
import random

from supervisor.requests.request import EVENT_COST, SendBuffer

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))


def test_what_goes_in_comes_out_in_order() -> None:
    print(f"TEST_SEED={SEED}")
    rng = random.Random(SEED)
    for _ in range(50):
        held, waiting = SendBuffer(), list[tuple[int, int, bytes]]()
        for _ in range(200):
            if rng.random() < 0.6:
                event = (rng.randrange(8), rng.randrange(4), rng.randbytes(rng.randrange(40)))
                held.add(*event)
                waiting.append(event)
            elif waiting:
                count = rng.randrange(1, len(waiting) + 1)
                numbers, body = held.take(count)
                taken, waiting = waiting[:count], waiting[count:]
                assert numbers == [(flags, tokens, len(event)) for flags, tokens, event in taken]
                assert body == b"".join(event for _, _, event in taken)
            assert len(held) == len(waiting)
            assert held.cost == sum(EVENT_COST + len(event) for _, _, event in waiting)
        held.clear()
        assert (len(held), held.cost) == (0, 0)
