"""What is known of the machines of a cluster: which came, which are gone and for how long."""

from supervisor.cluster.machines import GONE_S, MOST_GONE, Machines
from supervisor.cluster.messages import Node


def nodes(*names: str) -> list[Node]:
    return [Node(f"id-{name}", name, "10.0.0.1", 2.0, 1.0, 0.0, own=name == "desk") for name in names]


def gone(machines: Machines, now: float) -> dict[str, float]:
    return {each["name"]: each["gone_s"] for each in machines.describe({}, {}, now)["gone"]}


def test_machines_come_go_and_come_back() -> None:
    machines = Machines()
    assert machines.describe({}, {}, 5.0) == {"answered_s": None, "nodes": [], "gone": []}
    assert machines.adopt(nodes("desk", "one", "two"), 10.0) == (["desk", "one", "two"], [])
    assert machines.adopt(nodes("desk", "two"), 20.0) == ([], ["one"])
    assert gone(machines, 25.0) == {"one": 5.0}
    assert machines.names() == {"desk", "one", "two"}
    assert machines.adopt(nodes("desk", "one", "two"), 30.0) == (["one"], [])
    assert gone(machines, 31.0) == {}


def test_machines_that_go_while_nobody_can_ask_are_gone_afterwards() -> None:
    machines = Machines()
    machines.adopt(nodes("desk", "one"), 0.0)
    machines.lose()
    assert machines.nodes == []
    assert gone(machines, 5.0) == {}, "nobody knows"
    assert machines.adopt(nodes("desk"), 10.0) == ([], ["one"])
    assert gone(machines, 12.0) == {"one": 2.0}


def test_the_time_of_the_last_answer_counts() -> None:
    machines = Machines()
    machines.adopt(nodes("desk"), 1.0)
    machines.confirm(9.0)
    assert machines.describe({}, {}, 10.0)["answered_s"] == 1.0


def test_what_agents_told_is_shown_with_their_machine() -> None:
    machines = Machines()
    machines.adopt(nodes("desk", "one"), 0.0)
    desk, one = machines.describe({"one": 0.26}, {"one": "0.1.0", "other": "9"}, 1.0)["nodes"]
    assert (desk["version"], desk["heard_s"], desk["own"]) == (None, None, True)
    assert (one["version"], one["heard_s"], one["gpus"], one["free"]) == ("0.1.0", 0.3, 2.0, 1.0)


def test_what_is_remembered_is_bounded() -> None:
    machines = Machines()
    for number in range(3 * MOST_GONE):
        machines.adopt(nodes("desk", f"pod-{number}"), float(number))
    now = 3.0 * MOST_GONE
    assert len(gone(machines, now)) == MOST_GONE
    assert f"pod-{3 * MOST_GONE - 2}" in gone(machines, now)
    assert "pod-0" not in machines.names()
    assert gone(machines, now + GONE_S) == {}
    machines.adopt(nodes("desk"), now + GONE_S)
    assert machines.names() == {"desk", f"pod-{3 * MOST_GONE - 1}"}
