"""Nonsense from a worker is dropped and counted, or ends that worker, and harms nothing else."""

from collections.abc import Iterator

import pytest

from tests.deterministic_engine import answer
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {"a": engine("TalksNonsense", context=100_000), "b": engine(context=100_000)}
    with Serving(models, restart={"limit": 50, "initial": "10ms"}) as serving:
        yield serving


def test_events_for_nobody_are_dropped_and_counted(serving: Serving) -> None:
    what, frames = "another's", 40 * 20 * 3
    before = serving.counters()["worker_frames_dropped"]
    with RawClient(serving.runtime_dir) as client:
        for request in range(1, 9):
            client.generate(request, "b", f"bystander {request}", max_tokens=200)
        client.generate(20, "a", f"bad {what}", max_tokens=30)
        client.read_until_ended(20)
        assert client.heard[20].text == answer(f"bad {what}", 30)
        client.read_until_ended(*range(1, 9))
        for request in range(1, 9):
            heard = client.heard[request]
            assert heard.text == answer(f"bystander {request}", 200)
            assert (heard.ends, heard.seqs) == (["length"], list(range(200)))
        assert serving.counters()["worker_frames_dropped"] == before + frames
    assert serving.status("a")["generation"] == serving.status("b")["generation"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("greeting", "its story:"),  # a second READY
        ("garbage", "sent what cannot be"),  # an unreadable frame may have held a terminal event
        ("leap", "where 5 was due"),  # an event out of turn
        ("leap to the end of numbers", "where 5 was due"),
        ("nested report", "plain values"),  # could be decoded, but not be packed again for `status`
    ],
)
def test_a_worker_that_sends_what_cannot_be_is_ended(serving: Serving, what: str, message: str) -> None:
    generation = serving.status("a")["generation"]
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "b", "bystander", max_tokens=200)
        client.generate(2, "a", f"bad {what}", max_tokens=10_000, route={"resume": False})
        client.read_until_ended(1, 2)
        assert client.heard[2].ends == ["worker_died"]
        assert client.heard[2].text == answer(f"bad {what}", client.heard[2].tokens)
        assert client.heard[1].text == answer("bystander", 200)
    wait_until(lambda: serving.status("a")["generation"] > generation)
    serving.wait_state("a", "ready")
    assert message in serving.log()
    assert serving.status("a")["last_exit"]["message"].startswith("killed by the supervisor")


def test_a_worker_whose_connection_was_cut_ends_itself(serving: Serving) -> None:
    """libzmq closes the connection of a peer that sends a frame over 16 MiB, and tells neither program."""
    with RawClient(serving.runtime_dir) as client:
        client.generate(2, "a", "bad giant", max_tokens=50_000, route={"resume": False})
        client.read_until_ended(2)
        assert client.heard[2].ends == ["worker_died"]
    serving.wait_state("a", "ready")
    assert "connection to the supervisor was lost" in serving.log("a")
