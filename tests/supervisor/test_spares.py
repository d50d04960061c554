"""When a spare worker is made: in a quiet moment, and not again and again if spares cannot live."""

from supervisor.workers.local import PAUSE_S, QUIET_S, TRIES, SparePlan

WANTED = ("transformers", "exllamav2", "mine:Engine")


def missing(plan: SparePlan, now: float, *there: str, starting: bool = False) -> list[str]:
    return plan.missing(WANTED, there, now, starting=starting)


def test_each_built_in_engine_gets_one_in_a_quiet_moment() -> None:
    plan = SparePlan()
    assert missing(plan, 0.0, starting=True) == []
    assert missing(plan, QUIET_S - 0.1) == []
    assert missing(plan, QUIET_S) == ["exllamav2", "transformers"]
    assert missing(plan, QUIET_S, "exllamav2") == ["transformers"]
    assert missing(plan, 10.0, starting=True) == []


def test_spares_that_end_by_themselves_are_not_made_for_ever() -> None:
    plan, now = SparePlan(), 100.0
    for number in range(1, TRIES + 1):
        assert "transformers" in missing(plan, now)
        assert plan.ended("transformers", now) is (number < TRIES)
        assert "transformers" not in missing(plan, now + PAUSE_S - 0.1)
        now += PAUSE_S
    assert missing(plan, now + 1e6) == ["exllamav2"]
    plan.used("transformers")
    assert "transformers" in missing(plan, now)
