"""Only permitted connections may ask on behalf of HTTP keys, and the key's own rights, limits, models and end apply."""

import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from modelctl import Client
from protocol.codec import pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import Call, Generate
from supervisor.keys.store import token_id
from tests.deterministic_engine import answer
from tests.keyed import Keyed
from tests.raw_client import RawClient
from tests.serving import WITHIN, Serving, engine, wait_until

SEED = 20261123


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    keys = {"laptop": "infer", "boss": "infer,status,admin", "proxy": "gateway", "proxy2": "gateway"}
    models = {"letters": engine(step_s=0.005, context=100_000), "stories": engine(step_s=0.005, context=100_000)}
    with Keyed(models, keys) as keyed:
        yield keyed


def http_key(keyed: Keyed, name: str, rights: str = "infer", **limits: Any) -> str:
    """Add an HTTP key. Return its id."""
    return token_id(keyed.new_http(name, rights, **limits))


def refusal(client: Client, model: str = "letters", **options: Any) -> WireError:
    with pytest.raises(WireError) as refused:
        client.complete(model, "x", max_tokens=1, **options)
    return refused.value


def refused_call(client: Client, verb: str, **params: Any) -> WireError:
    with pytest.raises(WireError) as refused:
        client.call(verb, **params)
    return refused.value


def reported(keyed: Keyed, name: str) -> dict[str, Any]:
    keys = keyed.serving.overview()["supervisor"]["http_keys"]["keys"]
    found: dict[str, Any] = next(key for key in keys if key["name"] == name)
    return found


def test_a_gateway_over_ipc_or_over_tcp_asks_for_a_key(keyed: Keyed) -> None:
    http = http_key(keyed, "web")
    with Client(runtime_dir=keyed.serving.runtime_dir) as local, keyed.client("proxy") as remote:
        for client in local, remote:
            asked = client.complete("letters", "for web", max_tokens=20, on_behalf_of=http)
            assert asked.text == answer("for web", 20)
            named = [model["name"] for model in client.call("models", on_behalf_of=http)["models"]]
            assert named == ["letters", "stories"]
            ids = client.tokenize("letters", "abc", on_behalf_of=http)
            assert client.call("detokenize", model="letters", token_ids=b"", on_behalf_of=http)["text"] == ""
            assert ids
            for verb in ("status", "reload"):
                assert refused_call(client, verb, on_behalf_of=http).code is ErrorCode.FORBIDDEN
        assert refusal(remote).code is ErrorCode.FORBIDDEN, "a gateway may ask for keys, not for itself"
        assert refused_call(remote, "status").code is ErrorCode.FORBIDDEN
        assert local.complete("letters", "own", max_tokens=3).text == answer("own", 3)
    assert reported(keyed, "web")["rights"] == ["infer"]


@pytest.mark.parametrize("name", ["laptop", "boss"])
def test_a_connection_without_the_right_cannot_act_for_others(keyed: Keyed, name: str) -> None:
    """Every such message is refused, and the named key is not charged."""
    http, chance = http_key(keyed, f"victim-of-{name}", "infer,status,admin", max_in_flight=1), random.Random(SEED)
    others = [http, keyed.keys["boss"].public_key, "", "0" * 64, None, 1, b"x", [http], {"id": http}]
    with keyed.raw(name) as raw:
        for number in range(1, 200):
            key_id = chance.choice(others)
            if chance.random() < 0.5:
                raw.send(Generate(number, "letters", {"on_behalf_of": key_id}, pack_body({"prompt": "x"})))
            else:
                verb = chance.choice(["models", "status", "tokenize", "start", "stop", "reload", "shutdown", "what"])
                raw.send(Call(number, verb, pack_body({"model": "letters", "on_behalf_of": key_id})))
        raw.barrier()
        assert len(raw.errors) + len(raw.replies) == 199
        errors = [error for _, error in raw.errors] + [reply["error"] for reply in raw.replies]
        assert {error["name"] for error in errors} == {"forbidden"}  # type: ignore[index]
        assert not raw.heard
    assert keyed.serving.status("letters")["state"] == "ready"
    assert reported(keyed, f"victim-of-{name}")["rate_limited"] == 0


def by_name(keys: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(({**key, "unfinished": 0} for key in keys), key=lambda key: str(key["name"]))


def test_an_id_that_is_on_no_list_costs_nobody_anything(keyed: Keyed) -> None:
    chance = random.Random(SEED)
    http = http_key(keyed, "beside")
    before = keyed.serving.overview()["supervisor"]["http_keys"]
    with Client(runtime_dir=keyed.serving.runtime_dir) as local:
        for _ in range(300):
            unknown = chance.randbytes(32).hex()
            assert refusal(local, on_behalf_of=unknown).code is ErrorCode.UNAUTHORIZED
            assert refused_call(local, "models", on_behalf_of=unknown).code is ErrorCode.UNAUTHORIZED
        for wrong in ("", "0" * 63, "0" * 65, "Z" * 64, keyed.keys["boss"].public_key, "é" * 64):
            assert refusal(local, on_behalf_of=wrong).code is ErrorCode.INVALID_REQUEST
            assert refused_call(local, "models", on_behalf_of=wrong).field == "on_behalf_of"
        assert local.complete("letters", "x", max_tokens=3, on_behalf_of=http).text == answer("x", 3)
    after = keyed.serving.overview()["supervisor"]["http_keys"]
    assert by_name(after["keys"]) == by_name(before["keys"]), "nothing is kept of an unknown id"


def test_a_null_does_not_make_a_gateway_act_for_itself(keyed: Keyed) -> None:
    """A gateway that loses the id by a fault must not get the rights of the supervisor's own user."""
    with Client(runtime_dir=keyed.serving.runtime_dir) as local:
        assert refused_call(local, "models", on_behalf_of=None).code is ErrorCode.INVALID_REQUEST
    with RawClient(keyed.serving.runtime_dir) as raw:
        raw.send(Generate(1, "letters", {"on_behalf_of": None}, pack_body({"prompt": "x"})))
        raw.barrier()
        assert [(number, error["field"]) for number, error in raw.errors] == [(1, "route.on_behalf_of")]


def test_two_gateways_share_the_limits_of_a_key(keyed: Keyed) -> None:
    http, other = http_key(keyed, "two-at-once", max_in_flight=2), http_key(keyed, "not-limited")
    with (
        keyed.client("proxy") as one,
        keyed.client("proxy2") as two,
        Client(runtime_dir=keyed.serving.runtime_dir) as three,
    ):
        running = [client.generate("letters", "long", max_tokens=90_000, on_behalf_of=http) for client in (one, two)]
        for stream in running:
            next(stream)
        assert reported(keyed, "two-at-once")["unfinished"] == 2
        for client in one, two, three:
            refused = refusal(client, on_behalf_of=http)
            assert refused.code is ErrorCode.RATE_LIMITED
            assert refused.retry_after_ms
            assert client.complete("letters", "y", max_tokens=2, on_behalf_of=other).text == answer("y", 2)
        running[0].cancel()
        for _ in running[0]:
            pass

        def admitted() -> bool:
            try:
                three.complete("letters", "z", max_tokens=1, on_behalf_of=http)
            except WireError as e:
                if e.code is not ErrorCode.RATE_LIMITED:
                    raise
                return False
            return True

        wait_until(admitted, what="the place of the cancelled request is free")


def test_tokens_a_minute_are_counted_also_where_compiled_code_passes_them_on(keyed: Keyed) -> None:
    http = http_key(keyed, "slow", tokens_per_minute=60)
    with Client(runtime_dir=keyed.serving.runtime_dir) as local:
        assert local.complete("letters", "all", max_tokens=200, on_behalf_of=http).text == answer("all", 200)
        refused = refusal(local, on_behalf_of=http)
        assert refused.code is ErrorCode.RATE_LIMITED
        assert refused.retry_after_ms
        assert 100_000 < refused.retry_after_ms < 250_000, "a debt of some 150 tokens, at one a second"
    assert reported(keyed, "slow")["tokens_left"] < -100
    assert reported(keyed, "slow")["rate_limited"] == 1


def test_models_that_a_key_may_not_use_are_hidden(keyed: Keyed) -> None:
    http = http_key(keyed, "reader", "infer,status,admin", models=("let*",))
    with (
        Client(runtime_dir=keyed.serving.runtime_dir) as local,
        Client(runtime_dir=keyed.serving.runtime_dir, admin=True) as orders,
    ):
        assert [m["name"] for m in local.call("models", on_behalf_of=http)["models"]] == ["letters"]
        shown = local.call("status", on_behalf_of=http)
        assert [m["model"] for m in shown["models"]] == ["letters"]
        assert local.complete("letters", "x", max_tokens=3, on_behalf_of=http).text == answer("x", 3)
        assert refusal(local, "stories", on_behalf_of=http).code is ErrorCode.FORBIDDEN
        assert refusal(local, "nothing", on_behalf_of=http).code is ErrorCode.FORBIDDEN
        unknown = refusal(local, "lettuce", on_behalf_of=http)
        assert unknown.code is ErrorCode.MODEL_NOT_FOUND
        assert "stories" not in unknown.message
        for model in ("stories", "stories:1"):
            for verb in ("status", "tokenize", "start", "stop", "restart", "reload"):
                client = local if verb in ("status", "tokenize") else orders
                assert refused_call(client, verb, model=model, on_behalf_of=http).code is ErrorCode.FORBIDDEN, verb
        for verb in ("reload", "shutdown"):
            assert refused_call(orders, verb, on_behalf_of=http).code is ErrorCode.FORBIDDEN, "of all models"
        for model in ("lettuce", "letters:9"):
            for verb in ("status", "tokenize", "start", "stop", "restart", "logs"):
                client = local if verb in ("status", "tokenize", "logs") else orders
                unknown = refused_call(client, verb, model=model, on_behalf_of=http)
                assert unknown.code is ErrorCode.MODEL_NOT_FOUND
                assert "stories" not in unknown.message
        all_names = http_key(keyed, "star", "admin", models=("*",))
        for logged in ({}, {"model": "supervisor"}):
            assert refused_call(local, "logs", on_behalf_of=all_names, **logged).code is ErrorCode.FORBIDDEN
        assert local.call("logs", model="letters", on_behalf_of=http)["lines"]
    key = keyed.new("narrow", "infer", models=("stories",))
    with keyed.client(key) as client:
        assert [m["name"] for m in client.server["models"]] == ["stories"]
        assert refusal(client, "letters").code is ErrorCode.FORBIDDEN
        assert client.complete("stories", "x", max_tokens=3).text == answer("x", 3)


def test_requests_of_a_revoked_key_end_and_those_of_others_go_on(keyed: Keyed) -> None:
    http, other = http_key(keyed, "leaver"), http_key(keyed, "stayer")
    with keyed.client("proxy") as remote, Client(runtime_dir=keyed.serving.runtime_dir) as local:
        ending = [c.generate("letters", "long", max_tokens=90_000, on_behalf_of=http) for c in (remote, local)]
        kept = [c.generate("letters", "kept", max_tokens=400, on_behalf_of=other) for c in (remote, local)]
        for stream in ending:
            next(stream)
        keyed.store.revoke("leaver")
        for client in remote, local:
            assert refusal(client, on_behalf_of=http).code is ErrorCode.UNAUTHORIZED, "at once"
        for stream in ending:
            with pytest.raises(WireError, match="'leaver' was revoked") as ended:
                for _ in stream:
                    pass
            assert ended.value.code is ErrorCode.UNAUTHORIZED
        for stream in kept:
            assert stream.complete().text == answer("kept", 400)
        assert local.complete("letters", "own", max_tokens=3).text == answer("own", 3)
    keyed.serving.wait_idle("letters")


def test_requests_of_an_expired_key_end(keyed: Keyed) -> None:
    http = http_key(keyed, "brief", expires=time.time() + 2)
    curve = keyed.new("brief-curve", expires=time.time() + 2)
    with Client(runtime_dir=keyed.serving.runtime_dir) as local, keyed.client(curve) as client:
        streams = [
            local.generate("letters", "long", max_tokens=90_000, on_behalf_of=http),
            client.generate("letters", "long", max_tokens=90_000),
        ]
        for stream in streams:
            with pytest.raises(WireError, match="has expired") as ended:
                for _ in stream:
                    pass
            assert ended.value.code is ErrorCode.UNAUTHORIZED
        assert refusal(local, on_behalf_of=http).code is ErrorCode.UNAUTHORIZED
        with pytest.raises(WireError) as refused:
            keyed.client(curve)
        assert refused.value.code is ErrorCode.UNAUTHORIZED
    keyed.serving.wait_idle("letters")


def test_requests_that_a_revoked_gateway_has_end_with_it(keyed: Keyed) -> None:
    http, gateway = http_key(keyed, "passenger"), keyed.new("sinking", "gateway")
    with keyed.client(gateway) as remote:
        stream = remote.generate("letters", "long", max_tokens=90_000, on_behalf_of=http)
        next(stream)
        keyed.store.revoke("sinking")
        with pytest.raises(WireError, match="'sinking' was revoked") as ended:
            for _ in stream:
                pass
        assert ended.value.code is ErrorCode.UNAUTHORIZED
    keyed.serving.wait_idle("letters")


def test_a_supervisor_without_a_port_reads_the_list_too(keyed: Keyed) -> None:
    http = http_key(keyed, "local-only")
    with (
        Serving({"m": engine(context=100_000)}, keys=keyed.store.directory) as serving,
        Client(runtime_dir=serving.runtime_dir) as local,
    ):
        assert serving.overview()["supervisor"]["tcp"] is None
        assert local.complete("m", "x", max_tokens=3, on_behalf_of=http).text == answer("x", 3)
        later = http_key(keyed, "made-later")
        assert local.complete("m", "y", max_tokens=3, on_behalf_of=later).text == answer("y", 3)
        stream = local.generate("m", "z", max_tokens=90_000, on_behalf_of=later)
        keyed.store.revoke("made-later")
        with pytest.raises(WireError) as ended:
            for _ in stream:
                pass
        assert ended.value.code is ErrorCode.UNAUTHORIZED


@pytest.mark.long
def test_ten_thousand_keys_stay_quick() -> None:
    with Keyed({"m": engine()}, {"proxy": "gateway"}) as many:
        entries = many.store.entries()
        for number in range(9_998):
            digest = hashlib.sha256(str(number).encode()).hexdigest()
            entries.append(
                {
                    "name": f"k{number}", "token_sha256": digest, "rights": ["infer"], "models": ["m*", "x"],
                    "created": "2026-01-01T00:00:00Z", "expires": "2099-01-01T00:00:00Z", "tokens_per_minute": 10_000,
                }
            )  # fmt: skip
        path = many.store.directory / "clients.json"
        beside = many.store.directory / ".new"
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            json.dump({"clients": entries}, file)
        beside.rename(path)
        with Client(runtime_dir=many.serving.runtime_dir, timeout=WITHIN) as local:
            for number in range(0, 9_998, 7):
                digest = hashlib.sha256(str(number).encode()).hexdigest()
                assert local.complete("m", "x", max_tokens=1, on_behalf_of=digest).text == answer("x", 1)
        shown = many.serving.overview()["supervisor"]["http_keys"]
        assert (shown["listed"], len(shown["keys"])) == (9_998, 100)


def test_a_key_sees_and_cancels_its_own_requests_through_any_gateway(keyed: Keyed) -> None:
    mine, other = http_key(keyed, "mine"), http_key(keyed, "other")
    watcher = http_key(keyed, "watcher", "status", models=("stories",))
    with (
        keyed.client("proxy") as one,
        keyed.client("proxy2") as two,
        Client(runtime_dir=keyed.serving.runtime_dir, admin=True) as orders,
    ):
        stream = one.generate("letters", "long", max_tokens=90_000, on_behalf_of=mine)
        next(stream)
        (shown,) = two.call("requests", on_behalf_of=mine)["requests"]
        assert (shown["key"], shown["model"]) == ("mine", "letters")
        assert two.call("requests", on_behalf_of=other)["total"] == 0
        assert two.call("requests")["total"] == 0, "a gateway sees nothing by itself"
        assert two.call("requests", on_behalf_of=watcher)["total"] == 0, "of a model that it may not know"
        for client in two, orders:
            for key_id in other, watcher:
                refused = refused_call(client, "cancel_request", id=shown["id"], on_behalf_of=key_id)
                assert refused.code in (ErrorCode.INVALID_REQUEST, ErrorCode.FORBIDDEN)
        two.call("cancel_request", id=shown["id"], on_behalf_of=mine)
        for _ in stream:
            pass
        keyed.serving.order("restart", model="letters")
        keyed.serving.wait_state("letters", "ready")
        events = two.call("events", on_behalf_of=watcher)["events"]
        assert {event["model"] for event in events} == {"stories"}
    keyed.serving.wait_idle("letters")
