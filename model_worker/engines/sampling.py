"""The next token of one request, drawn with the transformers library's own logits processors."""

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
)

from model_worker.engine import Job
from model_worker.engines.admission import is_greedy

_LARGE = 1e30  # finite stand-in for infinite logits: a softmax over two infinities is NaN, and a draw from it raises


class AnswerPenalty(LogitsProcessor):
    """Frequency and presence penalty over the answer (the prompt does not count), which the library lacks.

    prompt_tokens  ids of ``input_ids`` that belong to the prompt
    """

    def __init__(self, frequency: float, presence: float, prompt_tokens: int) -> None:
        self._frequency, self._presence, self._prompt_tokens = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores [1, vocab] with the penalty subtracted; input_ids [1, n]."""
        answer = input_ids[0, self._prompt_tokens :]
        counts = torch.bincount(answer, minlength=scores.shape[-1])[: scores.shape[-1]]
        return scores - self._frequency * counts - self._presence * (counts > 0)


class Sampler:
    """Draws one request's tokens. Reproducible for a seed: the draws come from a CPU generator of its own.

    ``plain`` requests take the likeliest token of untouched logits: the engine does that for the whole batch at once.
    """

    def __init__(self, job: Job) -> None:
        sampling = job.sampling
        self.greedy = is_greedy(sampling)
        prompt_tokens = len(job.prompt_ids)
        self._penalties = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._penalties.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._penalties.append(AnswerPenalty(sampling.frequency_penalty, sampling.presence_penalty, prompt_tokens))
        self.plain = self.greedy and not self._penalties
        self._warpers = LogitsProcessorList()
        if not self.greedy:
            if sampling.temperature != 1.0:
                self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p:
                self._warpers.append(MinPLogitsWarper(sampling.min_p))
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)
        self._ids = torch.empty(0, dtype=torch.int64)
        if self._penalties:
            self._ids = torch.empty(prompt_tokens + job.max_new_tokens, dtype=torch.int64)
            self._ids[:prompt_tokens] = torch.tensor(job.prompt_ids)
        self._length = prompt_tokens

    def draw(self, logits: torch.Tensor) -> int:
        """The next token id from logits [vocab] of any device and floating type."""
        scores = logits[None].to("cpu", torch.float32)
        if self._penalties:
            scores = self._penalties(self._past(), scores)
            scores = torch.nan_to_num(scores, nan=-_LARGE, posinf=_LARGE, neginf=-_LARGE).clamp_(-_LARGE, _LARGE)
        if self.greedy:
            token = int(scores.argmax())
        else:
            scores = self._warpers(self._past(), scores)
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
        if self._penalties:
            self._ids[self._length] = token
            self._length += 1
        return token

    def _past(self) -> torch.LongTensor:
        """Prompt and answer so far [1, n]; empty when no penalty looks at them."""
        return cast(torch.LongTensor, self._ids[None, : self._length])
