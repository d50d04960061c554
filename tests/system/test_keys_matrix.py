"""Over TCP each message needs the right for it, and clients without a valid key reach nothing."""

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import psutil
import pytest
import zmq

from protocol import verbs
from protocol.client.transport import ClientKey
from protocol.codec import encode, pack_body
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.messages import Call, Cancel, Credit, Generate, Hello, Kind, Ping, Pong
from supervisor.ports.listeners import CHECK_S, MAX_UNREAD
from tests.deterministic_engine import answer
from tests.keyed import Keyed, free_port, misled, new_pair, stolen, stranger
from tests.raw_client import RawClient
from tests.serving import engine, wait_until

SEED = int(os.environ.get("TEST_SEED", "6"))
MIB = 1 << 20
ROLES = (
    "infer", "status", "admin", "gateway", "infer,status", "infer,admin", "status,admin", "infer,status,admin",
)  # fmt: skip
INFER, STATUS, ADMIN = {"infer"}, {"status", "admin"}, {"admin"}
ANYBODY = {"infer", "status", "admin", "gateway"}
VERBS = {
    "models": ANYBODY,
    "status": STATUS,
    "requests": ANYBODY,
    "ended_requests": ANYBODY,
    "story": ANYBODY,
    "events": STATUS,
    "metrics": STATUS,
    "settings": STATUS,
    "usage": ANYBODY,
    "tokenize": INFER,
    "detokenize": INFER,
    "chat_template": INFER,
    "start": ADMIN,
    "stop": ADMIN,
    "unload": ADMIN,
    "sleep": ADMIN,
    "wake": ADMIN,
    "restart": ADMIN,
    "reload": ADMIN,
    "config": ADMIN,
    "logs": ADMIN,
    "log_level": ADMIN,
    "keys": ADMIN,
    "new_key": ADMIN,
    "set_key": ADMIN,
    "revoke_key": ADMIN,
    "shutdown": ADMIN,
    "cancel_request": {"infer", "admin"},
    "": ADMIN,
    "unknown": ADMIN,
    "__class__": ADMIN,
    "STATUS": ADMIN,
}
"""The sufficient rights of each verb. They are not imported from the supervisor, so that the test checks them."""


def test_every_verb_of_the_supervisor_is_tried() -> None:
    assert verbs.VERBS.keys() <= VERBS.keys()


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    keys = {role.replace(",", "-"): role for role in ROLES} | {"revoked": "infer,status,admin"}
    with Keyed({"m": engine(context=100_000)}, keys) as keyed:
        keyed.store.revoke("revoked")
        yield keyed


@pytest.fixture(autouse=True)
def the_good_client_is_served(keyed: Keyed) -> Iterator[None]:
    """Keep a stream of a client with a key open during each test. Check afterwards that everything is as before."""
    with keyed.client("infer") as client:
        stream = client.generate("m", "good", max_tokens=100)
        next(stream)
        yield
        assert stream.complete().text == answer("good", 100)
        assert client.generate("m", "after", max_tokens=20).complete().text == answer("after", 20)


# with a key


@pytest.mark.parametrize("role", ROLES)
def test_every_verb_with_every_role(keyed: Keyed, role: str) -> None:
    rights = set(role.split(","))
    with keyed.raw(role.replace(",", "-")) as raw:
        raw.barrier()  # HELLO and PING need no right
        for number, (verb, enough) in enumerate(VERBS.items(), 1):
            # An order with an unknown parameter does nothing, but shows that the verb itself answered.
            raw.send(Call(number, verb, pack_body({} if verb in ("models", "status") else {"model": "m", "none": 1})))
            while len(raw.replies) < number:
                raw.receive()
            error = raw.replies[-1].get("error")
            refused = isinstance(error, dict) and error["name"] == "forbidden"
            assert refused == (not rights & enough), (verb, role, raw.replies[-1])
            if refused:
                assert isinstance(error, dict)
                assert error["retryable"] is False
        raw.generate(100, "m", "hello", max_tokens=3)
        raw.send(Credit(100, 1))
        raw.send(Cancel(100))
        raw.barrier()
        if "infer" in rights:
            raw.read_until_ended(100)
            assert not raw.errors
        else:
            reported = [(request, error["name"], error.get("refused")) for request, error in raw.errors]
            assert reported[0] == (100, "forbidden", None)
            # a gateway controls the requests that it sent for other keys
            assert reported[1:] == [
                (0, "forbidden", {"kind": kind, "number": 100})
                for kind in (Kind.CREDIT, Kind.CANCEL)
                if "gateway" not in rights
            ]
            assert not raw.heard
    assert keyed.serving.status("m")["state"] == "ready", "no order was carried out"


# without one


def null(keyed: Keyed, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    return context.socket(zmq.DEALER)


def plain(keyed: Keyed, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    dealer = context.socket(zmq.DEALER)
    dealer.plain_username, dealer.plain_password = b"admin", b"admin"
    return dealer


def with_pair(key: ClientKey, context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey, dealer.curve_publickey = key.server_key.encode(), key.public_key.encode()
    dealer.curve_secretkey = key.secret_key.encode()
    return dealer


OUTSIDERS: dict[str, Callable[[Keyed, "zmq.Context[zmq.Socket[bytes]]"], "zmq.Socket[bytes]"]] = {
    "null": null,
    "plain": plain,
    "unknown": lambda keyed, context: with_pair(stranger(keyed.keys["admin"]), context),
    "stolen": lambda keyed, context: with_pair(stolen(keyed.keys["admin"]), context),
    "revoked": lambda keyed, context: with_pair(keyed.keys["revoked"], context),
    "misled": lambda keyed, context: with_pair(misled(keyed.keys["admin"]), context),
}


@pytest.mark.parametrize("who", OUTSIDERS)
def test_nothing_of_an_outsider_reaches_the_application(keyed: Keyed, who: str) -> None:
    before, total = keyed.serving.counters(), keyed.connections()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(OUTSIDERS[who](keyed, context)) as dealer:
        dealer.linger = 0
        dealer.reconnect_ivl = 50  # a library in another language may do so
        dealer.connect(keyed.endpoint)
        # After some failed handshakes libzmq gives the connection up and accepts no more messages, so a blocking send
        # would never return.
        with suppress(zmq.Again):
            for message in (
                Hello(pack_body({"library": "outsider"})),
                Generate(1, "m", {}, pack_body({"prompt": "x", "max_tokens": 5})),
                Call(2, "shutdown", pack_body({"now": True})),
                Call(3, "stop", pack_body({"model": "m"})),
                Ping(1),
            ):
                dealer.send(encode(message), zmq.NOBLOCK)
            dealer.send_multipart([b"x" * 1000] * 100, zmq.NOBLOCK)
        wait_until(lambda: keyed.serving.counters()["handshakes_failed"] > before["handshakes_failed"])
        assert not dealer.poll(100)
    context.term()
    after = keyed.serving.counters()
    assert after["bad_frames"] == before["bad_frames"]
    assert keyed.connections() == total
    if who in ("unknown", "revoked"):
        assert after["connections_denied"] > before["connections_denied"]


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("null", "admits clients over TCP with a key only"),
        ("unknown", "does not admit key 'unknown'"),
        ("stolen", "its secret_key is not the one of its public_key"),
        ("misled", "is not this supervisor's"),
        ("revoked", "does not admit key 'revoked'"),
    ],
)
def test_the_client_says_what_is_wrong_with_its_key(keyed: Keyed, who: str, message: str) -> None:
    admin = keyed.keys["admin"]
    key = {
        "null": None, "unknown": stranger(admin), "stolen": stolen(admin), "misled": misled(admin),
        "revoked": keyed.keys["revoked"],
    }[who]  # fmt: skip
    begun = time.monotonic()
    with pytest.raises(WireError, match=message) as raised:
        keyed.client(key)
    print(f"{who}: after {1000 * (time.monotonic() - begun):.0f} ms")
    assert raised.value.code is ErrorCode.UNAUTHORIZED
    assert not raised.value.retryable
    if key is not None:
        assert key.secret_key not in str(raised.value)


def test_whoever_listens_without_keys_is_not_trusted(keyed: Keyed) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(context.socket(zmq.ROUTER)) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        from modelctl import Client

        with pytest.raises(WireError, match=r"uses no keys|no supervisor listens here") as raised:
            Client(f"tcp://127.0.0.1:{port}", key=keyed.keys["admin"])
        assert raised.value.code is ErrorCode.UNAUTHORIZED
        assert not router.poll(100), "it was told nothing"
    context.term()


def test_nobody_there_and_nobody_who_answers_are_told_from_a_wrong_key(keyed: Keyed) -> None:
    from modelctl import Client

    with pytest.raises(ConnectionLost, match="no supervisor is running here"):
        Client(f"tcp://127.0.0.1:{free_port()}", key=keyed.keys["admin"])
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConnectionLost, match="did not answer"):
        Client(f"tcp://127.0.0.1:{silent.getsockname()[1]}", key=keyed.keys["admin"], timeout=0.5)


def test_a_key_needs_tcp(keyed: Keyed) -> None:
    from modelctl import Client

    with pytest.raises(ValueError, match="a key is for TCP"):
        Client(runtime_dir=keyed.serving.runtime_dir, key=keyed.keys["admin"])


# bytes that are not even ZMTP


def greeting(mechanism: bytes) -> bytes:
    """Return a greeting of ZMTP 3.0, as a client sends it."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def peer(keyed: Keyed) -> socket.socket:
    return socket.create_connection(("127.0.0.1", keyed.port), timeout=30)


def test_garbage(keyed: Keyed) -> None:
    before = keyed.serving.counters()
    chance = random.Random(SEED)
    print("seed", SEED)
    curve_hello = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72 + 32 + 8 + 80)
    for number in range(150):
        garbage = chance.randbytes(chance.randrange(2000))
        begin = (
            b"",
            greeting(b"NULL"),
            greeting(b"CURVE"),
            greeting(b"PLAIN"),
            greeting(b"CURVE") + curve_hello,
            greeting(b"CURVE") + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff",  # announces a command of 16 EiB
            greeting(b"CURVE")[: chance.randrange(64)],
        )[number % 7]
        with peer(keyed) as connection:
            try:
                connection.sendall(begin + garbage)
            except OSError:
                pass  # the supervisor may close the connection
    wait_until(lambda: keyed.serving.counters()["connections_accepted"] >= before["connections_accepted"] + 150)
    assert keyed.serving.counters()["bad_frames"] == before["bad_frames"]


def test_half_handshakes_leave_nothing(keyed: Keyed) -> None:
    process = psutil.Process(keyed.serving.pid)
    keyed.connections()  # opens the connection of the queries
    before, half = process.num_fds(), 120
    beginnings = (b"", b"\xff", greeting(b"CURVE")[:11], greeting(b"CURVE"))
    with ExitStack() as stack:
        peers = [stack.enter_context(peer(keyed)) for _ in range(half)]
        for number, connection in enumerate(peers):
            connection.sendall(beginnings[number % len(beginnings)])
        wait_until(lambda: process.num_fds() >= before + half // 2)
        with keyed.client("infer") as client:  # new clients get in beside them
            assert client.generate("m", "beside", max_tokens=10).complete().text == answer("beside", 10)
        # after HANDSHAKE_IVL the port ends them: the peers read its greeting, and then the end
        for connection in peers:
            connection.settimeout(30)
            while connection.recv(4096):
                pass
    wait_until(lambda: process.num_fds() <= before + 2, what="descriptors as before")


def endless(connection: socket.socket, stop: threading.Event) -> int:
    """Send parts of a message that never ends, with mechanism NULL. Return the number of bytes that were sent."""
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    sent = 0
    try:
        connection.sendall(greeting(b"NULL") + b"\x04" + bytes([len(ready)]) + ready)
        part = b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)
        while not stop.is_set() and sent < 400 * MIB:
            connection.sendall(part)
            sent += len(part)
    except OSError:
        pass
    return sent


def test_endless_messages_of_a_peer_without_a_key(keyed: Keyed) -> None:
    process = psutil.Process(keyed.serving.pid)
    before, bad = process.memory_info().rss, keyed.serving.counters()["bad_frames"]
    with peer(keyed) as connection:
        sent = endless(connection, threading.Event())
    grown = process.memory_info().rss - before
    print(f"{sent / MIB:.0f} MiB went, memory grew by {grown / MIB:.1f} MiB")
    assert sent < 400 * MIB, "it was not cut off"
    assert grown < 20 * MIB
    assert keyed.serving.counters()["bad_frames"] == bad


class Stalling:
    """A relay in front of the port that passes on at most ``most`` bytes of a client. A context manager."""

    def __init__(self, port: int, most: int) -> None:
        self._port, self._most = port, most
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.ended = threading.Event()
        """Set when the supervisor has ended the connection."""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Stalling":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._thread.join()

    def _run(self) -> None:
        client, _ = self._server.accept()
        with client, socket.create_connection(("127.0.0.1", self._port)) as supervisor:
            back = threading.Thread(target=self._back, args=(client, supervisor))
            back.start()
            passed = 0
            try:
                while passed < self._most and (data := client.recv(min(65536, self._most - passed))):
                    supervisor.sendall(data)
                    passed += len(data)
            except OSError:
                pass
            back.join()

    def _back(self, client: socket.socket, supervisor: socket.socket) -> None:
        try:
            while data := supervisor.recv(65536):
                client.sendall(data)
        except OSError:
            pass
        self.ended.set()
        client.shutdown(socket.SHUT_RDWR)


def uptime(keyed: Keyed) -> float:
    seconds: float = keyed.serving.overview()["supervisor"]["uptime_s"]
    return seconds


def test_endless_messages_of_a_peer_with_a_key(keyed: Keyed) -> None:
    """libzmq collects the parts without telling the supervisor, which cuts the client off nevertheless."""
    process = psutil.Process(keyed.serving.pid)
    before, cut = process.memory_info().rss, keyed.tcp()["cut_off"]
    with Stalling(keyed.port, MAX_UNREAD + 8 * MIB) as relay, RawClient(relay.endpoint, key=keyed.keys["infer"]) as raw:
        raw.barrier()
        for _ in range(3):  # until a check has run: earlier bytes count for the answered message
            now = uptime(keyed)
            wait_until(lambda now=now: uptime(keyed) > now + 1.5 * CHECK_S)  # type: ignore[misc]
        # libzmq 4.3.5 aborts this process if a socket is closed with LINGER 0 while its connection breaks in the middle
        # of a message of several parts ("Resource temporarily unavailable (src/session_base.cpp:233)"). So wait until
        # libzmq has seen the end. Nothing of modelctl sends messages of several parts.
        monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.socket.send_multipart([bytes(MIB)] * (MAX_UNREAD // MIB + 16))
        assert relay.ended.wait(60), "the connection was not ended"
        assert monitor.poll(60_000), "libzmq did not see the end"
        raw.socket.disable_monitor()
        monitor.close(0)
        grown = process.memory_info().rss - before
    wait_until(lambda: keyed.tcp()["cut_off"] == cut + 1)
    print(f"memory grew by {grown / MIB:.1f} MiB")
    assert grown < 4 * MAX_UNREAD


def test_large_frames_within_the_limits_are_no_endless_message(keyed: Keyed) -> None:
    before = keyed.tcp()["cut_off"]
    with keyed.raw("infer") as raw:
        for nonce in range(24):
            raw.send(Call(nonce + 1, "models", pack_body({"unknown": "x" * (2 * MIB)})))
            raw.send(Ping(nonce))
        raw.barrier()
        assert len(raw.replies) == 24
    assert keyed.tcp()["cut_off"] == before


def test_messages_of_several_frames_and_chosen_names_are_refused(keyed: Keyed) -> None:
    before = keyed.serving.counters()["bad_frames"]
    with keyed.raw("infer") as raw:
        raw.socket.send_multipart([encode(Ping(1)), encode(Ping(2))])
        raw.barrier()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(with_pair(keyed.keys["infer"], context)) as dealer:
        dealer.linger = 0
        dealer.routing_id = b"\0abcdef"[1:]
        dealer.connect(keyed.endpoint)
        dealer.send(encode(Hello(pack_body({}))))
        assert dealer.poll(30_000)
        assert b"routing id" in dealer.recv()
    context.term()
    assert keyed.serving.counters()["bad_frames"] == before + 2


def test_a_connection_may_touch_its_own_requests_only(keyed: Keyed) -> None:
    with keyed.client("infer") as client, keyed.raw("infer-status") as other:
        stream = client.generate("m", "mine", max_tokens=200)
        next(stream)
        for request in range(1, 50):
            other.send(Cancel(request))
        other.barrier()
        assert stream.complete().finish_reason == "length"


def test_pairs_are_made_anew_each_time() -> None:
    assert len({new_pair() for _ in range(10)}) == 10


def test_pong_is_harmless(keyed: Keyed) -> None:
    with keyed.raw("status") as raw:
        raw.send(Pong(5))
        raw.barrier()
        assert not raw.errors
