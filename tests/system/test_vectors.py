"""EMBED and RERANK through a real supervisor and real workers."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from model_worker.embedding import texts_in_piece
from modelctl import AsyncClient, Client, Embeddings, ErrorCode, WireError
from protocol.client.answers import Vectors
from tests.serving import Serving, engine, wait_until
from tests.vector_engine import SIZE, score, vector, vector_model

LARGE = 1024
"""Numbers in a vector of the model "large": a piece holds 32 of them."""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {
        "vectors": vector_model(),
        "large": vector_model(size=LARGE, step_s=0.002),
        "scores": vector_model("rerank"),
        "text": engine(),
    }
    with Serving(models) as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[Client]:
    with serving.client() as client:
        yield client


def test_vectors_come_in_the_order_of_the_texts(client: Client) -> None:
    texts = [f"text {number}" for number in range(300)]
    got = client.embed("vectors", texts)
    assert (len(got), got.size) == (len(texts), SIZE)
    assert got.vectors == [vector(text) for text in texts]
    assert got.usage["prompt_tokens"] == sum(map(len, texts))
    assert got.usage["completion_tokens"] == 0


def test_more_vectors_than_a_client_may_leave_unread(client: Client) -> None:
    texts = [f"text {number}" for number in range(40 * texts_in_piece(LARGE))]
    got = client.embed("large", texts)
    assert len(got) == len(texts)
    found = got.vectors
    assert all(found[number] == vector(texts[number], LARGE) for number in range(0, len(texts), 7))


def test_token_ids_in_place_of_a_text(client: Client) -> None:
    assert client.embed("vectors", [[1, 2], [3]]).vectors == [vector([1, 2]), vector([3])]


def test_dimensions(client: Client) -> None:
    assert client.embed("vectors", ["a"], dimensions=3).vectors[0] == vector("a", 3)


def test_scores_of_documents(client: Client) -> None:
    documents = ["one", "two", "three"]
    assert client.rerank("scores", "q", documents).scores == tuple(score("q", each) for each in documents)


def test_from_asyncio(serving: Serving) -> None:
    async def ask() -> None:
        async with AsyncClient(runtime_dir=serving.runtime_dir) as client:
            one, two = await asyncio.gather(client.embed("vectors", ["a"]), client.rerank("scores", "q", ["d"]))
            assert (one.vectors[0], two.scores) == (vector("a"), (score("q", "d"),))

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"texts": []}, "texts", "at least 1 long"),
        ({"texts": ["a", b"123"]}, "texts.1", "must be a string"),
        ({"texts": ["a"], "dimensions": 0}, "dimensions", "at least 1"),
        ({"texts": ["a"], "temperature": 1.0}, "temperature", "unknown field"),
        ({"texts": ["x" * 5000]}, "texts", "too long"),
    ],
)
def test_what_is_refused(client: Client, body: dict[str, object], field: str, says: str) -> None:
    texts = body.pop("texts")
    with pytest.raises(WireError, match=says) as caught:
        client.embed("vectors", texts, **body)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert client.embed("vectors", ["a"]).vectors[0] == vector("a")


def test_a_model_that_makes_something_else_refuses(client: Client) -> None:
    for ask in (
        lambda: client.embed("text", ["a"]),
        lambda: client.rerank("vectors", "q", ["a"]),
        lambda: client.embed("scores", ["a"]),
        lambda: client.complete("vectors", "a", max_tokens=1),
    ):
        with pytest.raises(WireError) as caught:
            ask()
        assert (caught.value.code, caught.value.field) == (ErrorCode.UNSUPPORTED, "model")


def test_another_worker_goes_on_behind_the_vectors_that_came(client: Client) -> None:
    texts = [*(f"text {number}" for number in range(20 * texts_in_piece(LARGE))), "kill 9"]
    got = client.embed("large", texts)
    assert got.usage["resumes"] >= 1
    assert got.vectors[::5] == [vector(text, LARGE) for text in texts[::5]]
    assert len(got) == len(texts)


def test_clients_are_told_what_a_model_makes(client: Client) -> None:
    made = {model["name"]: model.get("makes") for model in client.models()["models"]}
    assert made == {"vectors": "vectors", "large": "vectors", "scores": "scores", "text": None}


def test_a_client_that_leaves_frees_the_worker(serving: Serving, client: Client) -> None:
    async def leave() -> None:
        async with AsyncClient(runtime_dir=serving.runtime_dir) as other:
            task = asyncio.create_task(other.embed("large", ["a"] * 3000, trace_ids=["left"]))
            await asyncio.to_thread(wait_until, lambda: client.requests()["total"])
            task.cancel()

    asyncio.run(leave())
    wait_until(lambda: not client.requests()["total"], what="the request is gone")
    assert client.embed("large", ["a"]).vectors[0] == vector("a", LARGE)


def test_vectors_of_two_models_are_not_joined() -> None:
    """After a reload another worker may go on with another model."""
    one, two = Vectors(0, 1, bytes(8), b"one"), Vectors(2, 1, bytes(4), b"one")
    assert len(Embeddings.of([one, two], {})) == 3
    for other in (replace(two, maker=b"two"), replace(two, size=2, data=bytes(8))):
        with pytest.raises(WireError, match="a model that was changed") as caught:
            Embeddings.of([one, other], {})
        assert caught.value.code is ErrorCode.WORKER_DIED
    for pieces in ([two], [one, replace(two, first=3)]):
        with pytest.raises(WireError, match="vectors are missing"):
            Embeddings.of(pieces, {})
