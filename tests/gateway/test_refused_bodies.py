"""Requests that are refused leave nothing in the memory of the gateway, the supervisor, the worker and the client."""

import asyncio
import gc
import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

import psutil
import pytest

from modelctl import AsyncClient, Client
from protocol.client.request_options import pack_fields
from protocol.errors import RequestError, WireError
from protocol.request import parse_generate
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.gateway.running import Gateway
from tests.serving import WITHIN, Serving, engine, wait_until

MIB = 1 << 20
LARGE, MIDDLE = 15 * MIB, 5 * MIB // 2
"""Sizes of bodies: the supervisor takes requests of up to 3 MiB, so it does not see a larger one."""
GROWTH = 64 * MIB
"""Bytes by which a process may grow. The C library keeps some free memory, at most twice the largest block."""
CONTEXT = 1000


def completion(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "m", "max_tokens": 3, **more}


def conversation(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}


REFUSED: dict[str, tuple[int, Callable[[str], tuple[str, dict[str, Any] | bytes]]]] = {
    "too long for a frame": (413, lambda text: completion(prompt=text + LARGE * "x")),
    "too long for the context": (400, lambda text: completion(prompt=text + 8 * CONTEXT * "long")),
    "a chat": (400, lambda text: ("/v1/chat/completions", conversation(text + 8 * CONTEXT * "long"))),
    "a stream": (400, lambda text: ("/v1/chat/completions", conversation(text + 8 * CONTEXT * "long", stream=True))),
    "a message": (400, lambda text: ("/v1/messages", conversation(text + 8 * CONTEXT * "long"))),
    "a response": (400, lambda text: ("/v1/responses", {"model": "m", "input": text + 8 * CONTEXT * "long"})),
    "unknown model": (404, lambda text: completion(prompt=text, model="nosuch")),
    "bad option": (400, lambda text: completion(prompt=text, temperature=-5)),
    "option of the wrong type": (400, lambda text: completion(prompt=text, temperature="hot")),
    "no JSON": (400, lambda text: ("/v1/completions", b'{"prompt": "' + text.encode())),
    "tokenize": (404, lambda text: ("/v1/tokenize", {"model": "nosuch", "prompt": text})),
    "too many requests": (429, lambda text: completion(prompt=text)),
    "unknown key": (401, lambda text: completion(prompt=text)),
}
"""The status of each kind of refusal, and what returns the path and the body of such a request."""


class Refusing:
    """A supervisor with a gateway, and keys: a good one, and one that may have no request at a time."""

    def __init__(self, serving: Serving, gateway: Gateway, tokens: dict[str, str]) -> None:
        self.gateway, self._tokens = gateway, tokens
        pids = {"gateway": gateway.process.pid, "supervisor": serving.pid, "worker": serving.worker("m").pid}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=WITHIN)

    def refuse(self, connection: http.client.HTTPConnection, kind: str, text: str) -> None:
        """Send a request that has this text, and check that it is refused. A text may be too large for its kind, and
        several large ones at once may be more than ``gateway.body_memory``."""
        status, make = REFUSED[kind]
        path, body = make(text)
        token = self._tokens.get(kind, self._tokens["good"])
        packed = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, packed, {"authorization": f"Bearer {token}"})
        response = connection.getresponse()
        answer = response.read()
        crowded = response.status in (429, 529) and b'"overloaded' in answer  # 529 is Anthropic's
        allowed = {status, 413} if len(text) == LARGE else {status}
        assert crowded or response.status in allowed, (kind, response.status, answer)
        assert text[:100] not in answer.decode()

    def leave(self, size: int) -> None:
        """Begin a request, and go away before its body is complete."""
        with closing(socket.create_connection(("127.0.0.1", self.gateway.port), WITHIN)) as connection:
            head = f"Host: localhost\r\nAuthorization: Bearer {self._tokens['good']}\r\nContent-Length: {size + 1}"
            connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + bytes(size))

    def memory(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self._processes.items()}

    def check_growth(self, before: dict[str, int], what: str) -> None:
        def bounded() -> bool:
            return all(size < before[name] + GROWTH for name, size in self.memory().items())

        try:
            wait_until(bounded, 10.0, what)
        except AssertionError:
            shown = {name: f"{before[name] // MIB} -> {size // MIB} MiB" for name, size in self.memory().items()}
            raise AssertionError(f"{what}: {shown}") from None


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refusing]:
    store = KeyStore(tmp_path_factory.mktemp("keys") / "keys")
    tokens = {"good": store.add_token("good", parse_rights("infer")), "unknown key": "mctl_made-up"}
    tokens["too many requests"] = store.add_token("slow", parse_rights("infer"), tokens_per_minute=1)
    with (
        Serving({"m": engine(context=CONTEXT)}, keys=store.directory) as serving,
        Gateway(serving, auth="keys") as gateway,
    ):
        started = Refusing(serving, gateway, tokens)
        with closing(started.connect()) as connection:
            connection.request(
                "POST", "/v1/completions", json.dumps(completion(prompt="x")[1]),
                {"authorization": f"Bearer {tokens['too many requests']}"},
            )  # fmt: skip
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, answer
            for kind in REFUSED:  # the first ones import modules
                started.refuse(connection, kind, "y" * 100)
        yield started


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_bodies_do_not_stay(refusing: Refusing, kind: str) -> None:
    text = "y" * MIDDLE
    before = refusing.memory()
    with closing(refusing.connect()) as connection:
        for _ in range(6 if REFUSED[kind][0] == 413 else 30):
            refusing.refuse(connection, kind, text)
    refusing.check_growth(before, f"after refusals: {kind}")


def test_bodies_of_clients_that_go_away_do_not_stay(refusing: Refusing) -> None:
    before = refusing.memory()
    for _ in range(20):
        refusing.leave(LARGE)
    refusing.check_growth(before, "after clients have gone away")


@pytest.mark.long
@pytest.mark.timeout(900)  # on two busy cores it took 258 s
def test_ten_thousand_refusals_leave_nothing(refusing: Refusing) -> None:
    """Four connections send them at a time. Two hundred of the bodies have 15 MiB."""
    before, failed, done = refusing.memory(), [], Counter[bool]()

    def work(number: int) -> None:
        try:
            with closing(refusing.connect()) as connection:
                for i in range(215):
                    for kind in REFUSED:
                        alone = kind == "too long for a frame"
                        large = (i + number) % (16 if alone else 52) == 0
                        if large or not alone:
                            refusing.refuse(connection, kind, "z" * (LARGE if large and not alone else 200))
                            done[large] += 1
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert done.total() > 10_000
    assert done[True] > 200
    refusing.check_growth(before, f"after {done}")


@contextmanager
def no_frame_stays() -> Iterator[None]:
    """Check that the block leaves no frame in a cycle: a frame of a refused request has the prompt."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each.f_code.co_qualname for each in gc.garbage if isinstance(each, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_an_error_of_a_client_keeps_no_frame() -> None:
    with Serving({"m": engine(context=CONTEXT)}) as serving, Client(runtime_dir=serving.runtime_dir) as client:

        def ask(**options: Any) -> None:
            with pytest.raises(WireError):
                client.complete("m", "x", max_tokens=3, **options)
            with pytest.raises(WireError):
                client.tokenize("nosuch", "x")

        async def ask_from_a_loop(**options: Any) -> None:
            async with AsyncClient(runtime_dir=serving.runtime_dir) as other:
                with pytest.raises(WireError):
                    await other.complete("m", "x", max_tokens=3, **options)
                with pytest.raises(WireError):
                    await other.tokenize("nosuch", "x")

        ask(temperature=-5)
        with no_frame_stays():
            ask(temperature=-5)
            asyncio.run(ask_from_a_loop(temperature=-5))


def test_an_error_of_the_worker_keeps_no_frame() -> None:
    def read() -> None:
        with pytest.raises(RequestError):
            parse_generate(pack_fields({"prompt": "x", "temperature": -5}))

    read()
    with no_frame_stays():
        read()
