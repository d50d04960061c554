"""The machine of a cluster that takes a worker is chosen correctly from machines that are given as data."""

from typing import Any

import pytest

from supervisor.cluster.machines import choose, is_worth_another_lease
from supervisor.cluster.messages import Node, Refused
from supervisor.config.reading import AUTO, OTHERS, is_name, labels_of, parse_node
from supervisor.workers.launcher import NoMachineError

NODES = [
    Node("0", "desk", "10.0.0.1", 1, 1, 0, True, {"zone": "a"}),
    Node("1", "one", "10.0.0.2", 1, 1, 0, False, {"zone": "a", "disk": "fast"}),
    Node("2", "two", "10.0.0.3", 4, 4, 0, False, {"zone": "b", "disk": "fast"}),
    Node("3", "three", "10.0.0.4", 0, 0, 0, False, {"zone": "c"}),
]


def chosen(wanted: str = OTHERS, gpus: int = 1, **changes: Any) -> str:
    free = {node.name: node.gpus for node in NODES} | changes.pop("free", {})
    return choose(changes.pop("nodes", NODES), free, wanted, gpus, **changes).name


def refused(*arguments: Any, **changes: Any) -> NoMachineError:
    with pytest.raises(NoMachineError) as caught:
        chosen(*arguments, **changes)
    return caught.value


def test_workers_of_a_model_are_spread() -> None:
    assert chosen() == "one"
    assert chosen(beside={"one": 1}) == "two"
    assert chosen(beside={"one": 1, "two": 1}) == "one"
    assert chosen(held={"one": 2, "two": 1}) == "two"
    assert chosen(beside={"two": 1}, held={"one": 5}) == "one", "workers of the same model count first"
    assert chosen(gpus=0, beside={"one": 1, "two": 1}) == "three"


def test_only_machines_that_are_meant_are_chosen() -> None:
    assert chosen("two") == "two"
    assert chosen("desk") == "desk", "its own name means the supervisor's own machine"
    assert chosen("disk=fast,zone=b") == "two"
    assert chosen("disk=fast") == "one"
    assert chosen(without={"one": ""}) == "two"
    assert chosen("disk=fast", without=["one"]) == "two"


def test_the_refusal_says_how_many_gpus_are_missing_where() -> None:
    full = refused(OTHERS, 2, free={"two": 1})
    assert str(full) == "no other machine of the Ray cluster has 2 GPUs free: one 1 of 1, two 1 of 4, three 0 of 0"
    assert full.missing == {"two": 1}
    alone = refused("one", 1, free={"one": 0})
    assert str(alone) == "one has 0 of 1 GPUs free, and 1 are needed"
    assert alone.missing == {"one": 1}
    assert refused("one", 2).missing == {}, "nobody who leaves would help"


@pytest.mark.parametrize(
    ("wanted", "changes", "says"),
    [
        ("four", {}, "the Ray cluster has no machine four: it has desk, one, three, two"),
        ("two", {"nodes": [NODES[2], NODES[2]]}, "has 2 machines called two: start each with a --node-name of its own"),
        ("zone=d", {}, "the Ray cluster has no other machine with the labels zone=d"),
        (OTHERS, {"nodes": NODES[:1]}, "the Ray cluster has no other machine"),
        (OTHERS, {"without": ["one", "two", "three"]}, "the Ray cluster has no more other machine"),
    ],
)
def test_no_machine_is_meant(wanted: str, changes: dict[str, Any], says: str) -> None:
    error = refused(wanted, **changes)
    assert says in str(error)
    assert error.missing == {}


def test_each_try_on_a_machine_must_bring_another_gpu() -> None:
    def again(passed: set[int], gpus: list[int], *, elsewhere: bool = True) -> bool:
        return is_worth_another_lease(passed, Refused("no room", "why", False, gpus, elsewhere))

    assert again(set(), [0])
    assert again({0, 1}, [1, 2])
    assert not again({0, 1}, [1])
    assert not again({0}, []), "an agent that tells nothing"
    assert not again(set(), [0], elsewhere=False)


def test_words_of_models_yaml() -> None:
    assert [is_name(parse_node(node)) for node in (AUTO, OTHERS, "a=b", "big-box")] == [False, False, False, True]
    assert labels_of("zone=a,ray.io/accelerator-type=H100") == {"zone": "a", "ray.io/accelerator-type": "H100"}
    assert labels_of("big-box") == {}


@pytest.mark.parametrize("node", ["", " a", 5, None, "a\n", "=a", "a=", "a=b,", "a=b,c", "a=b=c", "a = b", "x" * 201])
def test_wrong_words(node: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_node(node)
