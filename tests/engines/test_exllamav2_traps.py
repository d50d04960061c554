"""The traps of ExLlamaV2 0.3.2, the defence against each, and the test that fails without the defence.

The package is archived, so its faults will not be corrected. Modules are in model_worker/engines, tests in
tests/engines. The traps of loading (architectures, rope, splits, flash-attn, adapters, the CUDA build) are tested in
test_load_errors and test_exllamav2_load*.
P = test_exllamav2_pages, G = ..._generating, B = ..._batch, A = ..._answers, K = ..._kernels,
M = ..._mixture and ..._mixture_gpu, L = ..._limits and ..._limits_gpu, S = test_engine_suite.

================================================================  ==============================  ====================
trap                                                              defence                         test
================================================================  ==============================  ====================
keys and values
the page behind a prompt found whole in the cache has no          exllamav2.job.allocate_pages    P ..found_whole_in..
predecessor: found again as the start of another text
what was speculated behind an answer's end stays claimed          exllamav2.job.deallocate_pages  P ..speculated..
a page renamed when given back keeps its claim                    exllamav2.job._release          P ..loses_its_name..
a page completed while another job is to compute it: assertion    exllamav2.job._complete_page    P ..completed_while..
rewinding a shared page (its own banned strings)                  exllamav2.answer: a new job     A ..led_away_from..
an exception in iterate leaves keys unwritten count as cached     not caught: the process ends    G ..not_survived
keys of another sequence, whatever the jobs do                    all of these                    P test_random_jobs
layers
128 experts, 2 to 4 rows: only those that row 0 chose compute     exllamav2.mixture               M ..never_fused..
routing that is no number: kernels index with -1                  none needed: its own row only   M ..spares_the_others
experts' weights are scaled to a sum of 1, asked for or not       refused by name                 L ..add_up_to_one
quantized MLPs of 64 n + 32 columns: the last 32 lack activation  refused by name                 L ..activated
norms of heads of other than 64, 128, 192 or 256 elements         refused by name                 L ..whole_warp..
norms of vectors of more than 32768 elements: no kernel runs      refused by name                 L ..without_a_norm
2**31 elements of a chunk, logits or a quantized cache            refused by name                 L ..cannot_count
chunks of 65536 tokens: the norm of heads is not launched         refused by name                 L ..cannot_count
block sizes are tuned under a key that mixes rows and vocabulary  none needed: both are right     L ..are_tuned
layer norms: a warp may overwrite sums that another reads         none; looked for                L ..layer_norms..
norms make numbers of NaN                                         none: known                     L ..of_what_is_none
drawing
top_p drops likely tokens and goes on with unlikely ones          exllamav2.cut                   K ..top_p_drops..
top_a, min_p write behind their buffers where all tokens pass     exllamav2.cut                   G settings, K
DRY stalls all streams for seconds behind a long prompt, and      exllamav2.dry                   K ..dry..
penalizes nothing where the repeat is longer than 20 tokens
XTC compares each token with its neighbour                        exllamav2.xtc                   G test_xtc..
no token left, or a NaN: greedy indexes with what is on the stac  admission, exllamav2.job        G ..refused_by_name,
                                                                                                  G ..no_numbers..
defaults are not neutral                                          exllamav2.sampling              G ..given_and_neutral
settings keep state (mirostat, DRY)                               new ones for each job           G ..reach_another
frequency and presence penalty count the prompt                   TokenBias                       G ..answer_penalties..
a bias of the step is not updated between speculated tokens       TokenBias in receive_sample     G ..answer_penalties..
0 < dry_range <= 20: assertion in the middle of a step            the package's DRY is not used  K ..dry..
ids beyond the vocabulary                                         admission                       G ..refused_by_name
top_k_probs are those after the filters, logits after penalties   logprobs before anything        G ..logprobs..
guidance: -inf in both sequences is NaN                           bias behind the mix             G ..whatever_the_way
guidance with speculation, with healing; a pair that cannot star  refused by name                 G ..guidance.., pair
ends
no end token is implied; only the first of several is kept        end_ids of all                  G ..minimum.., S
text held at a stop token is dropped                              text is made here               test_text_held..
an empty stop string holds the answer for ever; which of two      StopMatcher                     test_empty_stop.., S
that overlap is found depends on the hash seed
speculation ends the answer num_draft_tokens early                AnswerJob.limit                 G ..maximum..
... and needs pages and positions behind the end                  pages_needed, capabilities      G ..positions..
positions beyond the tables are read                              capabilities.context            G ..positions..
n-gram speculation of fewer than three tokens: IndexError         exllamav2.ngram                 G ..too_short..
suppressed tokens of banned strings stay in token_ids             exllamav2.answer                A ..led_away_from..
scheduling
every new prompt computes a chunk in every step                   Batch.start                     B ..crowd_of_long..
four small jobs pass a large one, then all wait                   Batch.PASSES                    B ..passed_by_small..
max_skips None raises in iterate                                  given                           B (all)
a pending job holds half a megabyte per thousand ids              prepare_for_queue               test_waiting_jobs..
oversize jobs pass the check (python -O) or wait for ever         _check_pages; -O refused        B ..more_pages..
moving pages recurses once per page of a text                     Batch._defragment_when_idle     B ..very_long_text..
pages are moved at the end of any step that empties the generato  Batch._defragment_when_idle     B ..never_idle..
the async wrapper, several threads, a busy loop when idle         not used; step() is [] at once  S
prefill without causality where flash-attn is missing             paged only                      test_paged..
================================================================  ==============================  ====================
"""

from unittest import mock

import numpy as np
import pytest

from tests.engines.exllamav2_cpu.harness import VOCAB, Harness
from tests.engines.exllamav2_cpu.oracle import OracleLogits

PROMPT = list(range(40, 60))


def scripted(h: Harness, ids: list[int]) -> "mock._patch[object]":
    """Return logits with which the model wants these tokens after PROMPT."""

    def logits(prefix: np.ndarray[object, np.dtype[np.int64]]) -> np.ndarray[object, np.dtype[np.float32]]:
        row = np.zeros(VOCAB, np.float32)
        row[[*ids, 2][min(len(prefix) - len(PROMPT), len(ids))]] = 9.0
        return row

    return mock.patch.object(OracleLogits, "__call__", side_effect=logits)


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_text_held_at_an_end_token_is_delivered(speculate: str | None) -> None:
    h = Harness(speculate=speculate)
    ids = h.engine.encode(" 10 11")
    with scripted(h, ids):
        outcome = h.answer(PROMPT, 40, stop=("11 12",))
        assert (outcome.text, outcome.reason) == (" 10 11", "stop")
        half = h.engine.encode("é")[:1]
    with scripted(h, [*ids, *half]):
        outcome = h.answer(PROMPT, 40)
        assert outcome.text == h.engine.decode([*ids, *half])
        assert outcome.ids == [*ids, *half, 2]


def test_empty_stop_strings_are_ignored() -> None:
    h = Harness()
    outcome = h.answer(PROMPT, 20, stop=("",))
    assert outcome.ids == h.expected(outcome)
    assert len(outcome.deltas) > 10


def test_waiting_jobs_hold_no_logits() -> None:
    h = Harness(batch=1)
    h.submit(PROMPT, 200)
    waiting = h.submit(PROMPT, 200)
    h.driver.step()
    handle = h.engine._answers[waiting.job.id].handle
    assert h.engine.stats().pending == 1
    assert handle.held_logits is handle.held_k_probs is handle.held_tokens is None


def test_paged_attention_is_used_always() -> None:
    assert Harness().generator.paged is True


def test_greedy_draws_take_no_threads() -> None:
    h = Harness(batch=8)
    for _ in range(8):
        h.submit(PROMPT, 20)
    with mock.patch.object(h.generator.sampling_pool, "submit", side_effect=AssertionError("a thread")):
        h.driver.run()
