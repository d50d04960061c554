"""Rights, limits, lists and endpoints of keys are parsed and checked correctly."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.errors import ErrorCode, WireError
from protocol.messages import MESSAGE_CLASSES, Call
from protocol.verbs import Right
from supervisor.config.rules import ModelNames
from supervisor.keys.records import (
    KeysProblem,
    check_limit,
    check_name,
    entry_of,
    format_clients,
    parse_clients,
    parse_lifetime,
    parse_listen,
    parse_models,
    parse_rights,
)
from supervisor.keys.rights import CLEAR_AT, OWNER, Allowance, Identity, Unfinished, check_models_of_call, check_right
from supervisor.keys.store import KeyStore

PUBLIC = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""The public key of the example in ZeroMQ's RFC 26."""
INFER = frozenset({Right.INFER})
TOKEN_ID = "5f" * 32


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


@dataclass(eq=False)
class Answered:
    """A request with the fields that ``Unfinished`` reads."""

    tokens: int = 0


def test_what_has_ended_is_neither_counted_nor_kept() -> None:
    live: list[Answered] = []
    unfinished: Unfinished[Answered] = Unfinished(lambda request: request in live)
    for _ in range(10_000):
        live = [*live[-40:], Answered()]
        unfinished.add(live[-1])
        assert len(unfinished) <= 2 * CLEAR_AT
    assert unfinished.count(limit=41) == 41
    live.clear()
    assert unfinished.count(limit=41) == 0


def test_each_token_is_taken_once_whether_its_request_has_ended_or_not() -> None:
    live: list[Answered] = []
    unfinished: Unfinished[Answered] = Unfinished(lambda request: request in live)
    chance, made, taken = random.Random(7), 0, 0
    for _ in range(2000):
        live = [request for request in live if chance.random() < 0.97]
        live.append(Answered())
        unfinished.add(live[-1])
        for request in live:
            new = chance.randrange(5)
            request.tokens += new
            made += new
        if chance.random() < 0.1:
            unfinished.count(limit=chance.randrange(1, 100))
        if chance.random() < 0.1:
            taken += unfinished.take_tokens()
            assert taken == made
    assert unfinished.take_tokens() == made - taken


def test_tokens_a_minute() -> None:
    allowance = Allowance(Identity("k", PUBLIC, INFER, tokens_per_minute=600), 100.0)
    allowance.check(0, 100.0)
    allowance.charge(1600, 100.0)  # a longer answer than expected: a debt of 1000
    with pytest.raises(WireError) as raised:
        allowance.check(0, 100.0)
    assert raised.value.retry_after_ms == 100_100  # ten tokens a second, until one is there
    with pytest.raises(WireError):
        allowance.check(0, 200.0)
    allowance.check(0, 200.2)
    assert allowance.left("tokens_per_minute", 1000.0) == 600, "no more than a minute's tokens are saved up"


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
    assert allowance.left("tokens_per_minute", 0.0) == 0
    allowance.adopt(Identity("k", PUBLIC, INFER), 0.0)
    assert allowance.left("tokens_per_minute", 0.0) is None
    allowance.check(10_000, 0.0)


def test_requests_a_minute_and_tokens_a_day() -> None:
    identity = Identity("k", PUBLIC, INFER, requests_per_minute=2, tokens_per_day=86_400)
    allowance = Allowance(identity, 0.0)
    for _ in range(2):
        allowance.check(0, 0.0)
        allowance.count_request(0.0)
    with pytest.raises(WireError, match=r"has used its 2 requests a minute: try again in 30\.0 s") as refused:
        allowance.check(0, 0.0)
    assert refused.value.retry_after_ms == 30_000
    allowance.check(0, 30.0)
    allowance.charge(86_400 + 99, 30.0)
    with pytest.raises(WireError, match=r"has used its 86400 tokens a day: try again in 100\.0 s"):
        allowance.check(0, 30.0)
    assert (allowance.left("requests_per_minute", 30.0), allowance.left("tokens_per_day", 30.0)) == (1, -99)
    allowance.check(0, 131.0)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", 1 << 60])
def test_limits_are_counts(value: object) -> None:
    with pytest.raises(KeysProblem, match="must be an integer from 1 to"):
        check_limit("max_in_flight", value)


# models, and the end of a key


@pytest.mark.parametrize(
    ("patterns", "model", "may"),
    [
        (None, "anything", True),
        (("letters",), "letters", True),
        (("letters",), "letters2", False),
        (("letters", "qwen*"), "qwen2.5-7b", True),
        (("qwen?",), "qwen25", False),
        (("[ab]*",), "b1", True),
        (("*",), "anything", True),
        ((), "letters", False),
    ],
)
def test_patterns_of_models(patterns: tuple[str, ...] | None, model: str, may: bool) -> None:
    assert Identity("k", PUBLIC, INFER, models=patterns).may_use(model) is may


def test_patterns_are_written_as_names() -> None:
    assert parse_models("letters, qwen*,letters") == ("letters", "qwen*")
    for text in ("", "a,", "A", "a/b", "a b", "é*", "a" * 65, ",".join(f"m{n}" for n in range(65))):
        with pytest.raises(KeysProblem, match=r"patterns? of models"):
            parse_models(text)


def test_a_call_about_all_models_is_refused_to_a_key_for_some() -> None:
    some = Identity("k", PUBLIC, frozenset({Right.ADMIN}), models=("let*",))
    nearest = ModelNames({}).nearest
    for verb, params in (("reload", {}), ("shutdown", {}), ("stop", {"model": "m"}), ("stop", {"model": "m:2"})):
        with pytest.raises(WireError) as raised:
            check_models_of_call(some, verb, params, nearest)
        assert raised.value.code is ErrorCode.FORBIDDEN
    for verb, params in (("reload", {"model": "letters"}), ("stop", {"model": "letters:2"}), ("models", {})):
        check_models_of_call(some, verb, params, nearest)
        check_models_of_call(Identity("k", PUBLIC, INFER), verb, params, nearest)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000), ("8w", 4_838_400)]
)
def test_lifetimes(text: str, seconds: int) -> None:
    assert parse_lifetime(text) == seconds


@pytest.mark.parametrize("text", ["", "0d", "-1d", "1.5d", "30", "d", "30 d", "11000w", "9" * 30 + "d", "1y", "１d"])
def test_lifetimes_that_are_none(text: str) -> None:
    with pytest.raises(KeysProblem, match="is no lifetime: write 12h, 30d or 8w"):
        parse_lifetime(text)


# the list


def entry(**changes: object) -> dict[str, object]:
    whole = {"name": "a", "public_key": PUBLIC, "rights": ["infer"], "created": "2026-01-01T00:00:00Z", **changes}
    return {name: value for name, value in whole.items() if value is not None}


def http_entry(**changes: object) -> dict[str, object]:
    return entry(**{"public_key": None, "token_sha256": TOKEN_ID, **changes})


def test_the_list_is_read_as_it_was_written() -> None:
    found = parse_clients(format_clients([entry(max_in_flight=3, tokens_per_minute=1000, keep_alive_s=60)]))
    assert found == {PUBLIC: Identity("a", PUBLIC, INFER, 3, 1000, keep_alive_s=60)}


def test_every_key_is_read_as_it_was_made() -> None:
    chance, made = random.Random(11), {}
    for number in range(300):
        some = frozenset(chance.sample([Right.INFER, Right.STATUS, Right.ADMIN], chance.randint(1, 3)))
        made[f"{number:064x}"] = Identity(
            f"k{number}", f"{number:064x}", some, chance.choice([None, 5]), chance.choice([None, 7]),
            chance.choice([None, ("a*",), ("x", "y?")]), chance.choice([None, 1e9, 2e9]), chance.choice([None, 60]),
        )  # fmt: skip
    made[PUBLIC] = Identity("curve", PUBLIC, frozenset({Right.GATEWAY}))
    assert parse_clients(format_clients([entry_of(key, "2026-01-01T00:00:00Z") for key in made.values()])) == made


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
                entry(token_sha256=TOKEN_ID),
                entry(public_key=None),
                http_entry(token_sha256=TOKEN_ID.upper()),
                http_entry(token_sha256=TOKEN_ID[:-1]),
                http_entry(token_sha256=1),
                http_entry(token_sha256=PUBLIC),
                http_entry(rights=["gateway"]),
                http_entry(models="letters"),
                http_entry(models=[]),
                http_entry(models=["../x"]),
                http_entry(models=[1]),
                http_entry(expires=1),
                http_entry(expires="2026-13-01T00:00:00Z"),
                http_entry(expires="2026-01-01"),
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
    ids=range(45),
)
def test_a_list_with_anything_wrong_in_it_is_none(text: str) -> None:
    with pytest.raises(KeysProblem) as raised:
        parse_clients(text)
    str(raised.value).encode()  # it is written to logs and terminals


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "..", "a" * 65, "a\n", "ü"])
def test_names_of_keys(name: str) -> None:
    with pytest.raises(KeysProblem, match="is no name of a key"):
        check_name(name)
