"""What an engine refuses before it computes: one bad request must never reach what all requests share. No torch."""

from model_worker.engine import Capabilities, Job
from protocol.errors import ErrorCode, RequestError
from protocol.request import SamplingParams

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy in every engine: ExLlamaV2 does so by itself, and division by less overflows."""


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the likeliest token is always taken. A min_p of 1 says so too, but ExLlamaV2 takes it for off."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1 or sampling.min_p == 1.0


def check_job(job: Job, capabilities: Capabilities, vocab_size: int) -> None:
    """Raise RequestError for a job that does not fit the context, holds ids that the model has not, or asks for
    sampling that the engine does not offer.

    vocab_size  rows of the model's embedding: an id beyond would fault the whole batch
    """
    if not job.prompt_ids:
        raise RequestError("the prompt has no tokens", field="prompt")
    if job.max_new_tokens < 1:
        raise RequestError(f"max_tokens is {job.max_new_tokens}: it must be at least 1", field="max_tokens")
    total = len(job.prompt_ids) + job.max_new_tokens
    if total > capabilities.context:
        raise RequestError(
            f"a prompt of {len(job.prompt_ids)} tokens and max_tokens {job.max_new_tokens} are {total} tokens; "
            f"the model's context is {capabilities.context}",
            field="max_tokens" if len(job.prompt_ids) < capabilities.context else "prompt",
            code=ErrorCode.CONTEXT_OVERFLOW,
        )
    if min(job.prompt_ids) < 0 or max(job.prompt_ids) >= vocab_size:
        bad = next(i for i in job.prompt_ids if not 0 <= i < vocab_size)
        raise RequestError(f"token id {bad} is not in the vocabulary of {vocab_size}", field="token_ids")
    for name, field in SamplingParams.model_fields.items():
        if name not in capabilities.offered and getattr(job.sampling, name) != field.default:
            raise RequestError(f"{name} is not offered by this model", field=name, code=ErrorCode.UNSUPPORTED)
