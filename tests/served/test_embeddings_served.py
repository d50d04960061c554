"""Engine embedding is served by real processes: vectors and scores over the wire, deaths, cancels and refusals."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from modelctl import AsyncClient, Embeddings, WireError
from protocol.errors import ErrorCode
from tests.engines.tiny_embedding import TEXTS, WORDS, engine, vectors, write_both
from tests.serving import Serving, wait_until


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_both(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def serving(models: dict[str, Path]) -> Iterator[Serving]:
    entries = {name: {"model_dir": str(path), "engine": "embedding"} for name, path in models.items()}
    entries["bert"]["replicas"] = 2  # type: ignore[assignment]
    entries["letters"] = {"model_dir": "demo:letters", "engine": "transformers"}
    with Serving(entries) as running:
        yield running


def matrix(found: Embeddings) -> numpy.ndarray:
    return numpy.frombuffer(found.data, "<f4").reshape(-1, found.size)


def test_vectors_and_scores(serving: Serving, models: dict[str, Path]) -> None:
    expected = vectors(engine(models["bert"]), TEXTS)
    scores = vectors(engine(models["cross"]), TEXTS, query="who is red")[:, 0]
    with serving.client() as client:
        found = client.embed("bert", TEXTS)
        assert abs(matrix(found) - expected).max() < 1e-5
        assert (len(found), found.size, found.usage["completion_tokens"]) == (4, 32, 0)
        assert found.usage["prompt_tokens"] == 6 + 3 + 9 + len(WORDS) + 2
        assert found.vectors[1] == pytest.approx(expected[1].tolist(), abs=1e-5)
        ids = client.tokenize("bert", "the red fox")
        assert len(client.embed("bert", [ids, [5, 6]], dimensions=8).vectors[1]) == 8
        assert client.rerank("cross", "who is red", TEXTS).scores == pytest.approx(scores.tolist(), abs=1e-5)

    async def asked() -> tuple[Embeddings, Embeddings]:
        async with AsyncClient(runtime_dir=serving.runtime_dir) as client:
            return await asyncio.gather(client.embed("bert", TEXTS), client.rerank("cross", "who is red", TEXTS))

    both = asyncio.run(asked())
    assert abs(matrix(both[0]) - expected).max() < 1e-5
    assert both[1].scores == pytest.approx(scores.tolist(), abs=1e-5)


def test_each_model_takes_its_own_messages(serving: Serving) -> None:
    with serving.client() as client:
        for ask, message in (
            (lambda: client.complete("bert", "hello"), "this model makes vectors of texts: ask it with EMBED"),
            (lambda: client.embed("letters", ["a"]), "this model writes text: it makes no vectors"),
            (lambda: client.embed("cross", ["a"]), "this model scores documents: ask it with RERANK"),
            (lambda: client.rerank("bert", "a", ["a"]), "this model makes vectors of texts: ask it with EMBED"),
        ):
            with pytest.raises(WireError) as e:
                ask()
            assert (e.value.code, e.value.field) == (ErrorCode.UNSUPPORTED, "model")
            assert message in e.value.message


def test_refusals_name_the_field(serving: Serving) -> None:
    with serving.client() as client:
        for ask, field, message in (
            (lambda: client.embed("bert", []), "texts", "texts is"),
            (lambda: client.embed("bert", ["a", "fox " * 90]), "texts", "texts[1] has 92 tokens: this model takes"),
            (lambda: client.embed("bert", [[5], [9999]]), "token_ids", "token_ids[1] has the id 9999"),
            (lambda: client.embed("bert", ["a"], dimensions=33), "dimensions", "this model's vectors have 32 numbers"),
            (lambda: client.embed("bert", ["a"], prompt_name="q"), "prompt_name", "this model has no prompts"),
            (lambda: client.rerank("cross", "a", ["b"], instruction="c"), "instruction", "takes none"),
            (lambda: client.rerank("cross", "fox " * 90, ["b"], truncate=True), "query", "shorten the query"),
            (lambda: client.rerank("cross", "a", []), "documents", "documents is"),
        ):
            with pytest.raises(WireError) as e:
                ask()
            assert e.value.field == field
            assert message in e.value.message
        assert len(client.embed("bert", ["fox " * 90], truncate=True)) == 1


def test_requests_survive_the_deaths_of_workers(serving: Serving, models: dict[str, Path]) -> None:
    expected = vectors(engine(models["bert"]), TEXTS)
    texts = TEXTS * 500
    wrong: list[object] = []
    ended = threading.Event()

    def ask() -> None:
        with serving.client() as client:
            while not ended.is_set():
                try:
                    found = matrix(client.embed("bert", texts))
                except WireError as e:
                    wrong.append(e)
                    return
                if len(found) != len(texts) or abs(found.reshape(500, 4, -1) - expected).max() > 1e-5:
                    wrong.append(found)
                    return
                done.append(1)

    done: list[int] = []
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        kill_the_busiest(serving, done)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not wrong


def kill_the_busiest(serving: Serving, done: list[int]) -> None:
    with serving.client() as client:
        for number in range(4):
            wait_until(lambda n=number: len(done) > 2 * n)
            workers = [w for w in client.status()["models"] if w["model"] == "bert" and w["state"] == "ready"]
            busy = max(workers, key=lambda worker: worker["active"])
            os.kill(busy["pid"], signal.SIGKILL)
            wait_until(lambda: all(w["state"] == "ready" for w in client.status("bert")["models"]))


def test_a_cancelled_request_leaves_the_worker(serving: Serving) -> None:
    async def cancelled() -> None:
        async with AsyncClient(runtime_dir=serving.runtime_dir) as client:
            task = asyncio.create_task(client.embed("bert", TEXTS * 5000))
            while not (await client.requests())["requests"]:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    with serving.client() as client:
        wait_until(lambda: not client.requests()["requests"])
        assert len(client.embed("bert", ["a"])) == 1


def test_usage_counts_prompts(serving: Serving) -> None:
    with serving.client() as client:
        before = client.requests()
        assert before["total"] == 0
        story = client.ended_requests()["requests"][-1]
        assert story["model"] in ("bert", "cross", "letters")
        used = client.usage(model="cross")["rows"]
        assert used
        assert used[0]["prompt_tokens"] > 0
        assert used[0]["completion_tokens"] == 0


def test_a_lazy_model_comes_with_its_first_request_and_goes_when_idle(models: dict[str, Path]) -> None:
    entry = {"model_dir": str(models["bert"]), "engine": "embedding", "lazy": True, "ttl": "100ms", "sleep": "off"}
    with Serving({"bert": entry}, wait=False) as serving, serving.client() as client:

        def state() -> str:
            shown: str = client.status()["models"][0]["state"]
            return shown

        wait_until(lambda: state() == "unloaded")
        for _ in range(2):
            assert len(client.embed("bert", TEXTS)) == len(TEXTS)
            wait_until(lambda: state() == "unloaded", what="the model is unloaded when idle")
