"""Chats work through real workers, also if the template or the messages in it are hostile."""

import signal
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import psutil
import pytest

from modelctl import Client
from protocol.errors import ErrorCode, WireError
from tests.deterministic_engine import answer
from tests.meddling import Meddler
from tests.model_worker.test_hostile_templates import DOUBLING, EITHER
from tests.serving import Serving, is_alive, wait_until

GREEDY = "{% if messages[0].content == 'grow' %}" + DOUBLING + "{% endif %}" + EITHER


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    options = {"step_s": 0.002, "template": GREEDY}
    engine = "tests.deterministic_engine:DeterministicEngine"
    with Serving({"m": {"model_dir": ".", "engine": engine, "max_batch_size": 8, "options": options}}) as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[Client]:
    with serving.client() as one:
        yield one


def said(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def renderers(serving: Serving) -> list[psutil.Process]:
    """Return the worker's rendering processes."""
    return [child for child in serving.worker("m").children() if is_alive(child)]


@pytest.mark.long
def test_streams_go_on_beside_hostile_chats(serving: Serving, client: Client) -> None:
    hostile = [client.generate("m", messages=said(what), max_tokens=5) for what in ("loop", "grow", "loop")]
    stream = client.generate("m", "steady on", max_tokens=1200)
    times, text = [], ""
    for delta in stream:
        times.append(time.monotonic())
        text += delta.text
    assert text == answer("steady on", 1200)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    print(f"gaps: median {statistics.median(gaps) * 1000:.1f} ms, longest {max(gaps) * 1000:.1f} ms")
    assert sum(gap >= 0.9 for gap in gaps) <= 1, "as long as a render may take, more often than a machine hiccups"
    with serving.client() as other:
        assert other.complete("m", messages=said("fine"), max_tokens=9).text == answer("fine", 9)
    for one in hostile:  # the second may be used up before the memory
        with pytest.raises(WireError, match=r"takes longer than 1 s|more memory than it is given") as caught:
            one.complete()
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "messages")
    serving.wait_idle("m")


def test_a_killed_renderer_costs_its_own_request_only(serving: Serving, client: Client) -> None:
    """A chat whose renderer is killed is rendered once more, so the request fails only after two kills."""
    worker = serving.worker("m").pid
    stream = client.generate("m", "beside", max_tokens=300)
    with Meddler(lambda: renderers(serving), signal.SIGKILL, most=99) as meddler:

        def fails() -> WireError | None:
            """Return the error of a chat whose renderer was killed twice, or None if its time was over before."""
            with pytest.raises(WireError, match=r"was ended by signal 9|takes longer") as caught:
                client.complete("m", messages=said("loop"))
            return caught.value if caught.value.code is ErrorCode.HELPER_FAILED else None

        error = wait_until(fails, what="a chat whose processes are killed twice")
    assert error is not None
    assert error.retryable
    assert len(meddler.met) >= 2
    assert stream.complete().text == answer("beside", 300)
    assert client.complete("m", messages=said("fine"), max_tokens=9).text == answer("fine", 9)
    with Meddler(lambda: renderers(serving), signal.SIGKILL, most=1) as meddler:
        wait_until(lambda: meddler.met, what="the death of a renderer that has nothing to do")
        assert client.complete("m", messages=said("fine"), max_tokens=9).text == answer("fine", 9)
    assert serving.worker("m").pid == worker


def test_a_client_that_leaves_takes_its_chat_with_it(serving: Serving) -> None:
    with serving.client() as leaving:
        streams = [leaving.generate("m", messages=said("loop")) for _ in range(8)]
        assert streams
        wait_until(lambda: serving.status("m")["active"] == 8, what="the chats with the worker")
        ended = serving.status("m")["totals"]["errors"]
    serving.wait_idle("m")
    assert serving.status("m")["totals"]["errors"] - ended <= 2, "they were rendered to their ends"


def test_a_chat_is_cancelled_while_it_is_rendered(serving: Serving, client: Client) -> None:
    stream = client.generate("m", messages=said("loop"))
    wait_until(lambda: serving.status("m")["active"] == 1, what="it is with the worker")
    stream.cancel()
    done = stream.complete()
    assert (done.finish_reason, done.text) == ("cancelled", "")


def test_tokens_of_texts_and_chats(client: Client) -> None:
    assert client.tokenize("m", "ab") == (97, 98)
    assert client.tokenize("m", messages=said("hey")) == tuple(b"hey")
    assert client.detokenize("m", (104, 105)) == "hi"
    with pytest.raises(WireError) as caught:
        client.tokenize("m", messages=said("loop"))
    assert caught.value.field == "messages"
    with pytest.raises(WireError) as caught:
        client.detokenize("m", (300,))
    assert caught.value.field == "token_ids"


def test_the_log_holds_nothing_of_a_chat(serving: Serving, client: Client) -> None:
    client.complete("m", messages=said("the butler did it"), max_tokens=3)
    assert "butler" not in serving.log("m") + serving.log()


def test_renderers_die_with_their_worker(serving: Serving, client: Client) -> None:
    client.complete("m", messages=said("fine"), max_tokens=1)
    doomed = client.generate("m", messages=said("loop"), resume=False)
    children = wait_until(lambda: renderers(serving), what="a process that renders")
    began = time.monotonic()
    serving.worker("m").kill()
    wait_until(lambda: not any(is_alive(p) for p in children), what="the end of what the worker started")
    print(f"gone after {time.monotonic() - began:.3f} s")
    with pytest.raises(WireError, match="worker"):
        doomed.complete()
    assert client.complete("m", messages=said("fine"), max_tokens=9).text == answer("fine", 9)
