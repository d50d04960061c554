"""Draws by the kernels and by the reference. ``python -m tests.engines.draw_cases`` compares them in this process.

It prints the seed. TEST_SEED repeats a run.
"""

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from model_worker.engines.draw_rule import reference
from model_worker.engines.draw_rule.batched import BatchedDraws
from model_worker.engines.draw_rule.batched_logprobs import BatchedLogprobs
from model_worker.engines.draw_rule.rule import Rule
from model_worker.engines.exllamav2.sampling import TokenBias
from protocol.request import SamplingParams
from tests.engines.test_draw_kernels import SETTINGS

EOS = 2


def seed() -> int:
    return int(os.environ.get("TEST_SEED") or random.randrange(1 << 32))


def some_logits(rng: np.random.Generator, rows: int, vocab: int, device: str) -> torch.Tensor:
    """Return fp16 logits [rows, padded vocabulary]: flat rows, peaked rows, many equal values, all equal."""
    padded = -(-vocab // 32) * 32
    x = rng.normal(0, 1, (rows, padded)) * rng.choice([0.01, 0.5, 2.0, 3.0, 8.0], (rows, 1))
    for row in range(rows):
        kind = rng.integers(8)
        if kind == 0:
            x[row] = np.round(x[row])
        elif kind == 1 and rows > 1:
            x[row] = 1.5
        elif kind == 2 and rows > 1:
            x[row, rng.integers(vocab) :] = -np.inf
    x[:, vocab:] = 60000  # never drawn
    x[:, rng.integers(vocab)] = 1.0
    return torch.from_numpy(x).to(device, torch.float16)


def steps_of(points: np.ndarray[Any, Any], slots: Sequence[int]) -> torch.Tensor:
    """Return the step tensors [launches, rows, 4] of points [rows, launches]."""
    step = np.zeros((*points.T.shape, 4), np.int64)
    step[..., 0] = slots
    step[..., 1] = (points.T.astype(np.uint64) << np.uint64(11)).view(np.int64)
    return torch.from_numpy(step)


def many_draws(
    rng: np.random.Generator, rows: int, vocab: int, sampling: SamplingParams, draws: int, device: str, **options: int
) -> None:
    """Draw ``draws`` times in all and assert that kernels and reference agree on each token."""
    logits = some_logits(rng, rows, vocab, device)
    drawing = BatchedDraws(rows, logits.shape[1], vocab, (EOS,), device, **options)
    slots = [drawing.assign(sampling) for _ in range(rows)]
    launches = -(-draws // rows)
    points = rng.integers(0, 1 << 53, (rows, launches))
    points[:, 0], points[:, -1] = 0, (1 << 53) - 1
    at_once = min(launches, 500)
    steps = steps_of(points, slots)
    step = steps[:at_once].to(device)
    ids = torch.zeros(at_once, rows, dtype=torch.int64, device=device)
    states = torch.zeros(at_once, rows, dtype=torch.int32, device=device)

    def launch_all() -> None:
        for i in range(at_once):
            drawing.launch(logits, rows, step[i], ids[i], states[i])

    replay = launch_all
    if device == "cuda":
        drawing.launch(logits, rows, step[0], ids[0], states[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_all()
        replay = graph.replay
    found = []
    for start in range(0, launches, at_once):
        chunk = steps[start : start + at_once]
        step[: len(chunk)].copy_(chunk)
        replay()
        found.append(ids[: len(chunk)].cpu().numpy().copy())
        assert not states.any()
    x, rule = logits.float().cpu().numpy()[:, :vocab], Rule.of(sampling, vocab)
    if rule.greedy:
        expected = np.broadcast_to(x.argmax(-1)[:, None], points.shape)
    else:
        expected = reference.Candidates(x, rule).at(points)
    different = np.argwhere(expected != np.concatenate(found).T)
    assert not len(different), f"{len(different)} of {points.size} differ, first row and launch: {different[0]}"


def one_request(rng: random.Random, vocab: int) -> SamplingParams:
    ids = range(vocab)
    return SamplingParams.model_construct(
        temperature=rng.choice([0.0, 1.0, 0.5, 3.0]), top_k=rng.choice([0, 0, 3, 20]), top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.02]), smoothing_factor=rng.choice([0.0, 0.0, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.7]), penalty_range=rng.choice([-1, 0, 5]),
        repetition_decay=rng.choice([0, 4]), frequency_penalty=rng.choice([0.0, 0.4, -0.3]),
        presence_penalty=rng.choice([0.0, 0.7]), logit_bias=rng.choice([None, {3: 5.0, 7: -2.5}]),
        banned_tokens=rng.choice([(), (0, 5)]), allowed_tokens=rng.choice([(), tuple(rng.sample(ids, 20))]),
        ignore_eos=rng.random() < 0.2,
    )  # fmt: skip


def answers(number: int, vocab: int, rows: int, steps: int, device: str, **options: int) -> None:
    """Draw short answers with all penalties, biases and limits in one batch. Assert that each token is that of the
    reference, drawn alone, and that slots which are used again hold nothing of their former requests."""
    rng, numbers = random.Random(number), np.random.default_rng(number)
    padded = -(-vocab // 32) * 32
    drawing = BatchedDraws(rows, padded, vocab, (EOS,), device, **options)
    for _ in range(2):
        requests = [one_request(rng, vocab) for _ in range(rows)]
        prompts = [[rng.randrange(vocab) for _ in range(rng.randrange(12))] for _ in range(rows)]
        texts: list[list[int]] = [[] for _ in range(rows)]
        ends = [(EOS, rng.randrange(vocab)) for _ in range(rows)]
        slots = [
            drawing.assign(request, prompt=prompt, end_ids=end)
            for request, prompt, end in zip(requests, prompts, ends, strict=True)
        ]
        biases = [TokenBias.of(request.model_copy(update=NO_COUNTS), padded, (EOS,)) for request in requests]
        for step in range(steps):
            order = rng.sample(range(rows), rows)
            x = some_logits(numbers, rows, vocab, device)
            allowed = numbers.random((rows, vocab)) < 0.7
            points = [rng.getrandbits(53) for _ in range(rows)]
            limited = [rng.random() < 0.3 for _ in range(rows)]
            for row, job in enumerate(order):
                if limited[row]:
                    drawing.set_limit(slots[job], np.packbits(allowed[row], bitorder="little"))
                drawing.set_row(
                    row, slots[job], points[row], len(prompts[job]) + len(texts[job]), too_short=step < 2,
                    limited=limited[row],
                )  # fmt: skip
            drawing.send()
            drawing.launch(x, rows)
            for row, job in enumerate(order):
                rule = Rule.of(requests[job], vocab)
                logits = x[row, :vocab].float().cpu().numpy()
                if rule.repeats:
                    last = np.zeros(vocab, np.int32)
                    for place, token in enumerate(prompts[job] + texts[job]):
                        last[token] = place + 1
                    logits = reference.penalized(logits, rule, last, len(prompts[job]) + len(texts[job]))
                bias, count = biases[job], np.bincount(texts[job], minlength=vocab) if rule.counts else None
                logits = reference.biased(logits, rule, bias.tensor.numpy()[:vocab] if bias else None, count)
                if step < 2:
                    logits = reference.limited(logits, np.isin(np.arange(vocab), ends[job]))
                if limited[row]:
                    logits = reference.limited(logits, ~allowed[row])
                expected, state = reference.draw(logits[None], rule, np.array([points[row]]))
                where = f"seed {number}, step {step}, {requests[job]!r}"
                assert int(drawing.states[row]) == state[0], where
                assert int(drawing.ids[row]) == expected[0], where
                if state[0] == reference.OK:
                    texts[job].append(int(expected[0]))
        for slot in slots:
            drawing.release(slot)


NO_COUNTS = {"frequency_penalty": 0.0, "presence_penalty": 0.0}


def odd_rows(device: str) -> None:
    """NaN, infinities and rows with nothing left."""
    x = torch.full((5, 96), 1.0)
    x[0, 50] = float("nan")
    x[1] = float("-inf")
    x[2, 40] = x[2, 30] = float("inf")
    x[3], x[3, 95] = float("-inf"), -3.0
    for fields in ({}, {"temperature": 0.0}, {"top_p": 0.9}):
        sampling = SamplingParams(**fields)
        drawing = BatchedDraws(5, 96, 96, (EOS,), device, room=16)
        for row in range(5):
            drawing.set_row(row, drawing.assign(sampling), 1 << 52)
        drawing.send()
        drawing.launch(x.half().to(device), 5)
        ids, states = reference.draw(x.numpy(), Rule.of(sampling, 96), np.full(5, 1 << 52))
        assert drawing.ids.tolist() == ids.tolist(), fields
        assert drawing.states.tolist() == states.tolist() == [1, 2, 0, 0, 0]


def log_probabilities(rng: np.random.Generator, rows: int, vocab: int, device: str) -> None:
    """Compare log-probabilities with PyTorch's, and the likeliest ids with an exact order."""
    logits = some_logits(rng, rows, vocab, device)
    computed = BatchedLogprobs(rows, vocab, device)
    wanted = [int(n) for n in rng.choice([-1, 0, 1, 20], rows)]
    wanted[0] = 20
    computed.wanted.copy_(torch.tensor(wanted))
    drawn = torch.from_numpy(rng.integers(0, vocab, rows)).to(device)
    computed.launch(logits, rows, drawn)
    x = logits[:, :vocab].float().cpu()
    expected = x.log_softmax(-1)
    for row, n in enumerate(wanted):
        if n < 0:
            continue
        own = expected[row, int(drawn[row])]
        torch.testing.assert_close(computed.own[row].cpu(), own, atol=1e-4, rtol=1e-5)
        ids = np.lexsort((np.arange(vocab), -x[row].numpy()))[:n]
        finite = x[row].numpy()[ids] > -np.inf
        assert (computed.ids[row, :n].cpu().numpy() == ids)[finite].all()
        torch.testing.assert_close(computed.values[row, :n].cpu(), expected[row][ids], atol=1e-4, rtol=1e-5)


def main() -> None:
    """Compare in this process, in Triton's interpreter if TRITON_INTERPRET is set."""
    begun = seed()
    print(f"TEST_SEED={begun}", flush=True)
    rng = np.random.default_rng(begun)
    odd_rows("cpu")
    for vocab in (96, 5000):
        log_probabilities(rng, 4, vocab, "cpu")
    for fields in SETTINGS:
        for vocab in (96, 1000):
            many_draws(rng, 2, vocab, SamplingParams(**fields), 4, "cpu", room=16)
    many_draws(rng, 2, 512, SamplingParams(top_k=40), 2, "cpu", room=128)
    many_draws(rng, 2, 5000, SamplingParams(top_p=0.9), 2, "cpu", room=16)
    for number in range(begun, begun + 3):
        answers(number, 96, 4, 3, "cpu", room=16)
    print("all equal")


if __name__ == "__main__":
    main()
