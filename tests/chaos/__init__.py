"""Random faults against real processes, and the invariants that must hold in spite of them.

    python -m tests.chaos --episodes 300 [--seed N] [--lanes 2]
    python -m tests.chaos --minutes 10
    python -m tests.chaos --replay SEED:EPISODE [--times 5]

``plan`` draws the clients and the faults of an episode from (seed, episode) alone. ``load`` runs the clients and
``faults`` inflicts the faults. ``invariants`` and ``vitals`` check the results. ``block`` keeps one supervisor for many
episodes and then ends it. ``report`` prints the results.
"""
