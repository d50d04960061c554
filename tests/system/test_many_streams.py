"""With many clients at once, each gets its own complete answer and one end."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from modelctl import AsyncClient
from tests.deterministic_engine import answer
from tests.serving import Serving, engine

CLIENTS, REQUESTS = 8, 8


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(
        {"a": engine(step_s=0.0005, max_batch_size=16), "b": engine(step_s=0.0005, max_batch_size=5)}
    ) as serving:
        yield serving


def test_64_concurrent_requests_over_8_processes_get_their_own_answers(serving: Serving) -> None:
    orders = [
        [("ab"[(client + i) % 2], f"client {client} asks {i}", 20 + 3 * i) for i in range(REQUESTS)]
        for client in range(CLIENTS)
    ]
    processes = [serving.spawn_client(requests) for requests in orders]
    concurrent = []
    for process, requests in zip(processes, orders, strict=True):
        out, _ = process.communicate(timeout=60)
        report = json.loads(out.splitlines()[-1])
        assert report["ignored"] == 0, "events followed a terminal event, or were for another"
        assert report["answers"] == [[answer(prompt, n), "length"] for _, prompt, n in requests]
        concurrent.append([text for text, _ in report["answers"]])

    with serving.client() as client:
        for requests, texts in zip(orders, concurrent, strict=True):
            for (model, prompt, n), text in zip(requests, texts, strict=True):
                assert client.complete(model, prompt, max_tokens=n, temperature=0).text == text
    for model in "ab":
        serving.wait_idle(model)


def test_usage_and_accounts_are_right(serving: Serving) -> None:
    before = serving.status("a")["totals"]
    with serving.client() as client:
        stream = client.generate("a", "count me", max_tokens=7)
        done = stream.complete()
    assert done.usage == {"prompt_tokens": 8, "completion_tokens": 7}
    assert bytes(done.token_ids).decode() == done.text == answer("count me", 7)
    after = serving.status("a")["totals"]
    counted = {"tokens": 7, "finished": 1, "errors": 0, "refused": 0, "resumed": 0}
    assert {key: after[key] - before[key] for key in after} == counted


async def _async_answers(serving: Serving) -> list[str]:
    async with AsyncClient(runtime_dir=serving.runtime_dir) as client:
        done = await asyncio.gather(*(client.complete("b", f"task {i}", max_tokens=15) for i in range(20)))
        return [d.text for d in done]


def test_one_connection_carries_many_streams(serving: Serving) -> None:
    assert asyncio.run(_async_answers(serving)) == [answer(f"task {i}", 15) for i in range(20)]
