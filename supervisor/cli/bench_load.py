"""The requests of ``bench``: random prompts of an exact length, answers of an exact length, many at once."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from protocol.client.async_client import AsyncClient
from protocol.errors import ErrorCode, WireError
from supervisor.cli.bench_figures import Answer

TEXT = (
    "A river begins as rain. The water gathers in small streams, runs downhill, and takes sand and stones along; "
    "where the valley is wide it slows down and lets them fall. In spring, when the snow melts, it may rise by "
    "several metres in a few days. People have built towns on its banks, mills, bridges and harbours: 3 of 4 large "
    "cities lie on one. Who wants to know how much water passes measures the width, the depth and the speed!"
)
"""Whose tokens prompts are drawn from: what any model has tokens for."""
POLL_S = 0.1


async def usable_ids(client: AsyncClient, model: str, show: Callable[[str], None]) -> list[int]:
    """Token ids for prompts, once the model is loaded; a model that sleeps is woken by being asked.

    show  told what is waited for

    Raises WireError for a model that is not there, or not going to be.
    """
    while True:
        try:
            return sorted(set(await client.tokenize(model, TEXT)))
        except WireError as e:
            if e.code is not ErrorCode.MODEL_NOT_RUNNING or e.retry_after_ms is None:
                raise
            show(e.message)
        await asyncio.sleep(POLL_S)


def prompts(ids: Sequence[int], tokens: int, count: int, draw: random.Random) -> list[list[int]]:
    """Prompts of so many tokens, no two of which share a beginning that a cache could save to compute."""
    return [draw.choices(ids, k=tokens) for _ in range(count)]


async def run_once(client: AsyncClient, model: str, asked: Sequence[list[int]], tokens: int) -> list[Answer]:
    """Ask for answers of exactly ``tokens`` tokens to all of these at once, over one connection, and read them.

    Cancelling it cancels every request. Raises ConnectionLost; other errors are their answers'.
    """
    begun = time.perf_counter()

    async def one(prompt: list[int]) -> Answer:
        answer = Answer()
        stream = client.generate(model, token_ids=prompt, max_tokens=tokens, ignore_eos=True, temperature=0)
        try:
            async for delta in stream:
                if delta.token_ids:
                    answer.deltas.append((time.perf_counter() - begun, len(delta.token_ids)))
        except WireError as e:
            if e.code is ErrorCode.CONNECTION_LOST:
                raise
            answer.error = str(e)
        answer.accepted = stream.accepted is not None
        return answer

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in asked]
    except ExceptionGroup as e:  # one connection: what one of them lost, all have lost
        raise e.exceptions[0] from None
    return [task.result() for task in tasks]
