"""Random faults against real processes, and the invariants that have to hold all the same.

    python -m tests.chaos --episodes 300 [--seed N] [--lanes 2]
    python -m tests.chaos --minutes 10
    python -m tests.chaos --replay SEED:EPISODE [--times 5]

``plan`` draws what happens from (seed, episode) alone. ``load`` and ``faults`` do it, ``invariants`` and ``vitals``
look at what came of it, ``block`` keeps one supervisor for many episodes and ends it, ``report`` tells it all.
"""
