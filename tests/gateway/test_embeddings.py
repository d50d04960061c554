"""Common clients get vectors and scores over HTTP, and errors that name the field."""

import http.client
import json
import struct
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from tests.engines.tiny_embedding import TEXTS, engine, vectors, write_both
from tests.keyed import free_port
from tests.serving import WITHIN, Serving

QUERY = "who is red"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_both(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def port(models: dict[str, Path]) -> Iterator[int]:
    port = free_port()
    entries: dict[str, Any] = {name: {"model_dir": str(path), "engine": "embedding"} for name, path in models.items()}
    with Serving(entries, gateway={"listen": port, "auth": "none"}, default_model="bert"):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=WITHIN, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> numpy.ndarray:
    return vectors(engine(models["bert"]), TEXTS)


def ask(port: int, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, Any]]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())


def test_the_openai_package(client: openai.OpenAI, expected: numpy.ndarray) -> None:
    one = client.embeddings.create(model="bert", input=TEXTS[0])  # the package asks for base64, and decodes it
    assert one.data[0].embedding == pytest.approx(expected[0].tolist(), abs=1e-5)
    assert (one.model, one.object, one.usage.prompt_tokens, one.usage.total_tokens) == ("bert", "list", 6, 6)
    several = client.embeddings.create(model="bert", input=TEXTS, encoding_format="float")
    assert [each.index for each in several.data] == [0, 1, 2, 3]
    assert numpy.array([each.embedding for each in several.data]) == pytest.approx(expected, abs=1e-5)
    short = client.embeddings.create(model="bert", input=TEXTS, dimensions=8, user="u")
    assert numpy.linalg.norm([each.embedding for each in short.data], axis=1) == pytest.approx(1, abs=1e-5)
    ids = client.post("/tokenize", body={"model": "bert", "prompt": TEXTS[2]}, cast_to=object)["tokens"]  # type: ignore[index]
    for given in (ids, [ids]):
        found = client.embeddings.create(model="bert", input=given)
        assert found.data[0].embedding == pytest.approx(expected[2].tolist(), abs=1e-5)


def test_base64(port: int, expected: numpy.ndarray) -> None:
    status, _, answer = ask(port, "/v1/embeddings", {"model": "bert", "input": TEXTS[:2], "encoding_format": "base64"})
    assert status == 200
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    for number, entry in enumerate(answer["data"]):
        assert (entry["index"], entry["object"]) == (number, "embedding")
        unpacked = struct.unpack("<32f", b64decode(entry["embedding"]))
        assert unpacked == pytest.approx(expected[number].tolist(), abs=1e-5)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_a_list_that_is_sent_in_pieces(client: openai.OpenAI, expected: numpy.ndarray, form: Any) -> None:
    found = client.embeddings.create(model="bert", input=TEXTS * 25, encoding_format=form)
    assert [each.index for each in found.data] == [*range(100)]
    vectors = [
        struct.unpack("<32f", b64decode(each.embedding)) if form == "base64" else each.embedding for each in found.data
    ]
    assert numpy.array(vectors) == pytest.approx(numpy.tile(expected, (25, 1)), abs=1e-5)
    assert found.usage.prompt_tokens


def test_langchain(port: int, expected: numpy.ndarray) -> None:
    made = OpenAIEmbeddings(
        model="bert",
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,  # else it sends token ids of another vocabulary
        max_retries=0,
    )
    assert numpy.array(made.embed_documents(TEXTS)) == pytest.approx(expected, abs=1e-5)
    assert made.embed_query(TEXTS[1]) == pytest.approx(expected[1].tolist(), abs=1e-5)
    # By default it sends ids of cl100k, which are of another vocabulary.
    status, _, answer = ask(port, "/v1/embeddings", {"model": "bert", "input": [[9906, 1917]]})
    assert status == 400
    assert "input[0] has the id 9906, and this model's vocabulary has 64" in answer["error"]["message"]


def test_open_webui(port: int, models: dict[str, Path], expected: numpy.ndarray) -> None:
    """Open WebUI's requests: texts with and without a prefix, and a reranker of its own."""
    status, _, answer = ask(port, "/v1/embeddings", {"input": TEXTS, "model": "bert"})
    assert status == 200
    assert numpy.array([each["embedding"] for each in answer["data"]]) == pytest.approx(expected, abs=1e-5)
    scores = vectors(engine(models["cross"]), TEXTS, query=QUERY)[:, 0]
    body = {"model": "cross", "query": QUERY, "documents": TEXTS, "top_n": len(TEXTS)}
    for path in ("/v1/rerank", "/rerank", "/v1/v1/rerank"):
        status, _, answer = ask(port, path, body)
        assert status == 200
        assert {each["index"]: each["relevance_score"] for each in answer["results"]} == pytest.approx(
            dict(enumerate(scores.tolist())), abs=1e-5
        )


def test_reranking(port: int, models: dict[str, Path]) -> None:
    scores = vectors(engine(models["cross"]), TEXTS, query=QUERY)[:, 0]
    best = [int(number) for number in numpy.argsort(-scores)]
    body = {"model": "cross", "query": QUERY, "documents": [{"text": text} for text in TEXTS]}
    status, _, answer = ask(port, "/v1/rerank", body | {"top_n": 2, "return_documents": True})
    assert status == 200
    assert [each["index"] for each in answer["results"]] == best[:2]
    assert answer["results"][0]["document"] == {"text": TEXTS[best[0]]}
    assert (answer["model"], answer["object"]) == ("cross", "list")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    status, _, answer = ask(port, "/v1/rerank", body | {"top_n": 0})
    assert [each["index"] for each in answer["results"]] == best
    assert "document" not in answer["results"][0]


def test_the_default_model_and_unknown_options(port: int) -> None:
    status, headers, answer = ask(port, "/v1/embeddings", {"input": "a", "input_type": "query", "dimensions": None})
    assert (status, answer["model"]) == (200, "bert")
    assert headers["x-modelctl-ignored"] == "input_type"
    assert "x-modelctl-ignored" not in ask(port, "/v1/embeddings", {"input": "a", "user": "u"})[1]


LONG = "fox " * 90


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("embeddings", {}, "input", "must be a text"),
        ("embeddings", {"input": []}, "input", "must be a text"),
        ("embeddings", {"input": ["a", ""]}, "input[1]", "is empty"),
        ("embeddings", {"input": ["a", 1]}, "input[1]", "must be a text, as input[0] is"),
        ("embeddings", {"input": [[1], [-1]]}, "input[1]", "must be a text, or an array of token ids"),
        ("embeddings", {"input": ["a"] * 2049}, "input", "has 2049 texts: at most 2048"),
        ("embeddings", {"input": ["a", LONG]}, "input", "input[1] has 92 tokens: this model takes at most 64"),
        ("embeddings", {"input": [[5, 64]]}, "input", "input[0] has the id 64, and this model's vocabulary has 64"),
        (
            "embeddings",
            {"input": "a", "dimensions": 33},
            "dimensions",
            "dimensions is 33: this model's vectors have 32",
        ),
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions", "dimensions is 0"),
        ("embeddings", {"input": "a", "dimensions": "8"}, "dimensions", "dimensions must be"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "must be float or base64"),
        ("embeddings", {"input": "a", "model": "cross"}, "model", "ask it with RERANK"),
        ("rerank", {"documents": ["a"]}, "query", "query must be"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": True}, "top_n", "a whole number"),
        ("rerank", {"query": "a"}, "documents", "must be an array of at least one text"),
        ("rerank", {"query": "a", "documents": [1]}, "documents[0]", "must be a text, or an object"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n is -1"),
        ("rerank", {"query": "a", "documents": ["b", LONG]}, "documents", "documents[1] has 94 tokens with the query"),
        ("rerank", {"query": "a", "documents": ["b"], "model": "bert"}, "model", "ask it with EMBED"),
    ],
)
def test_refusals(port: int, path: str, body: dict[str, Any], param: str, says: str) -> None:
    status, headers, answer = ask(port, f"/v1/{path}", {"model": "bert" if path == "embeddings" else "cross"} | body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert says in answer["error"]["message"]
    assert headers["x-should-retry"] == "false"


def test_long_texts_are_cut_on_demand(port: int) -> None:
    assert ask(port, "/v1/embeddings", {"model": "bert", "input": LONG, "truncate": True})[0] == 200
    body = {"model": "cross", "query": "a", "documents": [LONG], "truncate": True}
    assert ask(port, "/v1/rerank", body)[0] == 200


def test_lists_say_what_a_model_makes(client: openai.OpenAI) -> None:
    bert, cross = (client.models.retrieve(name).model_extra or {} for name in ("bert", "cross"))
    assert (bert["type"], bert["capabilities"]["reranker"], bert["capabilities"]["completion"]) == (
        "embeddings",
        False,
        False,
    )
    assert (cross["type"], cross["capabilities"]["reranker"]) == ("llm", True)


def test_chats_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="this model makes vectors of texts"):
        client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "hello"}])
