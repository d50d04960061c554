"""When more messages arrive than the supervisor can handle, it ends the right connections."""

import socket

import pytest

from supervisor.ports.floods import SHORT_MESSAGES, ArrivalLimits, Arrivals
from supervisor.ports.listeners import GATHERED, GROWTH, UNREAD, Gathering

MIB = 1 << 20


def few(**bounds: int) -> Arrivals[str]:
    return Arrivals(ArrivalLimits(**bounds))


def fill(arrivals: Arrivals[str], channel: int, count: int, size: int = 1) -> None:
    for number in range(count):
        arrivals.add(channel, f"{channel}.{number}", size)


def test_connections_take_turns_and_each_keeps_its_order() -> None:
    arrivals = few()
    fill(arrivals, 1, 3)
    fill(arrivals, 2, 1)
    fill(arrivals, 3, 2)
    taken = []
    while arrivals:
        taken.append(arrivals.next())
    assert taken == [(1, "1.0"), (2, "2.0"), (3, "3.0"), (1, "1.1"), (3, "3.1"), (1, "1.2")]
    assert arrivals.next() is None


def test_what_is_dropped_is_not_counted_any_more() -> None:
    arrivals = few(messages_of_all=1000)
    fill(arrivals, 1, 900)
    arrivals.drop(1)
    arrivals.drop(1)
    assert not arrivals
    fill(arrivals, 2, 900)
    assert arrivals.excessive(grown=False) == []


def test_one_connection_may_have_so_many_messages_and_bytes_waiting() -> None:
    arrivals = few(messages_of_connection=1000, bytes_of_connection=50 * MIB)
    fill(arrivals, 1, 1000)
    fill(arrivals, 2, 2, 25 * MIB)
    assert arrivals.excessive(grown=False) == []
    fill(arrivals, 1, 1)
    fill(arrivals, 2, 1)
    assert sorted(arrivals.excessive(grown=False)) == [(1, 1001, 1001), (2, 3, 50 * MIB + 1)]
    assert arrivals.excessive(grown=False) == [], "told once"


def test_of_all_together_those_with_the_longest_lines_are_ended() -> None:
    arrivals = few(messages_of_all=3000)
    fill(arrivals, 1, 1400)
    fill(arrivals, 2, 1200)
    fill(arrivals, 3, 600)
    assert sorted(arrivals.excessive(grown=False)) == [(1, 1400, 1400), (2, 1200, 1200)]


def test_a_process_that_grows_while_messages_wait_ends_the_longest_lines() -> None:
    arrivals = few(growth=100 * MIB)
    fill(arrivals, 1, SHORT_MESSAGES)
    fill(arrivals, 2, 10)
    assert not arrivals.has_grown(30 * MIB)
    assert not arrivals.has_grown(130 * MIB)
    assert arrivals.has_grown(131 * MIB)
    assert arrivals.excessive(grown=False) == []
    assert arrivals.excessive(grown=True) == [(1, SHORT_MESSAGES, SHORT_MESSAGES)]
    arrivals.all_taken()
    assert not arrivals.has_grown(131 * MIB), "counted anew"


def test_nobody_with_a_short_line_is_to_blame_for_growth() -> None:
    arrivals = few(growth=100 * MIB)
    fill(arrivals, 1, SHORT_MESSAGES - 1)
    fill(arrivals, 2, SHORT_MESSAGES - 1)
    assert arrivals.excessive(grown=True) == []


def test_nobody_is_suspected_of_gathering_while_memory_does_not_grow() -> None:
    gathering = Gathering()
    asked: list[None] = []

    def heard() -> set[int]:
        asked.append(None)
        return set()

    for resident in (MIB, GROWTH, MIB):
        assert gathering.find_abusers(resident, [-1], heard) == set()
    assert not asked


@pytest.mark.parametrize(("unread", "ended"), [(0, False), (UNREAD - 1, False), (UNREAD, True)])
def test_only_a_connection_with_a_backlog_is_suspected_when_memory_has_grown(unread: int, ended: bool) -> None:
    """A small request that libzmq has not read yet is no sign of a flood. On a busy machine reading takes long."""
    gathering = Gathering()
    client, ours = socket.socketpair()
    with client, ours:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * UNREAD)
        client.sendall(b"x" * unread)
        grown = (MIB, MIB + GROWTH, MIB + GROWTH + GATHERED)
        found = [gathering.find_abusers(resident, [ours.fileno()], set) for resident in grown]
    assert found[:2] == [set(), set()], "one check is not enough"
    assert bool(found[2]) == ended


def test_a_client_whose_messages_libzmq_has_no_time_to_read_is_not_ended() -> None:
    """libzmq reads nothing while it gets no processor time. Messages that it read before may make the process grow."""
    gathering = Gathering()
    client, ours = socket.socketpair()
    with client, ours:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * UNREAD)
        client.sendall(bytes(UNREAD))
        fd = ours.fileno()
        assert gathering.find_abusers(0, [fd], set) == set()
        for grown in (0, 0, MIB, MIB, GATHERED - 1):
            assert gathering.find_abusers(GROWTH + grown, [fd], set) == set()
        assert gathering.find_abusers(GROWTH + GATHERED, [fd], lambda: {fd}) == set(), "it brought a message"
        calm = GROWTH + GATHERED
        assert gathering.find_abusers(calm + GROWTH, [fd], set) == set(), "suspected anew"
        assert gathering.find_abusers(calm + GROWTH + GATHERED, [fd], set) == {fd}
