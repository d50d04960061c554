"""Draw the next token of a request, with the transformers library's own logits processors.

Requests with the same settings are drawn in one pass over their rows (``draw_together``), unless penalties, biases or
limits make a row differ from the others.
"""

from collections.abc import Collection, Sequence
from typing import cast

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from model_worker.engine import DrawnToken, Job
from model_worker.engines.admission import Draws, excluded_ids, is_greedy
from model_worker.engines.constraints import Mask
from protocol.request import SamplingParams

_NEVER = float("-inf")
_WARPED_BY = ("temperature", "temperature_last", "top_k", "top_p", "min_p", "typical_p")
"""The options that ``_warpers`` reads."""
MOST_TOGETHER = 1 << 16
"""Scores that are drawn from in one pass. 32 rows of 512 ids with top_p take 1.0 ms instead of 3.9. Rows of 128,256 ids
gain nothing: one row fits the processor's cache, and two do not (32 rows: 392 ms together, 347 one by one)."""
_LARGE = 1e30  # finite stand-in for infinite logits: a softmax over two infinities is NaN, and drawing from it raises


class AnswerPenalty(LogitsProcessor):
    """Frequency and presence penalty over the answer without the prompt, which the library lacks.

    prompt_tokens  number of first ids of ``input_ids`` that belong to the prompt
    """

    def __init__(self, frequency: float, presence: float, prompt_tokens: int) -> None:
        self._frequency, self._presence, self._prompt_tokens = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [1, vocab] with the penalties subtracted. ``input_ids`` is [1, n]."""
        answer = input_ids[0, self._prompt_tokens :]
        counts = torch.bincount(answer, minlength=scores.shape[-1])[: scores.shape[-1]]
        return scores - self._frequency * counts - self._presence * (counts > 0)


class Sampler:
    """Draws one request's tokens. A seed makes them reproducible, from any token of the answer on (engines/draws).

    vocab    ids below this can be drawn
    eos_ids  ids that end an answer

    A ``plain`` request takes the likeliest token of unchanged logits. The engine finds it for the whole batch at once.

    alike  what a draw depends on besides the logits. Samplers that have it in common can draw together. None if a draw
           also depends on earlier tokens or on a bias
    """

    def __init__(self, job: Job, vocab: int, eos_ids: Collection[int] = ()) -> None:
        sampling = job.sampling
        self.greedy = is_greedy(sampling)
        prompt_tokens = len(job.prompt_ids)
        self._repetition: LogitsProcessor | None = None
        if sampling.repetition_penalty != 1.0 and sampling.penalty_range:
            self._repetition = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        self._range = sampling.penalty_range
        self._answer_penalty: LogitsProcessor | None = None
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._answer_penalty = AnswerPenalty(sampling.frequency_penalty, sampling.presence_penalty, prompt_tokens)
        self._looks_back = bool(self._repetition or self._answer_penalty)
        self._bias = _bias(job, vocab, eos_ids)
        self.plain = self.greedy and not self._looks_back and self._bias is None
        self._warpers = LogitsProcessorList()
        self.alike: tuple[float, ...] | None = None
        if not self.greedy:
            self._warpers = _warpers(sampling)
            if not self._looks_back and self._bias is None:
                self.alike = tuple(float(getattr(sampling, name)) for name in _WARPED_BY)
        self._draws = Draws(sampling.seed)
        self._prompt_tokens = prompt_tokens
        self._ids = torch.empty(0, dtype=torch.int64)
        if self._looks_back:
            self._ids = torch.empty(prompt_tokens + job.max_new_tokens, dtype=torch.int64)
            given = (*job.prompt_ids, *job.resumed_ids)
            self._ids[: len(given)] = torch.tensor(given)

    def draw(
        self,
        logits: torch.Tensor,
        length: int,
        excluded: Collection[int] = (),
        only: Collection[int] | None = None,
        returns: int = 0,
        allowed: Mask | None = None,
    ) -> int | None:
        """Return the next token id; None if none is left.

        logits    [vocab], of any device and floating type
        length    number of tokens of prompt and answer before the new one; tokens drawn for later places are forgotten
        excluded  ids that must not be drawn now
        only      the only ids that may be drawn; None for all
        returns   how often the answer has gone back (Draws.at)
        allowed   bool [vocab]: the ids that a constraint leaves; None for all
        """
        scores = logits[None].to("cpu", torch.float32)
        past = cast(torch.LongTensor, self._ids[None, :length])
        if self._looks_back:
            if self._repetition is not None:
                recent = past if self._range < 0 else past[:, -self._range :]
                scores = self._repetition(cast(torch.LongTensor, recent), scores)
            if self._answer_penalty is not None:
                scores = self._answer_penalty(past, scores)
            scores = torch.nan_to_num(scores, nan=-_LARGE, posinf=_LARGE, neginf=-_LARGE).clamp_(-_LARGE, _LARGE)
        if self._bias is not None:
            scores = scores + self._bias
        if excluded or only is not None:
            scores = _limited(scores, excluded, only)
        if allowed is not None:
            scores = scores.masked_fill(torch.from_numpy(~allowed), _NEVER)
        limited = self._bias is not None or excluded or only is not None or allowed is not None
        if limited and torch.isneginf(scores.max()):
            return None
        if self.greedy:
            token = int(scores.argmax())
        else:
            scores = self._warpers(past, scores)
            (token,) = _at([self.point(length, returns)], scores.softmax(-1))
        if self._looks_back:
            self._ids[length] = token
        return token

    def point(self, length: int, returns: int) -> float:
        """Return the random number in [0, 1) of the token that follows ``length`` tokens of prompt and answer."""
        return self._draws.at(length - self._prompt_tokens, returns=returns)

    def draw_together(self, points: Sequence[float], logits: torch.Tensor) -> list[int]:
        """Return the next ids of requests whose samplers are ``alike``: the ids that each would draw alone.

        points  for each row, the ``point`` of the row's own sampler
        logits  [rows, vocab], of any device and floating type
        """
        ids: list[int] = []
        rows = max(1, MOST_TOGETHER // logits.shape[-1])
        for first in range(0, len(points), rows):
            part = logits[first : first + rows].to("cpu", torch.float32)
            scores = self._warpers(cast(torch.LongTensor, self._ids), part)
            ids += _at(points[first : first + rows], scores.softmax(-1))
        return ids


def _at(points: Sequence[float], probabilities: torch.Tensor) -> list[int]:
    """Return for each row the id at its point in [0, 1) of the cumulated probabilities [rows, vocab].

    This needs one random number per token, and less than half the time of ``torch.multinomial``, which takes one random
    number per id.
    """
    ids = []
    for point, sums in zip(points, probabilities.cumsum(-1, dtype=torch.float64).numpy(), strict=True):
        if not sums[-1] > 0:  # also for NaN
            raise RuntimeError("the model's logits are not numbers")
        ids.append(int(sums.searchsorted(point * sums[-1], side="right")))  # never an id of probability 0
    return ids


def _warpers(sampling: SamplingParams) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    temperature = TemperatureLogitsWarper(sampling.temperature) if sampling.temperature != 1.0 else None
    if temperature and not sampling.temperature_last:
        warpers.append(temperature)
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    if temperature and sampling.temperature_last:
        warpers.append(temperature)
    return warpers


def _bias(job: Job, vocab: int, eos_ids: Collection[int]) -> torch.Tensor | None:
    """Return the bias that is added to the logits of every draw, float32 [vocab]; None for no bias."""
    sampling = job.sampling
    excluded = [token for token in excluded_ids(job, eos_ids, early=False) if token < vocab]
    if not (sampling.logit_bias or sampling.allowed_tokens or excluded):
        return None
    bias = torch.full((vocab,), _NEVER if sampling.allowed_tokens else 0.0)
    bias[list(sampling.allowed_tokens)] = 0.0
    for token, value in (sampling.logit_bias or {}).items():
        bias[token] += value
    bias[excluded] = _NEVER
    return bias


def _limited(scores: torch.Tensor, excluded: Collection[int], only: Collection[int] | None) -> torch.Tensor:
    """Return scores [1, vocab] with -inf for ids that may not be drawn."""
    vocab = scores.shape[-1]
    scores = scores.clone()
    if only is not None:
        allowed = torch.tensor(list(only))
        kept = scores[:, allowed].clone()
        scores.fill_(_NEVER)
        scores[:, allowed] = kept
    scores[:, [token for token in excluded if token < vocab]] = _NEVER
    return scores


def log_probability(logits: torch.Tensor, token: int, top: int) -> DrawnToken:
    """Return log-probabilities of a token and of the ``top`` likeliest ones, from the model's own logits [vocab]."""
    logprobs = logits.to("cpu", torch.float32).log_softmax(-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    return DrawnToken(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
