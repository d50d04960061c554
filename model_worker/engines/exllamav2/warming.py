"""The jobs that a new engine computes before it is ready. Pure.

At their first use kernels are loaded and scratch memory grows. That must not delay the first request of any kind.
"""

from model_worker.engine import Job, PromptScoring
from protocol.process.worker_spec import PAGE_TOKENS
from protocol.request import SamplingParams

GREEDY = SamplingParams(temperature=0)
STEPS = 4
"""Tokens of each answer of a full batch."""


def groups(context: int, room: int, chunk_size: int, batch: int, drawable: int, *, scores: bool) -> list[list[Job]]:
    """Return groups of jobs. The jobs of a group are computed together.

    context     tokens of prompt and answer together
    room        tokens of the cache for one sequence
    chunk_size  prompt tokens computed at a time
    batch       answers of a full batch
    drawable    ids below this are in the vocabulary
    scores      whether log-probabilities of prompts are offered
    """
    new = min(STEPS, context - 1)
    longest = min(context, room) - new
    # Chunks are multiples of pages. No two prompts begin alike, so that none is in the cache. The largest comes first,
    # so that PyTorch's allocator reuses its blocks for the others.
    sizes = reversed(range(PAGE_TOKENS, min(longest, chunk_size + 1), PAGE_TOKENS))
    chunks = [[Job(-1, (size // PAGE_TOKENS % drawable,) * (size + 1), 1, GREEDY)] for size in sizes]
    prompts = [(0,) * min(longest, 2 if number else chunk_size + 1) for number in range(batch)]
    full = [Job(-1 - number, prompt, new, GREEDY, min_new_tokens=new) for number, prompt in enumerate(prompts)]
    short = (0,) * min(longest, 2)
    log_probabilities = [Job(-1, short, 1, GREEDY, top_logprobs=1)]
    whole = (0,) * min(longest, chunk_size + 1)
    of_prompts = [Job(-1, whole, 1, GREEDY, prompt_logprobs=PromptScoring(1))] if len(whole) > 1 and scores else []
    return [*chunks, full, log_probabilities, *([of_prompts] if of_prompts else [])]
