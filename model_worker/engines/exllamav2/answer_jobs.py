"""Make the generator's job of a request, and the job that takes its place when the answer goes back."""

import importlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engine import Job
from model_worker.engines.constraint import AnyConstraint
from model_worker.engines.draws import Draws
from model_worker.engines.exllamav2.answer import Redraw
from model_worker.engines.exllamav2.batch import Batch
from model_worker.engines.exllamav2.load import Loaded
from model_worker.engines.exllamav2.prompt_scoring import PromptScorer
from model_worker.engines.exllamav2.sampling import NEVER, PieceSearch, TokenBias, settings_of, xtc_is_on
from model_worker.engines.healing import Healing
from model_worker.engines.prompt_scores import PromptPieces
from protocol.errors import RequestError
from protocol.request import SamplingParams


class AnswerJobs:
    """Makes the AnswerJobs of one loaded model.

    padded    size of the generator's padded vocabulary
    drawable  ids below this can be drawn
    eos_ids   ids that end an answer
    """

    def __init__(self, loaded: Loaded, batch: Batch, padded: int, drawable: int, eos_ids: Collection[int]) -> None:
        # Not imported above: this module imports exllamav2, which ``exllamav2.load`` must have done before.
        self._answer_job = importlib.import_module("model_worker.engines.exllamav2.job").AnswerJob
        self._batch, self._padded, self._drawable, self._eos_ids = batch, padded, drawable, eos_ids
        self._draft_tokens, self._ngram, self._by_rule = loaded.draft_tokens, loaded.ngram, loaded.graphs
        self._pieces = PieceSearch(loaded.tokenizer.get_id_to_piece_list(True))
        sampler = loaded.generator.ExLlamaV2Sampler
        self._protected = sampler.get_default_xtc_mask_tokens(loaded.tokenizer)
        punctuation = sampler.get_dry_default_sequence_breaker_tokens(loaded.tokenizer)
        self._breakers = np.zeros(drawable, bool)
        self._breakers[[token for token in punctuation if token < drawable]] = True

    def first(
        self, job: Job, prompts: list[tuple[int, ...]], healing: Healing | None, constraint: AnyConstraint | None
    ) -> Any:
        """Return the AnswerJob with which a request begins.

        prompts  ids of the prompt (healed, if there is ``healing``), and of the negative prompt if there is guidance

        Raises RequestError if the first draw has no token left.
        """
        bias = TokenBias.of(job.sampling, self._padded, self._eos_ids)
        if bias is not None:
            bias.count_only(job.resumed_ids)
        handle = self._make(
            job,
            [(*prompt, *job.resumed_ids) for prompt in prompts],
            settings_of(job.sampling),
            drawn=-1 if healing else len(job.resumed_ids),
            draws=Draws(job.sampling.seed),
            bias=bias,
            first_bias=self._first_bias(healing.allowed if healing else None, ()),
            constraint=constraint,
            scorer=self._scorer(job),
        )
        handle.limit_draw()
        if constraint and not handle.can_draw():
            raise RequestError("resumed_ids are a whole answer", field="resumed_ids")
        if healing and not handle.can_draw():
            raise RequestError("no token is left that may heal the prompt", field="token_healing")
        return handle

    def redraw_of(self, job: Job, prompts: list[tuple[int, ...]], healing: Healing | None) -> Redraw:
        """Return the function by which an answer of ``job`` goes back.

        The function cancels the AnswerJob and makes another one. The new prompt includes the tokens that were kept.
        Their pages are still in the cache.
        """

        def redraw(old: Any, kept: Sequence[int], blocked: Iterable[int]) -> Any | None:
            if old.constraint is not None:
                old.constraint.back_to(len(kept))
            self._batch.cancel(old)
            new = self._make(
                job,
                [(*prompt, *kept) for prompt in prompts],
                settings_of(job.sampling) | {"mirostat_mu": old.gen_settings.mirostat_mu},
                drawn=len(kept) - (healing is not None),
                draws=old.draws,
                returns=old.returns + 1,
                bias=old.bias,
                first_bias=self._first_bias(healing.allowed if healing and not kept else None, blocked),
                constraint=old.constraint,
            )
            new.limit_draw()
            if not new.can_draw():
                return None
            self._batch.add(new, first=True)
            return new

        return redraw

    def _make(self, job: Job, prompts: list[tuple[int, ...]], settings: dict[str, Any], **varying: Any) -> Any:
        """Return an AnswerJob. ``varying`` are the arguments that change when an answer goes back."""
        sampling = job.sampling
        xtc = (sampling.xtc_probability, sampling.xtc_threshold, self._protected)
        return self._answer_job(
            prompts,
            settings,
            limit=job.max_new_tokens,
            minimum=job.min_new_tokens,
            end_ids=[i for i in {*self._eos_ids, *job.stop_token_ids} if i < self._drawable],
            vocab=self._drawable,
            draft=self._draft_tokens,
            ngrams=self._ngram,
            top=job.top_logprobs,
            sampling=sampling,
            breakers=self._breakers_of(sampling),
            by_rule=self._by_rule,
            xtc=xtc if xtc_is_on(sampling) else None,
            identifier=job.id,
            **varying,
        )

    def _scorer(self, job: Job) -> PromptScorer | None:
        scoring = job.prompt_logprobs
        return None if scoring is None else PromptScorer(PromptPieces(job.id, job.prompt_ids, scoring), self._drawable)

    def _first_bias(self, allowed: Iterable[int] | None, blocked: Iterable[int]) -> torch.Tensor | None:
        """Return the bias that limits only the next draw, or None if nothing limits it."""
        blocked = list(blocked)
        if allowed is None and not blocked:
            return None
        bias = torch.full((self._padded,), 0.0 if allowed is None else NEVER)
        if allowed is not None:
            bias[[token for token in allowed if token < self._drawable]] = 0.0
        bias[blocked] = NEVER
        return bias

    def _breakers_of(self, sampling: SamplingParams) -> Any | None:
        """Return, as bool [vocabulary], which ids end a repeated sequence. Return None without DRY."""
        if not sampling.dry_multiplier:
            return None
        if not sampling.dry_sequence_breakers:
            return self._breakers
        breakers = np.zeros(self._drawable, bool)
        for text in sampling.dry_sequence_breakers:
            breakers[[token for token in self._pieces.holding(text) if token < self._drawable]] = True
        return breakers
