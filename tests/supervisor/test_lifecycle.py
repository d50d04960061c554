"""The table of life cycle transitions is complete and has no dead ends."""

import pytest

from supervisor.workers.life import (
    TRANSITIONS,
    Event,
    IllegalTransition,
    LifecycleAction,
    RestartPolicy,
    WorkerLife,
    WorkerState,
)

S, E, X = WorkerState, Event, LifecycleAction

HAS_PROCESS = {S.STARTING, S.LOADING, S.READY, S.FALLING_ASLEEP, S.ASLEEP, S.WAKING, S.DRAINING, S.STOPPING}
ROADS: dict[WorkerState, list[Event]] = {
    S.STOPPED: [],
    S.STARTING: [E.START],
    S.LOADING: [E.START, E.HELLO],
    S.READY: [E.START, E.HELLO, E.LOADED],
    S.FALLING_ASLEEP: [E.START, E.HELLO, E.LOADED, E.SLEEP],
    S.ASLEEP: [E.START, E.HELLO, E.LOADED, E.SLEEP, E.SLEPT],
    S.WAKING: [E.START, E.HELLO, E.LOADED, E.SLEEP, E.SLEPT, E.START],
    S.DRAINING: [E.START, E.HELLO, E.LOADED, E.STOP],
    S.STOPPING: [E.START, E.STOP],
    S.BACKOFF: [E.START, E.DIED],
    S.FAILED: [E.START, E.DIED_FOR_GOOD],
    S.UNLOADED: [E.ON_DEMAND],
}


def in_state(state: WorkerState) -> WorkerLife:
    life = WorkerLife("m", 0.0, RestartPolicy())
    for at, event in enumerate(ROADS[state]):
        life.apply(event, float(at), "on the way")
    assert life.state is state
    return life


@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("event", E)
def test_every_pair_has_a_row_or_raises_with_the_story(state: WorkerState, event: Event) -> None:
    life = in_state(state)
    if (state, event) in TRANSITIONS:
        after, effects = TRANSITIONS[state, event]
        assert life.apply(event, 99.0, "the test").actions == effects
        assert life.state is after
        assert life.since == (99.0 if after is not state else max(0.0, len(ROADS[state]) - 1.0))
        assert (life.story[-1].event, life.story[-1].cause) == (event, "the test")
    else:
        with pytest.raises(IllegalTransition) as caught:
            life.apply(event, 99.0)
        message = str(caught.value)
        assert f"m: {event} in state {state}" in message
        assert message.count("on the way") == len(ROADS[state])
        assert life.state is state, "a refused event changes nothing"


def test_orders_are_legal_in_every_state() -> None:
    """An operator may give any order at any time."""
    for state in S:
        for order in (E.START, E.STOP, E.STOP_NOW):
            assert (state, order) in TRANSITIONS


def test_a_process_may_die_whenever_there_is_one() -> None:
    for state in S:
        for death in (E.DIED, E.DIED_FOR_GOOD):
            assert ((state, death) in TRANSITIONS) == (state in HAS_PROCESS), (state, death)


def test_messages_that_cross_with_an_order_are_expected() -> None:
    for late in (E.HELLO, E.LOADED, E.DRAINED, E.SLEPT, E.CANNOT_SLEEP, E.WOKE):
        assert TRANSITIONS[S.STOPPING, late] == (S.STOPPING, ())


def test_every_state_is_reached_and_none_is_a_dead_end() -> None:
    edges = {state: {after for (before, _), (after, _) in TRANSITIONS.items() if before is state} for state in S}
    for start in S:
        reached, todo = {start}, [start]
        while todo:
            for after in edges[todo.pop()] - reached:
                reached.add(after)
                todo.append(after)
        assert reached == set(S), f"from {start}"


def test_what_leaves_a_process_ends_its_requests() -> None:
    for (before, event), (after, effects) in TRANSITIONS.items():
        if event in (E.DIED, E.DIED_FOR_GOOD):
            assert X.END_ACTIVE in effects, (before, event)
            assert after not in HAS_PROCESS


def test_requests_never_wait_for_a_model_that_will_not_come() -> None:
    """A model that will not come up again refuses new requests first, and then ends the waiting ones."""
    takes_new = {
        S.STARTING, S.LOADING, S.READY, S.BACKOFF, S.UNLOADED, S.FALLING_ASLEEP, S.ASLEEP, S.WAKING,
    }  # fmt: skip
    for (before, event), (after, effects) in TRANSITIONS.items():
        if event in (E.UNLOAD, E.CANNOT_SLEEP) and before is not S.STOPPING:
            assert X.HOLD_NEW in effects, "it comes again"
            continue
        if event is E.ON_DEMAND:
            assert effects[-1] is X.REST
            continue
        if event is E.DIED and before in (S.FALLING_ASLEEP, S.ASLEEP):
            assert X.END_WAITING not in effects, "a request starts it again"
            continue
        if before in takes_new and after not in takes_new:
            assert effects.index(X.REFUSE_NEW) < effects.index(X.END_WAITING), (before, event)
        if before not in takes_new and after in takes_new:
            assert effects.index(X.ACCEPT_NEW) < effects.index(X.BEGIN_START), (before, event)
        if before in takes_new and after in takes_new:
            assert X.END_WAITING not in effects, (before, event)


def test_a_process_is_spawned_only_where_there_is_none() -> None:
    for (before, event), (after, effects) in TRANSITIONS.items():
        assert (X.BEGIN_START in effects) == (before not in HAS_PROCESS and after in HAS_PROCESS), (before, event)
        if X.CLIMB in effects:
            assert before in HAS_PROCESS
            assert after is S.STOPPING


def test_only_an_operator_ends_failed() -> None:
    """The fleet may also do so, for a model that only lacked room."""
    assert {event for (state, event) in TRANSITIONS if state is S.FAILED} == {E.START, E.STOP, E.STOP_NOW, E.ON_DEMAND}
    assert X.FORGIVE in TRANSITIONS[S.FAILED, E.START][1]


def test_a_pending_retry_does_not_survive_an_order() -> None:
    for order in (E.START, E.STOP, E.STOP_NOW):
        assert X.FORGIVE in TRANSITIONS[S.BACKOFF, order][1]


def test_the_story_is_bounded() -> None:
    life = in_state(S.STARTING)
    for at in range(1000):
        life.apply(E.START, float(at))
    assert len(life.story) <= 50
