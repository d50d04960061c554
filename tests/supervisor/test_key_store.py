"""The directory of keys is written safely, and a running supervisor reads its list of keys correctly."""

import hashlib
import json
import logging
import os
import re
import stat
import time
from pathlib import Path

import pytest

from protocol.client.transport import ClientKey
from protocol.verbs import Right
from supervisor.config.file import load_config
from supervisor.config.yaml_source import ConfigError
from supervisor.keys.records import MAX_KEYS, KeysProblem, format_clients
from supervisor.keys.rights import Identity
from supervisor.keys.ring import HandshakeDecision, KeyRing
from supervisor.keys.store import CLIENTS, MAX_LIST, SERVER, KeyStore, check_opening, token_id
from tests.serving import wait_until
from tests.supervisor.test_keys import INFER, PUBLIC, store_in


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


def test_a_token_is_shown_once_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    token = store.add_token("web", INFER, models=("m*",), tokens_per_minute=5)
    assert re.fullmatch(r"mctl_[A-Za-z0-9_-]{43}", token)
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert store.clients() == {digest: Identity("web", digest, INFER, None, 5, ("m*",))}
    for path in store.directory.iterdir():
        assert token not in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert store.add_token("other", INFER) != token
    with pytest.raises(KeysProblem, match="there is a key 'web' already"):
        store.add("web", INFER, tmp_path / "web.key")
    with pytest.raises(KeysProblem, match="cannot have the right gateway"):
        store.add_token("proxy", frozenset({Right.GATEWAY}))
    store.revoke("web")
    assert digest not in store.clients()


def test_a_port_is_not_opened_for_http_keys_alone(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add_token("web", INFER)
    with pytest.raises(KeysProblem, match="modelctl keys new NAME"):
        check_opening("tcp://127.0.0.1:5570", store.directory)
    store.add("laptop", INFER, tmp_path / "laptop.key")
    check_opening("tcp://127.0.0.1:5570", store.directory)
    store.revoke("laptop")
    with pytest.raises(KeysProblem, match="no key is on the list"):
        check_opening("tcp://127.0.0.1:5570", store.directory)


@pytest.mark.long
def test_a_full_list_takes_no_more_keys_and_stays_readable(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add_token("first", INFER)
    entries = [{**store.entries()[0], "name": f"k{n}", "token_sha256": f"{n:064x}"} for n in range(MAX_KEYS)]
    (store.directory / CLIENTS).write_text(format_clients(entries))
    for add in (lambda: store.add_token("more", INFER), lambda: store.add("more", INFER, tmp_path / "more.key")):
        with pytest.raises(KeysProblem, match="has 10000 keys, the most it may have; revoke some"):
            add()
    assert len(store.clients()) == MAX_KEYS
    assert not (tmp_path / "more.key").exists()
    long = [f"{'x' * 59}{n:04}*" for n in range(64)]
    most = MAX_LIST // len(format_clients([{**entries[0], "models": long}])) - 1
    (store.directory / CLIENTS).write_text(format_clients([{**entry, "models": long} for entry in entries[:most]]))
    store.clients()
    adding = (store.add_token(f"long{n}", INFER, models=tuple(long)) for n in range(most))
    with pytest.raises(KeysProblem, match="revoke some keys"):
        list(adding)
    store.clients()


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
    shared.chmod(0o1777)  # like /tmp: only the owner of a file can rename it
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
    with pytest.raises(ConfigError, match=r"supervisor\.keys: is '~nobody-of-that-name/keys'"):
        load_config(file)


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


def test_a_supervisor_without_keys_says_nothing_about_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    for ring in KeyRing(store, logging.getLogger("test")), KeyRing(None, logging.getLogger("test")):
        ring.refresh()
        assert ring.find("0" * 64) is None
    assert not caplog.records
    ring = KeyRing(store, logging.getLogger("test"))
    ring.refresh()
    token = store.add_token("web", INFER)
    ring.refresh()
    assert ring.find(token_id(token)) is not None
    store.directory.rename(tmp_path / "away")
    ring.refresh()
    assert ring.find(token_id(token)) is None
    assert "no key is admitted" in caplog.text


def test_a_key_is_found_until_it_expires(tmp_path: Path) -> None:
    store, now = store_in(tmp_path), time.time()
    over = store.add_token("over", INFER, expires=now - 1)
    soon = store.add_token("soon", INFER, expires=now + 2)
    later = store.add_token("later", INFER, expires=now + 3600)
    ring = KeyRing(store, logging.getLogger("test"))
    ring.refresh()
    before = ring.version
    assert ring.find(token_id(over)) is None
    assert ring.find(token_id(soon)) is not None
    wait_until(lambda: ring.find(token_id(soon)) is None)
    ring.refresh()
    assert ring.version > before, "the owner of this ring learns of it"
    assert ring.ended(token_id(soon)) == "has expired"
    assert ring.find(token_id(later)) is not None
    store.revoke("later")
    ring.refresh()
    assert ring.ended(token_id(later)) == "was revoked"


def test_a_clock_that_jumps_ahead_takes_no_key_away_for_good(tmp_path: Path) -> None:
    """While the clock is ahead, the key has expired. What it has used is kept."""
    store, now = store_in(tmp_path), [time.time()]
    token = store.add_token("web", INFER, expires=now[0] + 3600, tokens_per_minute=60)
    ring = KeyRing(store, logging.getLogger("test"), lambda: now[0])

    def find() -> Identity | None:
        ring.refresh()
        return ring.find(token_id(token))

    identity = find()
    assert identity is not None
    ring.allowance(identity, 0.0).charge(1000, 0.0)
    now[0] += 500 * 86_400
    assert find() is None
    now[0] -= 500 * 86_400
    again = find()
    assert again is not None
    assert ring.allowance(again, 0.0).left("tokens_per_minute", 0.0) == -940


def test_what_a_key_has_used_is_kept_while_the_key_is(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    key = store.add("a", INFER, tmp_path / "a.key", tokens_per_minute=60)
    ring = KeyRing(store, logging.getLogger("test"))
    ring.refresh()
    identity = ring.find(key.public_key)
    assert identity is not None
    ring.allowance(identity, 0.0).charge(1000, 0.0)
    store.add("b", INFER, tmp_path / "b.key")
    ring.refresh()
    (store.directory / CLIENTS).chmod(0o644)
    ring.refresh()
    assert ring.find(key.public_key) is None
    (store.directory / CLIENTS).chmod(0o600)
    ring.refresh()
    again = ring.find(key.public_key)
    assert again is not None
    assert ring.allowance(again, 0.0).left("tokens_per_minute", 0.0) == -940
