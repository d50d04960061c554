"""``generate``, ``choices`` and ``tokenize`` send the right messages and return the right results."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelctl import AsyncClient, Client
from protocol.client.answers import Progress
from protocol.client.async_client import AsyncChoices
from protocol.codec import pack_body, unpack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import Call, Cancel, Generate, Message, Reply, Report
from protocol.request import parse_generate
from tests.protocol.scripted_peer import (
    HoldingScript,
    ScriptedPeer,
    accepted,
    answers,
    delta,
    events,
    failed,
    finished,
    pump_until,
)

ROUTE: dict[str, Any] = {
    "priority": "batch", "queue_ms": 100, "ttft_ms": 200, "deadline_ms": 300, "affinity": "a conversation",
    "on_behalf_of": "0" * 64,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"b": {}, "ä": {}}}


def test_what_the_supervisor_needs_is_in_the_route(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", answers(["a"])) as peer, Client(peer.endpoint) as client:
        client.complete("letters", "x", **ROUTE, resume=False, on_progress=lambda _: None)
        client.complete("letters", "x", resume=True, priority=None)
    asked, plain = peer.of(Generate)
    assert asked.route == ROUTE | {"resume": False, "progress": True}
    assert unpack_body(asked.body) == {"prompt": "x"}
    assert plain.route == {}


def test_what_the_worker_needs_is_in_the_body(runtime_dir: Path) -> None:
    shape: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": ({"type": "function"},),
        "template_kwargs": {"thinking": False},
        "json_schema": SCHEMA,
        "choice": ("a", "b"),
        "regex": "[a-z]+",
        "max_tokens": 5,
        "stop": ["x"],
        "temperature": 0,
        "seed": 7,
        "top_k": 3,
    }
    with ScriptedPeer(runtime_dir / "front", answers(["a"])) as peer, Client(peer.endpoint) as client:
        client.complete("letters", **shape)
        client.complete("letters", "x", json_schema='{"type":  "string"}', stop=())
    first, second = (unpack_body(request.body) for request in peer.of(Generate))
    schema = first.pop("json_schema")
    assert schema == '{"type": "object", "properties": {"b": {}, "ä": {}}}', "its order is kept: the answer follows it"
    del shape["json_schema"]
    assert first == shape | {"tools": [{"type": "function"}], "choice": ["a", "b"]}
    assert second == {"prompt": "x", "json_schema": '{"type":  "string"}'}


@pytest.mark.parametrize(
    ("given", "field", "what"),
    [
        ({"affinity": "x" * 257}, "route.affinity", "affinity has 257 characters: at most 256"),
        ({"priority": {1}}, "priority", "priority is a set: msgpack cannot carry it"),
        ({"json_schema": {"a": {1}}}, "json_schema", "JSON cannot carry"),
        ({"json_schema": {"a": float("nan")}}, "json_schema", "JSON cannot carry"),
        ({"token_ids": 5}, "token_ids", "token_ids holds something else"),
        ({"choice": 5}, "choice", "choice is of type int: must be a list"),
    ],
)
def test_what_cannot_be_sent_is_named(runtime_dir: Path, given: dict[str, Any], field: str, what: str) -> None:
    with ScriptedPeer(runtime_dir / "front", answers(["a"])) as peer, Client(peer.endpoint) as client:
        with pytest.raises(RequestError, match=what) as refused:
            client.generate("letters", **given)
        assert refused.value.field == field
        assert client.complete("letters", "x").text == "a"
        assert len(peer.of(Generate)) == 1


def test_several_answers_are_not_a_field() -> None:
    with pytest.raises(RequestError, match="send n requests") as refused:
        parse_generate(pack_body({"prompt": "x", "n": 3}))
    assert refused.value.field == "n"


# ---- progress

QUEUED, PREFILL = {"phase": "queued", "queue_position": 3}, {"phase": "prefill", "done": 256, "total": 1000}
COPY = {"phase": "loading", "part": "copying model", "done": 5, "total": 9, "unit": "bytes", "per_s": 2}


def reporting(*reports: dict[str, Any]) -> Callable[[ScriptedPeer, bytes, Message], None]:
    """Send each report after a CALL has shown that the client received the one before. Then answer."""

    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        calls = len(peer.of(Call))
        if isinstance(message, Generate):
            peer.send(client, accepted(message.request))
        elif not isinstance(message, Call):
            return
        else:
            peer.send(client, Reply(message.call, pack_body({"result": {}})))
        if calls < len(reports):
            peer.send(client, Report(1, pack_body(reports[calls])))
        else:
            peer.send(client, events(delta(1, 0, "a"), finished(1, 1)))

    return script


def test_progress_is_told_until_the_first_token(runtime_dir: Path) -> None:
    heard: list[Progress] = []
    with (
        ScriptedPeer(runtime_dir / "front", reporting(QUEUED, COPY, COPY | {"unit": 7}, PREFILL)) as peer,
        Client(peer.endpoint) as client,
    ):

        def hear(progress: Progress) -> None:
            heard.append(progress)
            client.call("heard")  # the callback may use the client

        assert client.complete("letters", "x", on_progress=hear).text == "a"
    copied = Progress("loading", done=5, total=9, part="copying model", unit="bytes", per_s=2)
    queued, prefill = Progress("queued", queue_position=3), Progress("prefill", done=256, total=1000)
    assert heard == [queued, copied, replace(copied, unit=None), prefill]


def test_progress_is_told_in_a_loop(runtime_dir: Path) -> None:
    async def main() -> None:
        heard: asyncio.Queue[Progress] = asyncio.Queue()
        with ScriptedPeer(runtime_dir / "front", reporting(QUEUED, PREFILL)) as peer:
            async with AsyncClient(peer.endpoint) as client:
                task = asyncio.create_task(client.complete("letters", "x", on_progress=heard.put_nowait))
                assert await heard.get() == Progress("queued", queue_position=3)
                await client.call("heard")
                assert await heard.get() == Progress("prefill", done=256, total=1000)
                await client.call("heard")
                assert (await task).text == "a"

    asyncio.run(main())


def test_a_report_that_is_unknown_or_nonsense_is_ignored(runtime_dir: Path) -> None:
    heard: list[Progress] = []
    reports: tuple[dict[str, Any], ...] = (
        {"phase": "warp"},
        {"phase": "queued"},
        {"phase": "prefill", "done": "x", "total": 1},
        {},
    )

    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            for report in reports:
                peer.send(client, Report(1, pack_body(report)))
            peer.send(client, Report(99, pack_body(QUEUED)))
            peer.send(client, events(delta(1, 0, "a"), finished(1, 1)))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        assert client.complete("letters", "x", on_progress=heard.append).text == "a"
        assert client._connection.session.ignored == 5
    assert heard == []


def test_what_progress_raises_leaves_the_stream(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer, Client(peer.endpoint) as client:

        def fail(progress: Progress) -> None:
            raise KeyError(progress.phase)

        stream = client.generate("letters", "x", on_progress=fail)
        peer.inject(peer.clients[0], Report(1, pack_body(QUEUED)))
        with pytest.raises(KeyError, match="queued"):
            stream.complete()
        peer.wait_for(Cancel)


# ---- several answers


def in_turn(peer: ScriptedPeer, client: bytes, message: Message) -> None:
    """Wait for three requests. Then send a token of each in every frame. Request i ends after i tokens."""
    if isinstance(message, Generate) and message.request == 3:
        for request in (1, 2, 3):
            peer.send(client, accepted(request))
        for seq in range(4):
            each = [delta(r, seq, f"{r}{seq} ", (seq,)) for r in (1, 2, 3) if seq < r]
            ends = [finished(r, seq) for r in (1, 2, 3) if seq == r]
            peer.send(client, events(*each, *ends))


def test_choices_come_as_they_come_from_any(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", in_turn) as peer, Client(peer.endpoint) as client:
        choices = client.choices("letters", "x", n=3, seed=40, affinity="same", token_ids=None)
        got = [(index, each.text) for index, each in choices]
        assert sorted(got) == [(0, "10 "), (1, "20 "), (1, "21 "), (2, "30 "), (2, "31 "), (2, "32 ")]
        assert [text for index, text in got if index == 2] == ["30 ", "31 ", "32 "], "each in its order"
        assert got[:3] == [(0, "10 "), (1, "20 "), (2, "30 ")], "one of each in turn, where several have come"
        assert [stream.finish_reason for stream in choices.streams] == ["stop"] * 3
        assert list(choices) == []
    requests = peer.of(Generate)
    assert [unpack_body(request.body)["seed"] for request in requests] == [40, 41, 42]
    assert {request.route["affinity"] for request in requests} == {"same"}
    assert peer.of(Cancel) == []


def test_choices_tell_of_an_end_that_comes_without_text_before_the_others_end(runtime_dir: Path) -> None:
    def both_begin(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate) and message.request == 2:
            peer.send(client, events(delta(1, 0, "a"), delta(2, 0, "b")))

    async def main() -> None:
        with ScriptedPeer(runtime_dir / "front", both_begin) as peer:
            async with AsyncClient(peer.endpoint) as client:
                streams = client.choices("letters", "x", n=2).streams
                choices = AsyncChoices(streams, None, tell_ends=True)
                got = [await anext(choices) for _ in range(2)]
                peer.inject(peer.clients[0], events(finished(1, 1)))
                got.append(await anext(choices))
                assert [(index, each.text) for index, each in got] == [(0, "a"), (1, "b"), (0, "")]
                assert [stream.finish_reason for stream in streams] == ["stop", None]
                choices.close()
                assert [pair async for pair in choices] == []

    asyncio.run(main())


def test_choices_complete(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", in_turn) as peer, Client(peer.endpoint) as client:
        done = client.choices("letters", n=3, token_ids=iter([1, 2])).complete()
        assert [each.text for each in done] == ["10 ", "20 21 ", "30 31 32 "]
        bodies = [unpack_body(request.body) for request in peer.of(Generate)]
        assert bodies == [{"token_ids": b"\1\0\0\0\2\0\0\0"}] * 3
        assert peer.of(Cancel) == []


def leave_by_break(client: Client) -> object:
    for _ in client.choices("letters", "x", n=3):
        break
    return None


def leave_by_break_while_holding(client: Client) -> object:
    choices = client.choices("letters", "x", n=3)
    for _ in choices:
        break
    return choices


def leave_by_close(client: Client) -> object:
    with client.choices("letters", "x", n=3) as choices:
        next(choices)
    return choices


def leave_by_dropping(client: Client) -> object:
    client.choices("letters", "x", n=3)
    gc.collect()
    return None


def leave_by_timeout(client: Client) -> object:
    choices = client.choices("letters", "x", n=3, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"no event of any choice within 0.05 s"):
        list(choices)
    return choices


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_break_while_holding, leave_by_close, leave_by_dropping, leave_by_timeout],
    ids=lambda leave: leave.__name__.removeprefix("leave_by_"),
)
def test_leaving_choices_cancels_all_once(runtime_dir: Path, leave: Callable[[Client], object]) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        kept = leave(client)
        pump_until(client, lambda: not client._connection.session._streams, "the table of requests to be empty")
        assert sorted(cancel.request for cancel in peer.of(Cancel)) == [1, 2, 3]
        if kept is not None:
            assert list(kept) == []  # type: ignore[call-overload]
        del kept
    assert len(peer.of(Cancel)) == 3


def one_fails(peer: ScriptedPeer, client: bytes, message: Message) -> None:
    if isinstance(message, Generate):
        peer.send(client, events(delta(message.request, 0, "a")))
        if message.request == 2:
            error = WireError(ErrorCode.DEADLINE_EXCEEDED, "too late")
            peer.send(client, events(failed(2, 1, error.to_wire())))


def test_a_choice_that_fails_is_raised_with_its_index_and_the_others_are_cancelled(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", one_fails) as peer, Client(peer.endpoint) as client:
        choices = client.choices("letters", "x", n=3)
        got: list[int] = []
        with pytest.raises(WireError, match="too late") as raised:
            got.extend(index for index, _ in choices)
        assert (raised.value.code, raised.value.index) == (ErrorCode.DEADLINE_EXCEEDED, 1)
        assert 1 in got
        assert list(choices) == []
        peer.wait_for(Cancel, 2)
        assert sorted(cancel.request for cancel in peer.of(Cancel)) == [1, 3]


def test_choices_in_a_loop(runtime_dir: Path) -> None:
    async def main() -> None:
        with ScriptedPeer(runtime_dir / "front", in_turn) as peer:
            async with AsyncClient(peer.endpoint) as client:
                heard: list[tuple[int, Progress]] = []
                choices = client.choices("letters", "x", n=3, on_progress=lambda i, p: heard.append((i, p)))
                got = [(index, each.text) async for index, each in choices]
                assert sorted(got) == [(0, "10 "), (1, "20 "), (1, "21 "), (2, "30 "), (2, "31 "), (2, "32 ")]
                assert heard == []
        with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer:
            async with AsyncClient(peer.endpoint) as client:
                peer.inject(peer.clients[0], Report(2, pack_body(QUEUED)))  # before its request: ignored
                task = asyncio.create_task(client.choices("letters", "x", n=3).complete())
                await asyncio.sleep(0)  # let the task begin: a task that never ran leaves nothing when it is cancelled
                while len(peer.of(Generate)) < 3:
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait([task])
                while len(peer.of(Cancel)) < 3:
                    await asyncio.sleep(0.001)
                choices = client.choices("letters", "x", n=2)
                async for _ in choices:
                    break
                while len(peer.of(Cancel)) < 5:
                    await asyncio.sleep(0.001)
                assert [each async for each in choices] == []

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("n", [0, 1025, 2.0, True])
def test_a_number_of_choices_that_is_wrong_is_named(runtime_dir: Path, n: Any) -> None:
    with ScriptedPeer(runtime_dir / "front") as peer, Client(peer.endpoint) as client:
        with pytest.raises(RequestError, match="must be a whole number from 1 to 1024") as refused:
            client.choices("letters", "x", n=n)
        assert refused.value.field == "n"


# ---- tokens


def tokens(peer: ScriptedPeer, client: bytes, message: Message) -> None:
    """Count each character as a token."""
    if not isinstance(message, Call):
        return
    params = unpack_body(message.body)
    if params["model"] == "nonsense":
        result: dict[str, Any] = {"token_ids": b"abc", "text": 5}
    elif message.verb == "tokenize":
        text = params.get("prompt") or params["messages"][0]["content"]
        result = {"token_ids": text.encode("utf-32-le"), "count": len(text)}
    else:
        result = {"text": params["token_ids"].decode("utf-32-le")}
    peer.send(client, Reply(message.call, pack_body({"result": result})))


def test_text_to_ids_and_back(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", tokens) as peer, Client(peer.endpoint) as client:
        assert client.tokenize("letters", "aé") == (97, 233)
        assert client.tokenize("letters", messages=[{"role": "user", "content": "b"}], tools=({},)) == (98,)
        assert unpack_body(peer.of(Call)[-1].body)["tools"] == [{}]
        assert client.detokenize("letters", (97, 233)) == "aé"
        assert client.detokenize("letters", b"a\0\0\0") == "a"
        for prompt, messages in ((None, None), ("a", [{"role": "user", "content": "b"}])):
            with pytest.raises(RequestError, match="exactly one of prompt and messages"):
                client.tokenize("letters", prompt, messages=messages)
        with pytest.raises(WireError, match="holds no token ids") as raised:
            client.tokenize("nonsense", "a")
        assert raised.value.code is ErrorCode.INTERNAL
        with pytest.raises(WireError, match="holds no text"):
            client.detokenize("nonsense", [1])


def test_text_to_ids_and_back_in_a_loop(runtime_dir: Path) -> None:
    async def main() -> None:
        with ScriptedPeer(runtime_dir / "front", tokens) as peer:
            async with AsyncClient(peer.endpoint) as client:
                assert await client.tokenize("letters", "aé") == (97, 233)
                assert await client.detokenize("letters", (97, 233)) == "aé"

    asyncio.run(main())
