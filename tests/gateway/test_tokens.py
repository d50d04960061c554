"""The gateway checks the tokens of HTTP clients, as the openai package and plain requests send them."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import openai
import pytest

from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine


class Served(NamedTuple):
    port: int
    tokens: dict[str, str]
    serving: Serving

    def client(self, name: str) -> openai.OpenAI:
        key = self.tokens.get(name, "mctl_unknown")
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=WITHIN)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    store = KeyStore(keys)
    tokens = {
        "all": store.add_token("all", parse_rights("infer")),
        "some": store.add_token("some", parse_rights("infer"), models=("lett*",)),
        "one": store.add_token("one", parse_rights("infer"), max_in_flight=1),
    }
    port = free_port()
    models = {"letters": engine(context=100_000), "other": engine()}
    with Serving(models, gateway={"listen": port}, keys=keys) as serving:
        yield Served(port, tokens, serving)


def test_a_token_asks_with_the_rights_of_its_key(served: Served) -> None:
    with served.client("all") as client:
        assert [model.id for model in client.models.list()] == ["letters", "other"]
        whole = client.completions.create(model="other", prompt="x", max_tokens=5)
        assert whole.choices[0].text == answer("x", 5)
    with served.client("some") as client:
        assert [model.id for model in client.models.list()] == ["letters"]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        with pytest.raises(openai.PermissionDeniedError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.PermissionDeniedError):
            client.embeddings.create(model="other", input="x")
        ids = client.post("/tokenize", body={"model": "letters", "prompt": "ab"}, cast_to=object)["tokens"]  # type: ignore[index]
        assert ids == [97, 98]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/letters"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/rerank"),
        ("GET", "/v1/completions"),
        ("GET", "/v1/nothing"),
        ("GET", "/api/tags"),
    ],
)
def test_without_a_token_there_is_no_answer(served: Served, method: str, path: str) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=WITHIN)) as connection:
        for headers in ({}, {"authorization": "Basic x"}):
            connection.request(method, path, "{}" if method == "POST" else None, headers)
            response = connection.getresponse()
            error = json.loads(response.read())["error"]
            assert (response.status, error["code"], response.headers["www-authenticate"]) == (
                401,
                "unauthorized",
                "Bearer",
            )
            assert response.headers["x-should-retry"] == "false"


def test_an_unknown_token_is_refused_and_not_repeated(served: Served) -> None:
    with served.client("unknown") as client:
        for call in (client.models.list, lambda: client.completions.create(model="letters", prompt="x")):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert "mctl_unknown" not in caught.value.response.text
            assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_key_at_its_limit_is_told_when_to_try_again(served: Served) -> None:
    with served.client("one") as client:
        running = client.completions.create(model="letters", prompt="x", max_tokens=90_000, stream=True)
        next(iter(running))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="letters", prompt="x", stream=True)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "rate_limited"
        running.close()
    served.serving.wait_idle("letters")


def test_x_api_key_is_another_way_to_send_a_token(served: Served) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=WITHIN)) as connection:
        connection.request("GET", "/v1/models", headers={"x-api-key": served.tokens["some"]})
        assert [model["id"] for model in json.loads(connection.getresponse().read())["data"]] == ["letters"]
