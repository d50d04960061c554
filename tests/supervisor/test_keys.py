"""Keys as far as files and arithmetic go: rights, limits, the list, the directory, endpoints."""

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from protocol.client.client_key import ClientKey
from protocol.errors import ErrorCode, WireError
from protocol.messages import MESSAGE_CLASSES, Call
from supervisor.config import load_config
from supervisor.keys.allowance import Allowance
from supervisor.keys.endpoint import parse_listen
from supervisor.keys.opening import check_opening
from supervisor.keys.records import KeysProblem, check_limit, check_name, format_clients, parse_clients, parse_rights
from supervisor.keys.rights import OWNER, Identity, Right, check_right
from supervisor.keys.ring import HandshakeDecision, KeyRing
from supervisor.keys.store import CLIENTS, SERVER, KeyStore
from supervisor.keys.unfinished import CLEAR_AT, Unfinished

PUBLIC = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""Of RFC 26."""
INFER = frozenset({Right.INFER})


def store_in(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "keys")


# endpoints


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ("tcp://127.0.0.1:5570", "tcp://127.0.0.1:5570"),
        ("tcp://0.0.0.0:1", "tcp://0.0.0.0:1"),
        ("tcp://[::1]:65535", "tcp://[::1]:65535"),
        ("tcp://[0:0:0:0:0:0:0:1]:5570", "tcp://[::1]:5570"),
        (None, None),
    ],
)
def test_endpoints_that_are_offered(given: object, bound: str | None) -> None:
    assert parse_listen(given) == bound


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tcp://*:5570", "write tcp://0.0.0.0:PORT if that is meant"),
        ("tcp://localhost:5570", "write 127.0.0.1"),
        ("tcp://example.org:5570", "the address of the interface"),
        ("tcp://127.0.0.1", "must be tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:0", "must be tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:65536", "must be tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:*", "must be tcp://ADDRESS:PORT"),
        ("tcp://::1:5570", "must be tcp://ADDRESS:PORT"),
        ("tcp://239.1.1.1:5570", "multicast"),
        ("ipc:///tmp/x", "ipc:// is not offered"),
        ("udp://127.0.0.1:5570", "udp:// is not offered"),
        ("inproc://x", "inproc:// is not offered"),
        ("5570", "must be tcp://ADDRESS:PORT"),
        (5570, "must be tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:5570\n", "must be tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1;tcp://0.0.0.0:5570", "must be tcp://ADDRESS:PORT"),
    ],
)
def test_endpoints_that_are_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse_listen(given)
    assert message in str(raised.value)


# rights


def test_the_owner_may_send_everything() -> None:
    for verb in ("models", "status", "shutdown", "anything"):
        check_right(OWNER, Call(1, verb, b""))


def test_what_nobody_has_thought_of_takes_admin() -> None:
    for rights in (INFER, frozenset({Right.STATUS})):
        with pytest.raises(WireError) as raised:
            check_right(Identity("k", PUBLIC, rights), Call(1, "format_disk", b""))
        assert raised.value.code is ErrorCode.FORBIDDEN
        assert not raised.value.retryable
        assert "takes the right admin" in raised.value.message
    check_right(Identity("k", PUBLIC, frozenset({Right.ADMIN})), Call(1, "format_disk", b""))


def test_a_key_without_rights_may_send_nothing_that_does_anything() -> None:
    nobody = Identity("k", PUBLIC, frozenset())
    for cls in MESSAGE_CLASSES.values():
        message = object.__new__(cls)
        if cls is Call:
            message = Call(1, "models", b"")
        with pytest.raises(WireError):
            check_right(nobody, message)


@pytest.mark.parametrize("text", ["", "root", "infer,", "infer;status", "Infer"])
def test_rights_are_known_names(text: str) -> None:
    with pytest.raises(KeysProblem, match="known are infer, status, admin"):
        parse_rights(text)


# limits


def test_requests_in_flight() -> None:
    allowance = Allowance(Identity("k", PUBLIC, INFER, max_in_flight=2), 0.0)
    allowance.check(1, 0.0)
    with pytest.raises(WireError) as raised:
        allowance.check(2, 0.0)
    assert raised.value.code is ErrorCode.RATE_LIMITED
    assert raised.value.retryable
    assert raised.value.retry_after_ms == 1000
    assert allowance.refused == 1


def test_what_has_ended_is_neither_counted_nor_kept() -> None:
    live: set[tuple[int, int]] = set()
    unfinished = Unfinished(lambda channel, request: (channel, request) in live)
    for number in range(10_000):
        live = {(1, n) for n in range(max(0, number - 40), number + 1)}
        unfinished.add(1, number)
        assert len(unfinished) <= 2 * CLEAR_AT
    assert unfinished.count(limit=41) == 41
    live.clear()
    assert unfinished.count(limit=41) == 0


def test_tokens_a_minute() -> None:
    allowance = Allowance(Identity("k", PUBLIC, INFER, tokens_per_minute=600), 100.0)
    allowance.check(0, 100.0)
    allowance.charge(1600, 100.0)  # an answer that nobody could foretell: a debt of 1000
    with pytest.raises(WireError) as raised:
        allowance.check(0, 100.0)
    assert raised.value.retry_after_ms == 100_100  # ten tokens a second, to have one
    with pytest.raises(WireError):
        allowance.check(0, 200.0)
    allowance.check(0, 200.2)
    assert allowance.tokens_left(1000.0) == 600, "no more than a minute's tokens are saved up"


def test_over_time_a_key_gets_its_rate_and_no_more() -> None:
    allowance, now, got = Allowance(Identity("k", PUBLIC, INFER, tokens_per_minute=60), 0.0), 0.0, 0
    for _ in range(20_000):
        now += 0.05
        try:
            allowance.check(0, now)
        except WireError:
            continue
        allowance.charge(37, now)
        got += 37
    assert abs(got - (60 + now)) <= 37


def test_limits_of_a_key_that_change_keep_what_was_used() -> None:
    allowance = Allowance(Identity("k", PUBLIC, INFER, tokens_per_minute=600), 0.0)
    allowance.charge(600, 0.0)
    allowance.adopt(Identity("k", PUBLIC, INFER, tokens_per_minute=60), 0.0)
    assert allowance.tokens_left(0.0) == 0
    allowance.adopt(Identity("k", PUBLIC, INFER), 0.0)
    assert allowance.tokens_left(0.0) is None
    allowance.check(10_000, 0.0)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", 1 << 60])
def test_limits_are_counts(value: object) -> None:
    with pytest.raises(KeysProblem, match="must be an integer from 1 to"):
        check_limit("max_in_flight", value)


# the list


def entry(**changes: object) -> dict[str, object]:
    whole = {"name": "a", "public_key": PUBLIC, "rights": ["infer"], "created": "2026-01-01T00:00:00Z", **changes}
    return {name: value for name, value in whole.items() if value is not None}


def test_the_list_is_read_as_it_was_written() -> None:
    found = parse_clients(format_clients([entry(max_in_flight=3, tokens_per_minute=1000)]))
    assert found == {PUBLIC: Identity("a", PUBLIC, INFER, 3, 1000)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        '{"clients": {}}',
        '{"clients": [], "more": 1}',
        '{"clients": [1]}',
        "[" * 100_000,
        *(
            format_clients([broken])
            for broken in (
                entry(name="../x"),
                entry(name=1),
                entry(name=None),
                entry(public_key="short"),
                entry(public_key=PUBLIC + "\n"),
                entry(public_key=1),
                entry(rights=[]),
                entry(rights=["root"]),
                entry(rights="infer"),
                entry(rights=[1]),
                entry(rights=None),
                entry(max_in_flight=0),
                entry(max_in_flight=True),
                entry(tokens_per_minute="10"),
                entry(max_inflight=3),
            )
        ),
        *(
            format_clients([broken])
            for broken in (
                entry(public_key="#" * 40),
                entry(max_in_flight=float("nan")),
                entry(max_in_flight="\ud800"),
                entry(created=["x"]),
                entry(created="\x1b[2J"),
            )
        ),
        format_clients([entry()]).replace('"rights"', '"rights": ["admin"], "rights"'),
        format_clients([entry(), entry(name="b")]),
        format_clients([entry(), entry(public_key=PUBLIC[::-1])]),
    ],
    ids=range(31),
)
def test_a_list_with_anything_wrong_in_it_is_none(text: str) -> None:
    with pytest.raises(KeysProblem) as raised:
        parse_clients(text)
    str(raised.value).encode()  # it goes to logs and terminals


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "..", "a" * 65, "a\n", "ü"])
def test_names_of_keys(name: str) -> None:
    with pytest.raises(KeysProblem, match="is no name of a key"):
        check_name(name)


# the directory


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    key = store.add("laptop", INFER, tmp_path / "laptop.key", max_in_flight=2)
    assert ClientKey.load(tmp_path / "laptop.key") == key
    assert key.secret_key not in repr(key)
    assert store.clients() == {key.public_key: Identity("laptop", key.public_key, INFER, 2)}
    assert store.server_pair()[0] == key.server_key
    other = store.add("phone", INFER, tmp_path / "phone.key")
    assert other.server_key == key.server_key, "the supervisor's own pair is made once"
    assert other.secret_key != key.secret_key
    store.revoke("laptop")
    assert list(store.clients()) == [other.public_key]
    again = store.add("laptop", INFER, tmp_path / "laptop2.key")
    assert again.public_key != key.public_key
    for path in (tmp_path / "laptop.key", store.directory / SERVER, store.directory / CLIENTS):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    assert sorted(path.name for path in store.directory.iterdir()) == [CLIENTS, SERVER], "nothing is left beside them"


def test_the_server_keeps_no_secret_of_a_client(tmp_path: Path) -> None:
    key = store_in(tmp_path).add("laptop", INFER, tmp_path / "laptop.key")
    for path in (tmp_path / "keys").iterdir():
        assert key.secret_key not in path.read_text()


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with pytest.raises(KeysProblem, match="is the supervisor's own file"):
        store.add("a", INFER, store.directory / CLIENTS)
    store.add("a", INFER, tmp_path / "a.key")
    before = (tmp_path / "a.key").read_text(), (store.directory / CLIENTS).read_text()
    with pytest.raises(KeysProblem, match="there is a key 'a' already"):
        store.add("a", INFER, tmp_path / "b.key")
    with pytest.raises(KeysProblem, match="exists, and keys are not written over"):
        store.add("b", INFER, tmp_path / "a.key")
    with pytest.raises(KeysProblem, match="No such file or directory"):
        store.add("b", INFER, tmp_path / "nowhere" / "b.key")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeysProblem):
        store.add("b", INFER, tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(KeysProblem, match="there is no key 'b'"):
        store.revoke("b")
    assert ((tmp_path / "a.key").read_text(), (store.directory / CLIENTS).read_text()) == before


def test_a_port_is_opened_only_with_keys_that_are_safe(tmp_path: Path) -> None:
    endpoint, store = "tcp://127.0.0.1:5570", store_in(tmp_path)

    def reported() -> str:
        with pytest.raises(KeysProblem) as raised:
            check_opening(endpoint, store.directory)
        return str(raised.value)

    assert "there are no keys in" in reported()
    assert "modelctl keys new" in reported()
    store.add("a", INFER, tmp_path / "a.key")
    opening = check_opening(endpoint, store.directory)
    assert opening.secret_key not in repr(opening)

    for path, mode in ((store.directory, 0o700), (store.directory / SERVER, 0o600), (store.directory / CLIENTS, 0o600)):
        for wrong in (mode | 0o040, mode | 0o004, mode | 0o002, mode | 0o020):
            path.chmod(wrong)
            assert f"run `chmod {mode:o} {path}`" in reported()
        path.chmod(mode)
        check_opening(endpoint, store.directory)

    secret = (store.directory / SERVER).read_text()
    other = json.dumps(dict(zip(("public_key", "secret_key"), (PUBLIC, PUBLIC), strict=True)))
    for broken in (
        "",
        "{}",
        "[]",
        "[" * 5000,
        other,
        other.replace(PUBLIC, "#" * 40),
        '{"public_key": "x", "secret_key": "y"}',
        secret.replace('": "', '": "\\u0000'),
    ):
        (store.directory / SERVER).write_text(broken)
        assert "is no key pair" in reported()
        assert opening.secret_key not in reported()
    (store.directory / SERVER).write_text(secret)
    (store.directory / CLIENTS).write_text("nonsense")
    assert "is not JSON" in reported()
    (store.directory / CLIENTS).write_text(format_clients([]))
    assert "no key is on the list" in reported()
    (store.directory / CLIENTS).unlink()
    assert "No such file" in reported()


def test_a_directory_that_everybody_can_exchange_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "deep").mkdir(parents=True)
    store = KeyStore(shared / "deep" / "keys")
    store.add("a", INFER, tmp_path / "a.key")
    shared.chmod(0o777)
    with pytest.raises(KeysProblem, match=f"run `chmod o-w {shared}`"):
        check_opening("tcp://127.0.0.1:5570", store.directory)
    shared.chmod(0o1777)  # as /tmp is: nobody can rename what is another's
    check_opening("tcp://127.0.0.1:5570", store.directory)


def test_what_a_kill_left_behind_is_in_nobodys_way(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add("a", INFER, tmp_path / "a.key")
    (store.directory / f".{CLIENTS}.new").write_text("half a li")
    store.add("b", INFER, tmp_path / "b.key")
    assert [identity.name for identity in store.clients().values()] == ["a", "b"]
    assert sorted(path.name for path in store.directory.iterdir()) == [CLIENTS, SERVER]


@pytest.mark.skipif(os.getuid() != 0, reason="gives files away")
def test_files_of_another_user_are_not_used(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add("a", INFER, tmp_path / "a.key")
    os.chown(store.directory / SERVER, 65534, 65534)
    with pytest.raises(KeysProblem, match="belongs to uid 65534"):
        check_opening("tcp://127.0.0.1:5570", store.directory)
    os.chown(store.directory / SERVER, 0, 0)
    os.chown(store.directory, 65534, 65534)
    with pytest.raises(KeysProblem, match="belongs to uid 65534"):
        check_opening("tcp://127.0.0.1:5570", store.directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[]", "must be an object"),
        ('{"name": "a"}', "must be an object with the strings"),
        (
            json.dumps({"name": "a", "server_key": PUBLIC, "public_key": PUBLIC, "secret_key": "SECRET"}),
            "secret_key is no key",
        ),
        ("x" * 5000, "is longer than"),
        ("[" * 4000, "is not JSON"),
        (
            json.dumps({"name": "\x1b[2J", "server_key": PUBLIC, "public_key": PUBLIC, "secret_key": PUBLIC}),
            "name is no name",
        ),
    ],
)
def test_key_files_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "a.key"
    file.touch(0o600)
    file.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        ClientKey.load(file)
    assert "SECRET" not in str(raised.value)
    file.chmod(0o644)
    with pytest.raises(ValueError, match="run `chmod 600"):
        ClientKey.load(file)
    with pytest.raises(ValueError, match="no regular file"):
        ClientKey.load("/dev/null")
    with pytest.raises(ValueError, match="No such file"):
        ClientKey.load(tmp_path / "none")


def test_a_directory_in_a_home_that_there_is_not(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {m: {model_dir: ., engine: 'a:B'}}\nsupervisor: {keys: ~nobody-of-that-name/keys}\n")
    with pytest.raises(KeysProblem, match=r"supervisor\.keys is '~nobody-of-that-name/keys'"):
        _ = load_config(file).keys_dir


# the list of a running supervisor


def test_a_list_that_cannot_be_used_any_more_admits_nobody(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    key = store.add("a", INFER, tmp_path / "a.key")
    ring = KeyRing(store, logging.getLogger("test"))

    def admits() -> bool:
        return ring.admit(key.public_key, 0.0) is HandshakeDecision.ADMITTED

    assert admits()
    (store.directory / CLIENTS).chmod(0o666)
    assert not admits()
    (store.directory / CLIENTS).chmod(0o600)
    assert admits()
    os.rename(store.directory / CLIENTS, store.directory / "away")
    assert not admits()
    (store.directory / CLIENTS).mkdir()
    assert not admits()
    (store.directory / CLIENTS).rmdir()
    os.rename(store.directory / "away", store.directory / CLIENTS)
    assert admits()
    store.directory.chmod(0o770)
    assert not admits()


def test_what_a_key_has_used_is_kept_while_the_key_is(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    key = store.add("a", INFER, tmp_path / "a.key", tokens_per_minute=60)
    ring = KeyRing(store, logging.getLogger("test"))
    ring.refresh()
    identity = ring.find(key.public_key)
    assert identity is not None
    ring.allowance(identity, 0.0).charge(1000, 0.0)
    store.add("b", INFER, tmp_path / "b.key")
    assert ring.refresh()
    assert not ring.refresh()
    (store.directory / CLIENTS).chmod(0o644)
    assert ring.refresh()
    assert ring.find(key.public_key) is None
    (store.directory / CLIENTS).chmod(0o600)
    assert ring.refresh()
    again = ring.find(key.public_key)
    assert again is not None
    assert ring.allowance(again, 0.0).tokens_left(0.0) == -940
