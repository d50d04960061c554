"""Only the streams of a client that does not read are cut off, one by one, and memory stays bounded."""

from collections.abc import Iterator

import psutil
import pytest

from protocol.codec import encode, pack_body
from protocol.limits import STREAM_WINDOW
from protocol.messages import Cancel, Credit, Generate
from supervisor.requests.credit import SendBufferLimits
from supervisor.requests.request import EVENT_COST
from tests.deterministic_engine import answer
from tests.flooding import HELLO, frame, shake_hands
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until

ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"a": engine(step_s=0, context=2 * ENDLESS, max_batch_size=8)}) as serving:
        yield serving


@pytest.mark.long
def test_a_stream_without_credit_is_cut_off_alone(serving: Serving) -> None:
    with RawClient(serving.runtime_dir) as slow, serving.client() as other:
        slow.generate(1, "a", "never reads", max_tokens=ENDLESS)
        slow.generate(2, "a", "reads", max_tokens=ENDLESS)
        bystander = other.generate("a", "bystander", max_tokens=10_000)
        # twice as much credit as a stream may hold, and all at once: on a busy machine, credit that is granted while
        # reading could come too late
        for _ in range(2 * SendBufferLimits.of_stream // EVENT_COST // STREAM_WINDOW):
            slow.send(Credit(2, STREAM_WINDOW))
        while not slow.heard.get(1) or not slow.heard[1].ends:
            slow.receive()
        cut = slow.heard[1]
        assert cut.ends == ["slow_consumer"]
        assert cut.seqs == list(range(STREAM_WINDOW + 1)), "the window's events, then the end"
        assert cut.text == answer("never reads", cut.tokens)
        assert cut.delivered == cut.tokens
        assert str(SendBufferLimits.of_stream) in str(cut.error["message"])
        assert not slow.heard[2].ends, "the other stream of the same connection goes on"
        slow.send(Cancel(2))
        slow.read_until_ended(2)
        assert slow.heard[2].ends == ["cancelled"]
        assert slow.heard[2].text == answer("reads", slow.heard[2].tokens)
        assert slow.heard[2].seqs == list(range(len(slow.heard[2].seqs)))
        assert bystander.complete().text == answer("bystander", 10_000)
        assert not cut.after_end
    serving.wait_idle("a")


def test_a_reload_changes_what_a_stream_may_hold(serving: Serving) -> None:
    serving.write_sections(held={"stream": "64KiB"})
    serving.order("reload")
    with RawClient(serving.runtime_dir) as slow:
        slow.generate(1, "a", "never reads", max_tokens=ENDLESS)
        while not slow.heard.get(1) or not slow.heard[1].ends:
            slow.receive()
        assert slow.heard[1].ends == ["slow_consumer"]
        assert "a stream may hold 65536" in str(slow.heard[1].error["message"])
    serving.write_sections(held={})
    serving.order("reload")
    serving.wait_idle("a")


def test_a_short_answer_is_held_and_released_in_order(serving: Serving) -> None:
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "held", max_tokens=2_000)
        while len(client.heard.get(1).seqs if 1 in client.heard else ()) < STREAM_WINDOW:  # type: ignore[union-attr]
            client.receive()
        serving.wait_idle("a")  # the worker has finished; the supervisor holds the events without credit
        client.barrier()
        assert len(client.heard[1].seqs) == STREAM_WINDOW
        while not client.heard[1].ends:
            client.send(Credit(1, 100))
            client.barrier()
        assert client.heard[1].text == answer("held", 2_000)
        assert client.heard[1].seqs == list(range(2_000))


def test_cancelling_releases_what_was_held(serving: Serving) -> None:
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "held", max_tokens=1_000)
        while 1 not in client.heard:
            client.receive()
        serving.wait_idle("a")
        client.send(Cancel(1))
        client.read_until_ended(1)
        assert client.heard[1].text == answer("held", 1_000)


@pytest.mark.long
def test_memory_stays_bounded_whatever_is_not_read(serving: Serving) -> None:
    """Memory also stays bounded if the worker is faster than the supervisor."""
    before = psutil.Process(serving.pid).memory_info().rss
    errors = serving.status("a")["totals"]["errors"]
    with RawClient(serving.runtime_dir) as client:
        requests = range(1, 13)
        for request in requests:
            client.generate(request, "a", f"never reads {request}", max_tokens=ENDLESS)
        # the client receives nothing, not even events with credit. Megabytes of single tokens take seconds of work, and
        # longer on a busy machine
        wait_until(lambda: serving.status("a")["totals"]["errors"] >= errors + 12, 200, "12 streams cut off")
        serving.wait_idle("a")
        grown = psutil.Process(serving.pid).memory_info().rss - before
        print(f"grown by {grown / (1 << 20):.1f} MiB")
        assert grown < 20 << 20, f"{grown >> 20} MiB"
        client.read_until_ended(*requests)
        assert {tuple(client.heard[r].ends) for r in requests} == {("slow_consumer",)}


@pytest.mark.long
def test_credit_in_advance_does_not_fill_memory_behind_a_client_that_does_not_read(serving: Serving) -> None:
    """Without a bound, libzmq would keep 460,000 events for the client: all that the streams' credit allows."""
    streams, windows = 30, 60
    before = psutil.Process(serving.pid).memory_info().rss
    with shake_hands(str(serving.runtime_dir / "front")) as deaf:
        deaf.sendall(frame(HELLO))
        for request in range(1, streams + 1):
            body = pack_body({"prompt": f"never reads {request}", "max_tokens": ENDLESS, "logprobs": True})
            deaf.sendall(frame(encode(Generate(request, "a", {}, body))))
            for _ in range(windows):
                deaf.sendall(frame(encode(Credit(request, STREAM_WINDOW))))
        tokens = serving.status("a")["totals"]["tokens"]
        most = 0

        def is_over() -> bool:
            """Return whether enough events were sent, or libzmq ended the connection for its missing heartbeats."""
            nonlocal most
            most = max(most, psutil.Process(serving.pid).memory_info().rss - before)
            over: bool = serving.overview()["supervisor"]["connections"] == 1
            return over or serving.status("a")["totals"]["tokens"] > tokens + 200_000

        wait_until(is_over, 200)
        done = serving.status("a")["totals"]["tokens"] - tokens
    print(f"grown by {most / (1 << 20):.1f} MiB for {done} events")
    assert done > 50_000
    assert most < 28 << 20, f"{most >> 20} MiB"
    serving.wait_idle("a")
