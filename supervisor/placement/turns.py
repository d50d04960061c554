"""How models that cannot be loaded together take turns. Pure: times are arguments, in monotonic seconds.

A start that finds no room waits for busy models. Without a rule it would wait for ever while requests for those models
keep coming, since each of them would be busy at every look. The rule has three parts:

* Once a start has waited for ``YIELD_AFTER_S``, enough busy models yield: they take no new requests, finish those that
  they have, and make room. Requests that come for them meanwhile wait, and start them again afterwards.
* A model that has just come up does not yield before it has been up for ``STAY_S``, and for ``STAY_LOADS`` times as
  long as it took to come up. So at most a third of the time goes into loads, and few models are exchanged.
* Starts come first that began first. A later start makes no model leave where an earlier one waits for room.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from supervisor.placement.eviction import EvictionCandidate, Sizes, who_yields

YIELD_AFTER_S = 3.0
"""Seconds that a start waits for busy models to be idle by themselves, before they take no new requests."""
STAY_S = 5.0
"""Seconds for which a model that has come up takes new requests, whoever waits for its place."""
STAY_LOADS = 2.0
"""For how many times the seconds that it took to come up, it takes new requests."""
IDLE_WAIT_S = 60.0
"""Seconds that a start waits for busy models which do not yield to it, because no request waits for its model any more.
The time in which one of them is loading does not count."""
DRAIN_WAIT_S = 600.0
"""Seconds that a start waits for models that yield to it to finish their requests. Then its own requests end with an
error that says when to try again, and those models go on."""


def stays_s(up_s: float, came_up_s: float) -> float:
    """Return for how many seconds a model still takes new requests although another model wants its place.

    up_s       seconds for which it has been up
    came_up_s  seconds that its load, or its wake, took
    """
    return max(0.0, STAY_S - up_s, STAY_LOADS * came_up_s - up_s)


def behind(candidates: Sequence[EvictionCandidate], awaited: Collection[Any]) -> list[EvictionCandidate]:
    """Return the candidates as a later start has to see them: those on GPUs for which earlier starts wait are not idle,
    and do not yield to it.

    awaited  the GPUs for which earlier starts wait
    """
    if not awaited:
        return list(candidates)
    return [replace(c, busy=True, stays_s=inf) if c.held.keys() & {*awaited} else c for c in candidates]


class Turn:
    """The wait of one start for busy models.

    began  when the start began
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._since: float | None = None

    def begin_again(self) -> None:
        """Wait for something else from now on, such as for memory after a place in a group."""
        self._since = None

    def look(
        self,
        now: float,
        missing: Sizes,
        candidates: Sequence[EvictionCandidate],
        *,
        one_suffices: bool = False,
        wanted: bool = True,
        one_loads: bool = False,
    ) -> tuple[str, ...] | None:
        """Return the workers that take no new requests until the next look. Return None if the wait is over.

        missing, candidates, one_suffices  as for ``eviction.choose``, which has found that busy workers are in the way
        wanted     whether a request waits for the model, or somebody has ordered it up
        one_loads  whether one of the models in the way is being loaded
        """
        if self._since is None:
            self._since = now
        yielding: tuple[str, ...] = ()
        if wanted and now - self._began >= YIELD_AFTER_S:
            yielding = who_yields(missing, candidates, one_suffices=one_suffices)
        # A worker that loads cannot be idle yet, and a large model may load for longer. One that need not yield yet
        # will have to.
        if one_loads or (wanted and not yielding):
            self._since = now
        return None if now - self._since >= (DRAIN_WAIT_S if yielding else IDLE_WAIT_S) else yielding
