"""The job of one answer inside ExLlamaV2's generator, with our own bookkeeping where the package's is wrong or slow.

Importing this module imports exllamav2, so ``exllamav2.load`` must have imported the package before.

The package's work after each draw (text, held text, result dictionaries) is left out, because the engine makes text
from ids. A sequence owns its pages as in the package, but which cached pages are given up is our choice (``victims``),
and four faults of the package are repaired. Each of these faults would give a later prompt the keys and values of
another place, or would end the process:

* A page that a full cache hit leaves for the first new token did not know the page before it.
* At the end of an answer, speculated tokens that were not accepted were still counted as computed.
* A page that loses its name when it is given back was still counted as computed, without the pages before it.
* A page that is complete while another job is still going to compute the same page met an assertion.
"""

import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from exllamav2.generator import ExLlamaV2DynamicJob, ExLlamaV2Sampler
from exllamav2.generator.dynamic import _tensor_hash_checksum

from model_worker.engine import DrawnToken
from model_worker.engines.admission import Draws
from model_worker.engines.constraints import AnyConstraint, Bits, write_bias
from model_worker.engines.exllamav2.answer import COMPLETE, FAILED, PromptScorer
from model_worker.engines.exllamav2.gpu_draws.batched import draw_by_rule
from model_worker.engines.exllamav2.gpu_draws.rule import draws_by_rule, rule_of
from model_worker.engines.exllamav2.ngram import NGrams
from model_worker.engines.exllamav2.sampling import NEVER, BeforeDraw, TokenBias, is_cut
from model_worker.engines.exllamav2.victims import Held, victims
from protocol.errors import RequestError
from protocol.messages import FinishReason
from protocol.process.worker_spec import PAGE_TOKENS
from protocol.request import SamplingParams

# XTC ("exclude top choices") with ExLlamaV2's sampler. The package's own XTC kernel uses wrong indices in 0.3.2.
#
# By p-e-w (text-generation-webui, pull request 6335): with a given probability, every token at least as likely as the
# threshold is left out, except the least likely of these. As in that implementation, newlines and special tokens are
# never left out.


Draw = Callable[[float, int], tuple[int, Sequence[int], Sequence[float]]]
"""(random, n) -> (token, ids, probabilities). The token is the one at ``random`` of the cumulated probabilities, added
from the likeliest token on. The lists are the n likeliest ids and their probabilities, after all other filters. May be
called twice for the same logits."""
SCALE = 0.9998
"""The factor by which the sampler itself multiplies the random number."""


def draw_excluding_top(draw: Draw, random: float, threshold: float, protected: Collection[int]) -> int:
    """Return one of the tokens that XTC leaves: the one at ``random``, in [0, 1), of their cumulated probabilities.

    The sampler adds up probabilities from the likeliest token on. So a draw among the remaining tokens is the sampler's
    draw at a number that skips the share of the excluded tokens.
    """
    most = math.ceil(1 / threshold)
    _, ids, probs = draw(0.0, most)
    likely = [token for token, p in zip(ids, probs, strict=True) if p >= threshold and token not in protected]
    gone = set(likely[:-1])
    left = random * SCALE * (1 - sum(p for token, p in zip(ids, probs, strict=True) if token in gone))
    for token, p in zip(ids, probs, strict=True):
        if p > 0 and token not in gone:
            left -= p
            if left <= 0:
                return token
    token = draw(min((sum(probs) + left) / SCALE, 1.0), most)[0]
    return token if token not in gone else likely[-1]


# Pages of ExLlamaV2's cache: naming a full one, and giving one back, with the repairs that ``job`` lists.
#
# Importing this module imports exllamav2, so ``exllamav2.load`` must have imported the package before.


def complete_page(generator: Any, sequence: Any) -> None:
    """Name a full page by its tokens and all tokens before them, so that other jobs can use it. Begin the next
    page.

    The package does this, too, but fails an assertion if another job holds a page of that name that is not computed
    yet. In that case this job keeps its own page.
    """
    index = sequence.kv_position // PAGE_TOKENS - 1
    page = sequence.allocated_pages[index]
    before = sequence.allocated_pages[index - 1].phash if index else None
    name = _tensor_hash_checksum(
        sequence.sequence_ids.torch_slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS), before
    )
    same = generator.referenced_pages.get(name)
    if same is None:
        if name in generator.unreferenced_pages:
            generator.unreferenced_pages[name].clear()
        page.update_hash(name)
    elif same.kv_position == PAGE_TOKENS:
        serial = page.access_serial
        release(page)
        sequence.allocated_pages[index] = same
        sequence.block_index_tensor = None
        same.add_ref(serial)
    following = sequence.allocated_pages[index + 1]
    following.prev_hash = sequence.allocated_pages[index].phash
    following.can_revert = False


def release(page: Any) -> None:
    """Give back one reference to a page.

    If another page has taken this page's name, the package renames this page as if it began a text. Then this page is
    marked as empty, so that no prompt finds it by its tokens.
    """
    name = page.phash_revert if page.can_revert else page.phash
    page.sub_ref()
    if not page.ref_count and page.phash != name:
        page.kv_position = 0


NOT_NUMBERS = "the model's logits are not numbers"
UNLIKELY = 1e-30
"""A token drawn with a probability not above this is not valid: probabilities were not numbers, or underflowed."""


class AnswerJob(ExLlamaV2DynamicJob):  # type: ignore[misc]
    """One answer in the generator.

    After a step ``fresh`` and ``fresh_logprobs`` hold the tokens that it drew. ``ExLlamaV2Answer.take`` empties them.

    prompts      ids of the prompt, and of the negative prompt if there is guidance
    limit        tokens after which the answer ends
    minimum      tokens before which none of ``end_ids`` is drawn
    drawn        tokens of the answer that are part of the prompts; -1: the first draw heals the prompt. That token
                 belongs to the prompt and cannot end the answer
    returns      how often the answer has gone back (Draws.at)
    draft        tokens speculated per step, for which pages are reserved
    vocab        ids below this can be drawn
    first_bias   added to the logits of the first draw only, float32 [padded vocabulary]
    top          None, or how many of the likeliest tokens are reported with each token
    by_rule      whether draws follow ``gpu_draws.rule`` where it covers them, also those of the host
    sampling     parameters; those of exllamav2.cut and DRY are computed here
    breakers     sequence breakers of DRY (bool [vocab]), None without DRY
    mask         bits of the tokens that the constraint allows next; None if it allows all
    xtc          (probability, threshold, ids that are never left out), or None
    constraint   the answer's constraint (engines/constraint), at the position where the answer goes on
    scorer       computes log-probabilities of the prompt, from one sequence; None if the request does not ask for them
    begun        whether a token of the answer has been drawn here
    ended        why the answer has ended: "stop" (an end token), "length", or because of the constraint: COMPLETE,
                 FinishReason.BANNED if no token is left to draw, FAILED with ``failure``
    shortcut     whether the draw is greedy and only a bias changes the logits, so that no sampler is needed
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        settings: dict[str, Any],
        *,
        limit: int,
        end_ids: Sequence[int],
        vocab: int,
        minimum: int = 0,
        draft: int = 0,
        ngrams: bool = False,
        draws: Draws,
        returns: int = 0,
        identifier: int | None = None,
        drawn: int = 0,
        bias: TokenBias | None = None,
        first_bias: torch.Tensor | None = None,
        top: int | None = None,
        sampling: SamplingParams,
        breakers: np.ndarray[Any, Any] | None = None,
        by_rule: bool = False,
        xtc: tuple[float, float, Collection[int]] | None = None,
        constraint: AnyConstraint | None = None,
        scorer: PromptScorer | None = None,
    ) -> None:
        self.scorer = scorer
        self.bias, self.first_bias = bias, first_bias
        self.constraint = constraint
        self.failure: RequestError | None = None
        self.mask: Bits | None = None
        self.limits: torch.Tensor | None = None
        super().__init__(
            input_ids=[torch.tensor([ids], dtype=torch.long) for ids in prompts],
            max_new_tokens=limit - drawn + draft,
            min_new_tokens=0,
            max_skips=1 << 30,  # the engine decides which job goes first
            identifier=identifier,
            gen_settings=ExLlamaV2Sampler.Settings(**settings, token_bias=self._own_bias()),
        )
        sequence_ids = self.sequences[0].sequence_ids
        self.before_draw = (
            [BeforeDraw(sampling, self.gen_settings, vocab, breakers, lambda: sequence_ids.torch()[0].numpy())]
            if is_cut(sampling) or breakers is not None
            else None
        )
        self.draws, self.returns = draws, returns
        self.new_tokens = drawn
        self.limit, self.minimum, self.vocab, self.xtc = limit, minimum, vocab, xtc
        self.end_ids, self.end_list = frozenset(end_ids), list(end_ids)
        self.top = top
        self.past = NGrams(prompts[0]) if ngrams else None
        self.fresh: list[int] = []
        self.fresh_logprobs: list[DrawnToken] = []
        self.begun = returns > 0
        self.ended: str | None = None
        # The constraint and guidance change what is drawn, too: gpu_draws.tables.
        self.rule = rule_of(sampling, vocab) if by_rule and xtc is None and draws_by_rule(sampling) else None
        self._from = drawn
        # Where the package is not given the skew.
        self._bend = 1.0 if settings["skew"] else math.exp(-sampling.skew)
        self.greedy = settings["top_k"] == 1
        self.shortcut = (
            self.greedy
            and settings["token_repetition_penalty"] == 1.0
            and breakers is None
            and settings["cfg_scale"] is None
        )
        self._drawn = np.array([[prompts[0][-1]]], np.int64)
        self._drawn_tensor = torch.from_numpy(self._drawn)
        self._logprob: DrawnToken | None = None

    def limit_draw(self) -> None:
        """Limit the next draw to the tokens that the constraint allows. Raises RequestError if the constraint is too
        costly."""
        self.gen_settings.token_bias = self._own_bias()
        self.mask = None if self.constraint is None or self.constraint.free else self.constraint.bits

    def _limit_by_host(self, mask: Bits, padded: int) -> None:
        """Make the mask a bias of the next draw, from ``padded`` logits."""
        if self.limits is None:
            self.limits = torch.empty(padded)
        write_bias(mask, self.limits.numpy())
        by_rule = self.rule is not None and not self.shortcut  # the rule adds penalties by itself
        own = None if self.bias is None else self.bias.base if by_rule else self.bias.tensor
        for bias in (self.first_bias, own):
            if bias is not None:
                self.limits += bias
        self.gen_settings.token_bias = self.limits

    def _own_bias(self) -> torch.Tensor | None:
        """Return what the request itself adds to the logits of the next draw."""
        own = None if self.bias is None else self.bias.tensor
        if self.first_bias is None:
            return own
        return self.first_bias if own is None else self.first_bias + own

    def can_draw(self) -> bool:
        """Return whether the next draw has a token left."""
        bias, short = self.gen_settings.token_bias, 0 <= self.new_tokens < self.minimum
        if bias is None and not short:
            return self.mask is None or bool(self.mask.any())
        left = np.ones(self.vocab, np.bool_) if bias is None else bias.numpy()[: self.vocab] > NEVER
        if short:
            left[self.end_list] = False
        if self.mask is not None:
            left &= np.unpackbits(self.mask, count=self.vocab, bitorder="little").view(np.bool_)
        return bool(left.any())

    # --- drawing

    def receive_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, None, None, None, bool]:
        """Draw from float32 logits [sequences, 1, padded vocabulary]. May run on a thread of the generator's pool."""
        raw = logits[0, 0, : self.vocab].clone() if self.top is not None else None
        if self.mask is not None:
            self._limit_by_host(self.mask, logits.shape[-1])
        if self.shortcut:
            token = self._likeliest(logits)
        else:
            token = self._sampled(logits) if self.rule is None else draw_by_rule(self, logits)
        self._drawn[0, 0] = token
        if raw is not None:
            self._logprob = _logprob(raw, token, self.top or 0)
        return self._drawn_tensor, None, None, None, False

    def _likeliest(self, logits: torch.Tensor) -> int:
        """Return the greedy token where only a bias changes the logits. Takes a third of the sampler's time."""
        row = logits.numpy()[0, 0, : self.vocab]
        bias = self.gen_settings.token_bias
        if bias is not None:
            row += bias.numpy()[: self.vocab]
        if 0 <= self.new_tokens < self.minimum:
            row[self.end_list] = NEVER
        token = int(row.argmax())  # a NaN counts as highest
        if row[token] != row[token]:
            raise RuntimeError(NOT_NUMBERS)
        return token

    def _sampled(self, logits: torch.Tensor) -> int:
        if self.greedy and math.isnan(float(logits[:, :, : self.vocab].max())):
            raise RuntimeError(NOT_NUMBERS)  # the kernel would index with what is on its stack
        # A greedy draw gives the same token at every point.
        point = 0.0 if self.greedy else self.draws.at(self.new_tokens, returns=self.returns) ** self._bend
        if self.xtc is not None and self.draws.at(self.new_tokens, which=1, returns=self.returns) < self.xtc[0]:
            _, threshold, protected = self.xtc
            return draw_excluding_top(
                lambda at, top: self._sample(logits.clone(), at, top), point, threshold, protected
            )
        return self._sample(logits, point)[0]

    def _sample(self, logits: torch.Tensor, point: float, top: int = 0) -> tuple[int, list[int], list[float]]:
        drawn, top_ids, top_probs, prob, _ = ExLlamaV2Sampler.sample(
            logits,
            self.gen_settings,
            self.sequences[0].sequence_ids.torch(),
            point,
            self.generator.tokenizer,
            return_top_tokens=top,
            filters=self.before_draw,
            blocked_tokens=self.end_list if 0 <= self.new_tokens < self.minimum else None,
        )
        token = int(drawn)
        if not float(prob) > UNLIKELY or token >= self.vocab:
            # Powers of probabilities underflow at low temperatures, and penalties divide by almost nothing. Then only
            # the top of the distribution is left.
            row, bias = logits[0, 0, : self.vocab], self.gen_settings.token_bias
            if bias is not None:
                row = row.masked_fill(bias[: self.vocab] == NEVER, NEVER)
            token = int(row.argmax())
            if math.isnan(float(row[token])):
                raise RuntimeError(NOT_NUMBERS)
        return token, top_ids[0, 0].tolist() if top else [], top_probs[0, 0].tolist() if top else []

    # --- after a draw

    def receive_sample(
        self, logits: Any, next_token: torch.Tensor, k_tokens: Any, k_probs: Any, prob: Any, filter_eos: Any,
        results: list[Any], first_sample_in_sd_batch: bool = True,
    ) -> tuple[bool, torch.Tensor]:  # fmt: skip
        """Take the drawn token. Return (whether the answer has ended, the token). Once a step, add this job to
        ``results``."""
        token = int(self._drawn[0, 0])
        if not self.fresh:
            results.append(self)
        self.fresh.append(token)
        self.new_tokens += 1
        self.begun = True
        for sequence in self.sequences:
            sequence.sequence_ids.append(next_token)
            sequence.kv_position += 1
            if not sequence.kv_position % PAGE_TOKENS:
                complete_page(self.generator, sequence)
        if self._logprob is not None:
            self.fresh_logprobs.append(self._logprob)
        if self.bias is not None and self.bias.counts:
            self.bias.count(token)
        if self.first_bias is not None:
            self.first_bias = None
            self.gen_settings.token_bias = self.bias.tensor if self.bias else None
        if self.past is not None:
            self.past.push(token)
        if token in self.end_ids and self.new_tokens:
            self.ended = "stop"
        elif self.constraint is not None:
            self.ended = self._constrained(self.constraint, token)
        elif self.new_tokens >= self.limit:
            self.ended = "length"
        return self.ended is not None, next_token

    def _constrained(self, constraint: AnyConstraint, token: int) -> str | None:
        """Return why the answer ends behind its newest token. If it does not end, limit the next draw and return
        None."""
        try:
            constraint.push(token)
            if constraint.finished:
                return COMPLETE
            if self.new_tokens >= self.limit:
                return "length"
            self.limit_draw()
            if self.can_draw():
                return None
            return COMPLETE if constraint.accepting else FinishReason.BANNED
        except RequestError as e:
            self.failure = e
            return FAILED

    # --- what the generator asks at every step

    def is_prefill_done(self) -> bool:
        for sequence in self.sequences:  # noqa: SIM110 - called five times a step
            if sequence.kv_position != sequence.sequence_ids.seq_len - 1:
                return False
        return True

    def get_input_ids_list(
        self, draft_tokens: torch.Tensor | None = None, idx: int = 0, add_to_cache: bool = False
    ) -> list[torch.Tensor]:
        """Return the next input ids, with fewer tensors than the package where one sequence gets one token."""
        sequence = self.sequences[0]
        if draft_tokens is not None or len(self.sequences) > 1:
            inputs: list[torch.Tensor] = super().get_input_ids_list(draft_tokens, idx, add_to_cache)
            return inputs
        if add_to_cache:
            page = sequence.allocated_pages[sequence.kv_position // PAGE_TOKENS]
            assert page.ref_count == 1
            page.sequence.numpy()[0, page.kv_position] = self._drawn[0, 0]
            page.kv_position += 1
            page.can_revert = False
        # The last token of the prompt; after the first draw, the token drawn last.
        return [self._drawn_tensor]

    # --- what the decode loop asks

    def begun_here(self, place: int) -> bool:
        """Return whether the token of this place follows another one that this job drew."""
        return place > self._from

    def takes(self, token: int) -> bool:
        """Return whether a token stays that the GPU drew while the constraint was dormant, or seemed to be."""
        constraint = self.constraint
        return constraint is None or (constraint.dormant and constraint.takes(token))

    def note_logprob(self, drawn: DrawnToken) -> None:
        """Note the log-probabilities of the token that is taken next."""
        self._logprob = drawn

    def last_tokens(self) -> list[int]:
        """Return the newest token of each sequence: the next step's input."""
        if len(self.sequences) == 1:
            return [int(self._drawn[0, 0])]
        return [int(sequence.sequence_ids.torch_slice(sequence.kv_position, None)[0, 0]) for sequence in self.sequences]

    @property
    def drawn_tensor(self) -> torch.Tensor:
        return self._drawn_tensor

    def set_drawn(self, token: int) -> None:
        """Note the token that was drawn on the GPU, for ``receive_sample``."""
        self._drawn[0, 0] = token

    def claim_last(self) -> None:
        """Count the keys of the newest token as computed. Call this once the step that computes them has been read."""
        for sequence, token in zip(self.sequences, self.last_tokens(), strict=True):
            page = sequence.allocated_pages[sequence.kv_position // PAGE_TOKENS]
            page.sequence.numpy()[0, page.kv_position] = token
            page.kv_position += 1

    # --- pages

    def prepare_for_queue(self, generator: Any, serial_number: int) -> None:
        super().prepare_for_queue(generator, serial_number)
        # The package's text and results are not made here. These tensors for them would take half a megabyte per
        # thousand ids of vocabulary.
        self.held_tokens = self.held_k_tokens = self.held_k_probs = self.held_probs = self.held_logits = None

        if self.scorer is not None:
            self._own_pages(self.scorer.place // PAGE_TOKENS)

    def _own_pages(self, first: int) -> None:
        """Give the prompt's full pages from this one on names that no other prompt has.

        So they are not found in the cache: their places are computed again. And nobody else reads or writes them.
        """
        sequence = self.sequences[0]
        shared = sequence.page_hashes[:first]
        own = [os.urandom(len(name)) for name in sequence.page_hashes[first:]]
        sequence.page_hashes = shared + own
        self.all_unique_hashes = [*dict.fromkeys(shared), *own]

    def prefill(self, results: list[Any]) -> None:
        """Compute the next chunk of the prompt, and its log-probabilities if they are wanted."""
        scorer, generator, sequence = self.scorer, self.generator, self.sequences[0]
        chunk = generator.max_chunk_size
        if scorer is None or sequence.prefill_complete:
            super().prefill(results)
            return
        own = scorer.place // PAGE_TOKENS * PAGE_TOKENS
        if sequence.kv_position >= own:
            self._prefill_scored(scorer, sequence, results)
            return
        generator.max_chunk_size = min(chunk, own - sequence.kv_position)
        try:
            super().prefill(results)
        finally:
            generator.max_chunk_size = chunk

    def _prefill_scored(self, scorer: PromptScorer, sequence: Any, results: list[Any]) -> None:
        """Compute the next chunk of a sequence with own pages, as the package does, but take nothing from the cache."""
        generator, total = self.generator, len(sequence.sequence_ids) - 1
        begin = sequence.kv_position
        end = min((begin + generator.max_chunk_size) // PAGE_TOKENS * PAGE_TOKENS, total)
        if end > begin:
            ids = sequence.sequence_ids.torch_slice(begin, end)
            pages = self.get_block_index(sequence, end).unsqueeze(0)
            params = generator.get_paged_params(1, pages, torch.tensor([begin], dtype=torch.int32), end - begin)
            if generator.draft_model:
                generator.draft_model.forward_chunk(
                    input_ids=ids, preprocess_only=True, attn_params=params, cache=generator.draft_cache
                )
            scorer.read(generator.model, ids, begin, generator.cache, params, generator.current_loras)
            sequence.kv_position = end
            for index in range(begin // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
                page, start = sequence.allocated_pages[index], index * PAGE_TOKENS
                page.prev_hash = sequence.allocated_pages[index - 1].phash if index else None
                page.kv_position = min(end - start, PAGE_TOKENS)
                first = max(begin - start, 0)
                page.sequence[:, first : page.kv_position].copy_(
                    sequence.sequence_ids.torch_slice(start + first, start + page.kv_position)
                )
                page.can_revert = False
            following = end // PAGE_TOKENS
            if not end % PAGE_TOKENS and following < len(sequence.allocated_pages):  # the first draw begins this page
                page = sequence.allocated_pages[following]
                page.kv_position, page.can_revert = 0, False
                page.prev_hash = sequence.allocated_pages[following - 1].phash
            progress = {"curr_progress": end, "max_progress": total, "serial": self.serial_number}
            results.append({"job": self, "stage": "prefill", "eos": False, "identifier": self.identifier, **progress})
        sequence.prefill_complete = sequence.kv_position >= total

    def unread(self) -> int:
        """Return how many tokens of the prompts have still to be computed. Tokens in the cache are not counted."""
        pages = self.generator.referenced_pages, self.generator.unreferenced_pages
        left = 0
        for sequence in self.sequences:
            known = sequence.kv_position
            for name in sequence.page_hashes[known // PAGE_TOKENS :]:
                page = pages[0].get(name) or pages[1].get(name)
                if page is None or page.kv_position < PAGE_TOKENS:
                    break
                known += PAGE_TOKENS
            left += max(len(sequence.sequence_ids) - 1 - known, 0)
        return left

    def allocate_pages(self) -> None:
        """Take the pages of the prompts and answers. What has to be given up for them is chosen by ``victims``."""
        generator, idle = self.generator, self.generator.unreferenced_pages
        names, wanted = set(), 0
        for sequence in self.sequences:
            names.update(sequence.page_hashes)
            wanted += sequence.new_unique_pages
            generator.victim_rule.use(sequence.page_hashes, sequence.new_unique_pages)
        wanted += sum(name not in idle and name not in generator.referenced_pages for name in names)
        held = [Held(page.phash, page.prev_hash, page.access_serial, page.kv_position) for page in idle.values()]
        chosen = victims(held, generator.referenced_pages, names, wanted, newest=generator.victim_rule.newest)
        # The package takes the pages with the lowest numbers.
        pages = [(idle[page.name], page.used) for page in chosen]
        for number, (page, _) in enumerate(pages):
            page.access_serial = number - len(pages)
        super().allocate_pages()
        for page, used in pages:
            if not page.ref_count:
                page.access_serial = used
            elif page.can_revert:
                page.access_serial_revert = used
        for sequence in self.sequences:
            full = len(sequence.page_hashes)
            if full:  # the package leaves None, which means the start of a text, if all pages before are in the cache
                sequence.allocated_pages[full].prev_hash = sequence.page_hashes[-1]

    def deallocate_pages(self) -> None:
        for sequence in self.sequences:
            pages = sequence.allocated_pages or []
            for index in range(len(sequence.page_hashes), len(pages)):
                page, known = pages[index], max(sequence.kv_position - index * PAGE_TOKENS, 0)
                if page.kv_position > known and not page.can_revert:
                    page.kv_position = known
            for page in pages:
                release(page)
            sequence.allocated_pages = []


def _logprob(raw: torch.Tensor, token: int, top: int) -> DrawnToken:
    total = float(raw.logsumexp(0))
    values, ids = raw.topk(min(top, len(raw)))
    likeliest = zip(ids.tolist(), (values - total).tolist(), strict=True)
    return DrawnToken(token, float(raw[token]) - total, tuple(likeliest))
