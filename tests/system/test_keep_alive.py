"""A request says how long its lazy model stays loaded, within what its key may do."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.errors import ErrorCode, WireError
from tests.gateway.asking import ask
from tests.keyed import Keyed, free_port
from tests.serving import Serving, engine

LAZY = engine(lazy=True, ttl="1h")


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving({"a": LAZY, "b": engine(), "c": engine(lazy=True, pinned=True)}) as serving:
        yield serving


def until(serving: Serving) -> float | None:
    found: float | None = serving.status("a")["until_s"]
    return found


def test_a_request_sets_the_time_until_another_one_sets_it_or_the_model_is_unloaded(serving: Serving) -> None:
    with serving.client() as client:
        client.complete("a", "x", max_tokens=1)
        assert 3590 < (until(serving) or 0) <= 3600, "the ttl of models.yaml"
        client.complete("a", "x", max_tokens=1, keep_alive="2h30m")
        assert 8990 < (until(serving) or 0) <= 9000
        client.complete("a", "x", max_tokens=1)
        assert 8900 < (until(serving) or 0) <= 9000, "a request without keep_alive changes nothing"
        client.complete("a", "x", max_tokens=1, ttl=60)
        assert 50 < (until(serving) or 0) <= 60
        client.complete("a", "x", max_tokens=1, keep_alive=-1)
        assert until(serving) is None
        client.complete("a", "x", max_tokens=1, keep_alive=0)
        assert serving.wait_state("a", "unloaded")["unloaded"] == "idle for 0 s"
        client.complete("a", "x", max_tokens=1)
        assert 3590 < (until(serving) or 0) <= 3600, "the ttl of models.yaml again"


def test_a_running_request_is_not_ended_by_its_keep_alive(serving: Serving) -> None:
    with serving.client() as client:
        assert len(client.complete("a", "x", max_tokens=1500, keep_alive=0).token_ids) == 1500
    serving.wait_state("a", "unloaded")


def test_a_model_that_is_never_unloaded_takes_only_for_ever(serving: Serving) -> None:
    serving.order("start", model="c")
    serving.wait_state("c", "ready")
    with serving.client() as client:
        for model in ("b", "c"):
            client.complete(model, "x", max_tokens=1, keep_alive="-1s")
            with pytest.raises(WireError, match=f"model '{model}' is never unloaded .*: leave ttl out") as refused:
                client.complete(model, "x", max_tokens=1, ttl=5)
            assert (refused.value.code, refused.value.field) == (ErrorCode.UNSUPPORTED, "route.ttl")


def test_a_wrong_time_is_refused_by_name(serving: Serving) -> None:
    wrong: list[dict[str, Any]] = [
        *(
            {"keep_alive": value}
            for value in ("5", "5 m", "", "m", "5d", "1m-2s", True, float("nan"), 1e12, "9999999h")
        ),
        *({"ttl": value} for value in (0, -1, 1.5, "5m", 1 << 40)),
    ]
    with serving.client() as client:
        for options in wrong:
            (name,) = options
            with pytest.raises(WireError, match=f": {name} is .*: must be seconds") as refused:
                client.complete("a", "x", **options)
            assert refused.value.field == f"route.{name}"
    assert serving.status("a")["generation"] == 0, "it was not loaded for that"


def test_both_names_at_once_are_refused(serving: Serving) -> None:
    with serving.client() as client, pytest.raises(WireError, match="ttl says what keep_alive says"):
        client.complete("a", "x", keep_alive=5, ttl=5)


def test_a_key_sets_it_within_its_limit() -> None:
    port = free_port()
    with Keyed({"a": LAZY}, {"plain": "infer", "ops": "infer,admin"}, gateway={"listen": port}) as keyed:
        keyed.new("some", keep_alive_s=120)
        web = keyed.new_http("web", keep_alive_s=600)
        with keyed.client("plain") as plain, keyed.client("some") as some, keyed.client("ops") as ops:
            with pytest.raises(WireError, match="key 'plain' may not set keep_alive: leave keep_alive out") as refused:
                plain.complete("a", "x", max_tokens=1, keep_alive=0)
            assert (refused.value.code, refused.value.field) == (ErrorCode.FORBIDDEN, "route.keep_alive")
            plain.complete("a", "x", max_tokens=1)
            some.complete("a", "x", max_tokens=1, keep_alive="2m")
            assert 110 < (until(keyed.serving) or 0) <= 120
            for more in ({"ttl": 121}, {"keep_alive": -1}):
                with pytest.raises(WireError, match="is more than 120 s, the most that key 'some' may ask for"):
                    some.complete("a", "x", max_tokens=1, **more)
            ops.complete("a", "x", max_tokens=1, keep_alive=-1)
            assert until(keyed.serving) is None

        def post(**options: Any) -> Any:
            headers = {"authorization": f"Bearer {web}"}
            return ask(port, "/v1/completions", {"model": "a", "prompt": "x", "max_tokens": 1, **options}, headers)

        post(keep_alive="10m")
        assert 590 < (until(keyed.serving) or 0) <= 600
        post(ttl=300)
        assert 290 < (until(keyed.serving) or 0) <= 300
        with pytest.raises(AssertionError, match=r'"param":"keep_alive"'):
            post(keep_alive="11m")
        with keyed.serving.client() as local:
            name = hashlib.sha256(web.encode()).hexdigest()
            with pytest.raises(WireError, match="key 'web' may ask for"):
                local.complete("a", "x", keep_alive=601, on_behalf_of=name)
