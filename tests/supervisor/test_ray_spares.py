"""Which spare agents are kept on the machines of a cluster."""

from concurrent.futures import Future
from typing import Any

from supervisor.cluster.messages import KeepSpares, Node
from supervisor.cluster.ray_driver import ASK_S, Spares
from supervisor.workers.local import PAUSE_S, QUIET_S, TRIES

HERE = Node("id-0", "desk", "10.0.0.1", 1.0, 1.0, 0.0, True)
ONE = Node("id-1", "one", "10.0.0.2", 2.0, 2.0, 0.0, False, {"zone": "a"})
TWO = Node("id-2", "two", "10.0.0.3", 1.0, 1.0, 0.0, False)
BARE = Node("id-3", "bare", "10.0.0.4", 0.0, 0.0, 0.0, False)
ALL = [HERE, ONE, TWO, BARE]


class Started:
    """Records what is started, asked and ended. An actor is (machine's id, engine, its number)."""

    def __init__(self) -> None:
        self.actors: list[tuple[str, str, int]] = []
        self.asked: list[Any] = []
        """The actor of each question whether its agent lives."""
        self.answers: list[Future[bool]] = []
        self.ended: list[Any] = []
        self.spares = Spares(self._start, self._ask, self.ended.append)

    def _start(self, node_id: str, name: str, engine: str) -> Any:
        assert name.startswith("modelctl-")
        self.actors.append((node_id, engine, len(self.actors)))
        return self.actors[-1]

    def _ask(self, actor: Any) -> Future[bool]:
        self.asked.append(actor)
        self.answers.append(Future())
        return self.answers[-1]

    def kept(self, now: float, *nodes: Node) -> list[tuple[str, str]]:
        """Return (machine's id, engine) of the spares that are started at a time."""
        before = len(self.actors)
        self.spares.keep(nodes or ALL, now)
        return [actor[:2] for actor in self.actors[before:]]


def test_a_spare_for_each_machine_with_gpus_and_engine_that_may_run_there() -> None:
    started = Started()
    assert started.kept(0.0) == [], "nobody has asked for one"
    started.spares.want(KeepSpares([["others", "exllamav2"], ["zone=a", "transformers"], ["two", "own:Engine"]], False))
    assert started.kept(1.0) == []
    now = 1.0 + QUIET_S
    assert started.kept(now) == [("id-1", "exllamav2"), ("id-1", "transformers"), ("id-2", "exllamav2")]
    assert started.kept(now) == []
    started.spares.want(KeepSpares([["others", "exllamav2"]], False))
    assert started.kept(now) == []
    assert [actor[:2] for actor in started.ended] == [("id-1", "transformers")], "no model wants it any more"
    assert started.kept(now, HERE, ONE) == []
    assert [actor[:2] for actor in started.ended[1:]] == [("id-2", "exllamav2")], "its machine is gone"
    started.spares.want(KeepSpares([], True))
    started.spares.keep(ALL, now)
    assert len(started.ended) == 3


def test_none_is_made_while_a_worker_starts() -> None:
    started = Started()
    started.spares.want(KeepSpares([["two", "exllamav2"]], True))
    assert started.kept(10.0) == []
    started.spares.want(KeepSpares([["two", "exllamav2"]], False))
    assert started.kept(10.0 + QUIET_S / 2) == []
    assert started.kept(10.0 + QUIET_S) == [("id-2", "exllamav2")]


def test_one_that_was_not_started_is_not_taken_and_not_made_for_ever() -> None:
    started = Started()
    started.spares.want(KeepSpares([["two", "exllamav2"]], False))
    now = 0.0
    for number in range(TRIES):
        assert started.kept(now) == [("id-2", "exllamav2")]
        assert started.spares.take("id-2", "exllamav2") is None, "it is still being started"
        if number:
            started.answers[-1].set_exception(RuntimeError("of Ray: the actor has died"))
        else:
            started.answers[-1].set_result(False)
        assert started.spares.take("id-2", "exllamav2") is None
        assert started.kept(now) == []
        assert len(started.ended) == number + 1
        now += PAUSE_S
    assert started.kept(now) == []


def test_one_that_has_ended_while_nobody_needed_it_is_replaced() -> None:
    started = Started()
    started.spares.want(KeepSpares([["two", "exllamav2"]], False))
    started.spares.keep(ALL, 0.0)
    for number in 1, 2:
        started.answers[-1].set_result(True)
        assert started.kept(number * ASK_S - 0.1) == []
        assert len(started.asked) == number
        assert started.kept(number * ASK_S) == []
        assert len(started.asked) == number + 1
    now = 10 * ASK_S
    assert started.kept(now) == []
    assert started.asked == 3 * [started.actors[0]], "the answer is awaited"
    started.answers[-1].set_result(False)
    assert started.kept(now) == []
    assert started.ended == [started.actors[0]]
    assert started.spares.take("id-2", "exllamav2") is None
    assert started.kept(now + PAUSE_S - 0.1) == []
    assert started.kept(now + PAUSE_S) == [("id-2", "exllamav2")]
    started.answers[-1].set_result(True)
    started.spares.keep(ALL, now + PAUSE_S + ASK_S)
    assert not started.answers[-1].done()
    assert started.spares.take("id-2", "exllamav2") == started.actors[1], "no start waits for an answer"


def test_one_that_was_taken_is_none_any_more() -> None:
    started = Started()
    started.spares.want(KeepSpares([["two", "exllamav2"]], False))
    started.spares.keep(ALL, 0.0)
    started.answers[-1].set_result(True)
    assert started.spares.take("id-1", "exllamav2") is None
    assert started.spares.take("id-2", "transformers") is None
    assert started.spares.take("id-2", "exllamav2") == started.actors[0]
    assert started.spares.take("id-2", "exllamav2") is None
    started.spares.used("id-2", "exllamav2", 0.0, lived=True)
    assert started.kept(1.0) == [("id-2", "exllamav2")], "the next one takes its place"
    assert started.ended == []
    for _ in range(TRIES):
        started.answers[-1].set_result(True)
        assert started.spares.take("id-2", "exllamav2") is not None
        started.spares.used("id-2", "exllamav2", 1.0, lived=False)
        started.spares.keep(ALL, 1.0 + PAUSE_S)
        if started.answers[-1].done():
            break
    assert len(started.actors) < 2 + TRIES, "dead ones count as tries"
