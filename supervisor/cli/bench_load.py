"""The requests of ``bench``: many at once, with random prompts and answers of an exact length."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from protocol.client.async_client import AsyncClient
from protocol.errors import ErrorCode, WireError
from supervisor.cli.bench_figures import MeasuredAnswer

TEXT = (
    "A river begins as rain. The water gathers in small streams, runs downhill, and takes sand and stones along; "
    "where the valley is wide it slows down and lets them fall. In spring, when the snow melts, it may rise by "
    "several metres in a few days. People have built towns on its banks, mills, bridges and harbours: 3 of 4 large "
    "cities lie on one. Who wants to know how much water passes measures the width, the depth and the speed!"
)
"""A text for which any model has tokens. Prompts are drawn from these tokens."""
POLL_S = 0.1


async def usable_ids(client: AsyncClient, model: str, show: Callable[[str], Awaitable[None]]) -> list[int]:
    """Wait until the model is loaded, and return token ids for prompts. An unloaded model is started.

    show  function that is called with the reason for the wait

    Raises WireError for a model that is not loaded and will not be.
    """
    while True:
        try:
            return sorted(set(await client.tokenize(model, TEXT)))
        except WireError as e:
            if e.code is not ErrorCode.MODEL_NOT_RUNNING or e.retry_after_ms is None:
                raise
            await show(e.message)
        await asyncio.sleep(POLL_S)


def prompts(ids: Sequence[int], tokens: int, count: int, draw: random.Random) -> list[list[int]]:
    """Return ``count`` prompts of ``tokens`` tokens, drawn so that no cache can save work for a common beginning."""
    return [draw.choices(ids, k=tokens) for _ in range(count)]


async def run_once(
    client: AsyncClient, model: str, asked: Sequence[list[int]], tokens: int, answers: list[MeasuredAnswer]
) -> None:
    """Send all prompts at once over one connection, and read answers of exactly ``tokens`` tokens.

    answers  list that gets an answer for each prompt at once. They grow while they are read

    Cancelling the task cancels every request. Raises ConnectionLost. Other errors are noted in the answers.
    """
    begun = time.perf_counter()

    async def one(prompt: list[int], answer: MeasuredAnswer) -> None:
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

    answers += [MeasuredAnswer() for _ in asked]
    try:
        async with asyncio.TaskGroup() as group:
            for prompt, answer in zip(asked, answers, strict=True):
                group.create_task(one(prompt, answer))
    except ExceptionGroup as e:  # all requests use one connection, so all have lost it
        raise e.exceptions[0] from None
