"""Checks of a job before an engine computes anything: one bad request must not harm the other requests."""

import os
from collections.abc import Collection
from hashlib import blake2b
from struct import Struct

from model_worker.engine import Capabilities, Job
from protocol.errors import ErrorCode, RequestError
from protocol.request import SamplingParams
from protocol.values import defaults_of

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy in every engine. ExLlamaV2 does that by itself, and division by less overflows."""


def is_greedy(sampling: SamplingParams) -> bool:
    """Return whether every draw takes the likeliest token. min_p 1 means that, too, but ExLlamaV2 ignores that
    value."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1 or sampling.min_p == 1.0


def check_job(
    job: Job,
    capabilities: Capabilities,
    vocab_size: int,
    drawable: int | None = None,
    eos_ids: Collection[int] = (),
) -> None:
    """Raise RequestError for a job that this model cannot compute.

    The job may ask for something that is not offered, be too long for the context, name ids that the model lacks, or
    leave no token to draw.

    vocab_size  rows of the model's embedding. A higher id would make the whole batch fail
    drawable    ids below this can be drawn; default all
    eos_ids     ids that end an answer
    """
    _check_offered(job, capabilities.offered)
    _check_room(job, capabilities.context)
    _check_resumed(job)
    _check_ids("token_ids", job.prompt_ids, vocab_size)
    _check_ids("negative_prompt", job.negative_ids or (), vocab_size)
    drawable = vocab_size if drawable is None else drawable
    sampling = job.sampling
    named: tuple[tuple[str, Collection[int]], ...] = (
        ("logit_bias", sampling.logit_bias or ()),
        ("banned_tokens", sampling.banned_tokens),
        ("allowed_tokens", sampling.allowed_tokens),
        ("stop_token_ids", job.stop_token_ids),
        ("resumed_ids", job.resumed_ids),
    )
    for field, ids in named:
        _check_ids(field, ids, drawable)
    if not left_to_draw(job, drawable, eos_ids):
        field = "allowed_tokens" if sampling.allowed_tokens else "banned_tokens"
        raise RequestError(f"{field}: no token is left that may be drawn", field=field)


def excluded_ids(job: Job, eos_ids: Collection[int], *, early: bool) -> set[int]:
    """Return the ids that must not be drawn. ``early``: whether the token is one of the first ``min_new_tokens``, which
    are no end tokens."""
    excluded = set(job.sampling.banned_tokens)
    if job.sampling.ignore_eos or early:
        excluded.update(eos_ids)
    if early:
        excluded.update(job.stop_token_ids)
    return excluded


def left_to_draw(job: Job, drawable: int, eos_ids: Collection[int], only: Collection[int] | None = None) -> int:
    """Return how many ids may be drawn as the first token of the answer. ``only``: among these ids (token healing)."""
    excluded = excluded_ids(job, eos_ids, early=job.min_new_tokens > 0)
    left = None if only is None else set(only)
    if job.sampling.allowed_tokens:
        left = set(job.sampling.allowed_tokens) if left is None else left.intersection(job.sampling.allowed_tokens)
    if left is None:
        return drawable - sum(0 <= token < drawable for token in excluded)
    return len(left - excluded)


def _check_offered(job: Job, offered: Collection[str]) -> None:
    asked = [
        name
        for name, neutral in defaults_of(SamplingParams).items()
        if name not in offered and getattr(job.sampling, name) != neutral
    ]
    optional = {
        "min_tokens": job.min_new_tokens > 0,
        "stop_on_loop": job.stop_on_loop > 0,
        "stop_token_ids": bool(job.stop_token_ids),
        "banned_strings": bool(job.banned_strings),
        "token_healing": job.token_healing,
        "logprobs": job.top_logprobs is not None,
        "top_logprobs": bool(job.top_logprobs),
        "prompt_logprobs": job.prompt_logprobs is not None,
        "negative_prompt": job.negative_ids is not None,
        "reasoning_budget": job.layout.budget is not None,
    }
    if job.constraint is not None:
        optional[job.constraint[0]] = True
    asked += [name for name, wanted in optional.items() if wanted and name not in offered]
    if asked:
        raise RequestError(
            f"{asked[0]} is not offered by this model's engine", field=asked[0], code=ErrorCode.UNSUPPORTED
        )


def _check_room(job: Job, context: int) -> None:
    prompt, new = len(job.prompt_ids), job.max_new_tokens
    if not prompt:
        raise RequestError("the prompt has no tokens: send at least one", field="prompt")
    if new < 1:
        raise RequestError(f"max_tokens is {new}: must be at least 1", field="max_tokens")
    if prompt >= context:
        raise RequestError(
            f"the prompt has {prompt} tokens: at most {context - 1} fit the context of {context}",
            field="prompt",
            code=ErrorCode.CONTEXT_OVERFLOW,
            overflow=(prompt, context),
        )
    if prompt + new > context:
        raise RequestError(
            f"max_tokens is {new}: at most {context - prompt} fit the context of {context} behind a prompt of {prompt} "
            f"tokens ({prompt + new} tokens in all)",
            field="max_tokens",
            code=ErrorCode.CONTEXT_OVERFLOW,
            overflow=(prompt, context),
        )
    if job.min_new_tokens > new:
        raise RequestError(
            f"min_tokens is {job.min_new_tokens}: at most {new} fit the context of {context}",
            field="min_tokens",
            code=ErrorCode.CONTEXT_OVERFLOW,
        )
    if job.negative_ids is not None and not 0 < len(job.negative_ids) <= context - new:
        raise RequestError(
            f"negative_prompt has {len(job.negative_ids)} tokens: 1 to {context - new} fit the context of {context} "
            f"before {new} tokens",
            field="negative_prompt",
            code=ErrorCode.CONTEXT_OVERFLOW,
        )


def _check_resumed(job: Job) -> None:
    """Raise RequestError unless a resumed answer has tokens left and follows from its ids alone.

    An answer that does not follow from its ids is refused earlier (intake.not_resumable). If such an answer gets here,
    modelctl has a fault. An error is still better than a wrong answer.
    """
    if not job.resumed_ids:
        return
    if len(job.resumed_ids) >= job.max_new_tokens:
        raise RequestError(
            f"resumed_ids has {len(job.resumed_ids)} tokens: at most {job.max_new_tokens - 1} leave one of max_tokens",
            field="resumed_ids",
        )
    lost = {
        "mirostat_mode": job.sampling.mirostat_mode,
        "banned_strings": job.banned_strings,
        "token_healing": job.token_healing,
        "negative_prompt": job.negative_ids is not None,
    }
    for field, asked in lost.items():
        if asked:
            raise RequestError(f"an answer with {field} cannot go on in another worker", field=field)


def _check_ids(field: str, ids: Collection[int], below: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < below):
        bad = next(i for i in ids if not 0 <= i < below)
        raise RequestError(f"{field}: token id {bad} is not in the vocabulary of {below}", field=field)


# The random numbers of an answer. Each number depends only on the seed and its place, not on earlier numbers.
#
# So a seeded answer that another worker resumes is the answer that the first worker would have given. Other answers of
# the batch, speculation, and tokens that were drawn and thrown away do not change it. Does not import torch.


_pack = Struct("<qqqq").pack


class Draws:
    """The random numbers of one answer.

    seed  0 to 2**63 - 1; None: a seed from the operating system
    """

    __slots__ = ("_seed",)

    def __init__(self, seed: int | None) -> None:
        self._seed = int.from_bytes(os.urandom(8), "little") >> 1 if seed is None else seed

    def at(self, place: int, *, which: int = 0, returns: int = 0) -> float:
        """Return a uniform number in [0, 1) of 53 bits. Costs a microsecond.

        place    number of tokens of the answer before the drawn one; -1 heals the prompt (engines/healing)
        which    index of the number among those that this token needs
        returns  how often the answer has gone back and thrown tokens away (engines/banned). With its former number, a
                 token that is drawn again would be the blocked token's neighbour in the order of probabilities
        """
        digest = blake2b(_pack(self._seed, place, returns, which), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
