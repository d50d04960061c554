"""Rows of logits and settings to draw from, and the comparison of the kernels with the rule's reference.

``python -m tests.engines.draw_cases SEED`` runs the kernels on the CPU in Triton's interpreter, which must be switched
on before they are imported: TRITON_INTERPRET=1.
"""

import sys
from typing import Any

import numpy as np
import torch

from model_worker.engines.exllamav2.gpu_draws.batched import BatchedDraws, RowDraw, write_words
from model_worker.engines.exllamav2.gpu_draws.rule import (
    DrawRule,
    aim_of,
    candidates_of,
    draw,
    penalised,
    rule_of,
    weights_of,
)
from model_worker.engines.exllamav2.gpu_draws.sizes import MOST, WORDS
from protocol.request import SamplingParams

Array = np.ndarray[Any, Any]

POINT_WORD = 8
"""The first of a row's two words that hold its point, see gpu_draws.kernels."""
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 3.0},
    "smoothed": {"temperature": 0.8, "smoothing_factor": 0.3},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "top_k 1 to 3": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_a": {"temperature": 1.0, "top_a": 0.2},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "min_p of all": {"temperature": 1.0, "min_p": 1.0},
    "all cuts": {"temperature": 1.3, "top_k": 60, "top_p": 0.95, "top_a": 0.05, "min_p": 0.02},
    "repetition": {"temperature": 0.9, "repetition_penalty": 1.3, "penalty_range": 20, "repetition_decay": 15},
    "penalties": {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "flat top_p": {"temperature": 5.0, "top_p": 0.95},
    "typical": {"temperature": 1.0, "typical_p": 0.7},
    "typical after cuts": {"temperature": 1.3, "top_k": 60, "top_p": 0.97, "typical_p": 0.5},
    "flat typical": {"temperature": 4.0, "min_p": 0.0001, "typical_p": 0.95},
    "flat cuts": {"temperature": 3.0, "top_k": 400, "top_p": 0.98, "top_a": 0.001, "min_p": 0.001},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "greedy under masks": {"temperature": 0},
    "plain under masks": {"temperature": 1.0},
    "top_p under masks": {"temperature": 1.0, "top_p": 0.9},
    "typical under masks": {"temperature": 1.0, "typical_p": 0.8},
    "penalties under masks": {"temperature": 0.7, "top_k": 30, "frequency_penalty": 0.4, "presence_penalty": 0.3},
}


def parameters(setting: str) -> SamplingParams:
    return SamplingParams.made(**SETTINGS[setting])


def rows_of(rng: np.random.Generator, count: int, vocab: int) -> Array:
    """Return fp16 logits [count, vocab]: peaked, flat, with many equal values, with -inf, and all equal."""
    rows = rng.normal(size=(count, vocab)).astype(np.float32)
    for number, row in enumerate(rows):
        kind = number % 8
        if kind < 3:
            row *= (1.0, 3.0, 8.0)[kind]
        elif kind == 3:
            row[:] = rng.integers(0, 4, vocab)
        elif kind == 4:
            row[rng.random(vocab) < 0.9] = -np.inf
            row[rng.integers(vocab)] = 1.0
        elif kind == 5:
            row[:] = 2.5
        elif kind == 6:
            row[:] = -np.inf
            row[rng.integers(vocab)] = -3.0
        else:
            row *= 0.01
            row[rng.integers(vocab, size=3)] += 9.0
    halves: Array = rows.astype(np.float16)
    return halves


def masks_of(rng: np.random.Generator, logits: Array) -> Array:
    """Return bool [rows, vocab]: rows with no mask (none set), with one token, with few, and with nearly all. Each mask
    has a token whose logit is a number."""
    masks = np.zeros(logits.shape, np.bool_)
    for number, (row, mask) in enumerate(zip(logits, masks, strict=True)):
        possible = np.flatnonzero(np.isfinite(row))
        if number % 4:
            mask[:] = rng.random(len(mask)) < (0, 0.02, 0.98)[number % 4 - 1]
            mask[rng.choice(possible)] = True
            mask[-1] = number % 8 > 4 or mask[-1]
    return masks


def compare(device: str, setting: str, rows: int, vocab: int, launches: int, seed: int, most: int = MOST) -> int:
    """Draw ``launches`` times from ``rows`` rows, on a device and by the reference. Return how many were compared.

    most  the most candidates of a row that are gathered, a power of 2. Rows with more are drawn by ``slow_kernels``

    Raises AssertionError for a draw that differs.
    """
    rng = np.random.default_rng(seed)
    padded = -(-vocab // 32) * 32
    sampling = parameters(setting)
    rule = rule_of(sampling, vocab)
    with_tables = rule.penalty != 1 or rule.frequency != 0 or rule.presence != 0
    logits = np.full((rows, padded), -65504.0, np.float16)
    logits[:, :vocab] = rows_of(rng, rows, vocab)
    batched = BatchedDraws(rows, padded, vocab, device, most=most)
    slots = rng.permutation(rows) if with_tables else np.full(rows, -1)
    seen, counts = np.zeros((rows, vocab), np.int32), np.zeros((rows, vocab), np.int32)
    bias = np.zeros((rows, vocab), np.float32)
    position = int(rng.integers(1, 60))
    if with_tables:
        for row in range(rows):
            for place, token in enumerate(rng.integers(0, vocab, position)):
                seen[row, token] = place + 1
                counts[row, token] += place > position // 2
            bias[row, rng.integers(0, vocab, vocab // 8)] = rng.normal()
            bias[row, rng.integers(0, vocab, 3)] = -np.inf
        for name, table in (("last_seen", seen), ("counts", counts), ("bias", bias)):
            held = np.empty_like(table)
            held[slots] = table
            getattr(batched, name).copy_(torch.from_numpy(held))
    masks = masks_of(rng, logits[:, :vocab]) if "masks" in setting else None
    if masks is not None:
        batched.fill_masks(np.packbits(masks, axis=1, bitorder="little"))
    on_device = torch.from_numpy(logits).to(device)

    def adjusted(row: int, *tables: Array | None) -> Array:
        x = penalised(logits[row, :vocab], rule, position, *tables)
        if masks is not None and masks[row].any():
            x = x + np.where(masks[row], np.float32(0), np.float32(-np.inf))
        return x

    limits = [row if masks is not None and masks[row].any() else -1 for row in range(rows)]
    points = rng.integers(0, 1 << 53, (launches, rows))
    points[:, 0] = 0
    if rows > 1:
        points[:, -1] = (1 << 53) - 1
    if not with_tables:
        drawn = _draw_again_and_again(
            batched, on_device, [RowDraw(rule, -1, position, 0, limit) for limit in limits], points
        )
        for row in range(rows):
            x = adjusted(row, None, None, None)
            if rule.greedy:
                expected = np.full(launches, drawn_by_reference(x, rule, 0))
            else:
                ids, sums = candidates_of(weights_of(x, rule), rule)
                expected = ids[
                    np.searchsorted(sums, [aim_of(int(point), sums) for point in points[:, row]], side="right")
                ]
            wrong = np.flatnonzero(drawn[:, row] != expected)
            assert not len(wrong), (setting, row, points[wrong[0], row], drawn[wrong[0], row], expected[wrong[0]])
        return rows * launches
    words = torch.zeros_like(batched.words, device="cpu")
    for launch in range(launches):
        draws = [RowDraw(rule, int(slots[row]), position, int(points[launch, row]), limits[row]) for row in range(rows)]
        write_words(words.numpy(), draws)
        batched.words.copy_(words)
        batched.launch(on_device, rows)
        tokens = batched.drawn.cpu().tolist()
        for row in range(rows):
            token = drawn_by_reference(adjusted(row, seen[row], counts[row], bias[row]), rule, int(points[launch, row]))
            assert tokens[row] == token, (setting, row, points[launch, row], tokens[row], token)
            if token >= 0:
                seen[row, token] = position + 1
                counts[row, token] += 1
        position += 1
    return rows * launches


def _draw_again_and_again(batched: BatchedDraws, logits: torch.Tensor, draws: list[RowDraw], points: Array) -> Array:
    """Return int64 [launches, rows]: what the kernels draw from the same rows at points of 53 bits [launches, rows]."""
    words = torch.zeros_like(batched.words, device="cpu")
    write_words(words.numpy(), draws)
    found = torch.zeros(points.shape, dtype=torch.int64, device=batched.drawn.device)
    at = words.numpy()[:, POINT_WORD : POINT_WORD + 2]
    for launch, own in enumerate(points):
        at[:] = (own.astype(np.uint64) << np.uint64(11)).view(np.int32).reshape(-1, 2)
        batched.words.copy_(words)
        batched.launch(logits, len(draws))
        found[launch] = batched.drawn
    drawn: Array = found.cpu().numpy()
    return drawn


def drawn_by_reference(x: Array, rule: DrawRule, point: int) -> int:
    """Return the token that the rule draws, or -1 where no token is left: a bias may forbid a row's only finite one."""
    return -1 if np.isneginf(x).all() else draw(x, rule, point)


def draw_not_numbers(device: str) -> None:
    """Draw from a row that is not numbers and keeps many tokens, and then from the rows that follow in its place."""
    rule = rule_of(parameters("flat top_p"), 96)
    batched, words = BatchedDraws(1, 96, 96, device, most=4), np.zeros((1, WORDS), np.int32)
    write_words(words, [RowDraw(rule, -1, 1, 1 << 52)])
    batched.words.copy_(torch.from_numpy(words))
    good = np.random.default_rng(1).normal(size=96).astype(np.float16)
    expected = draw(good.astype(np.float32), rule, 1 << 52)
    bad = good.copy()
    bad[7] = np.nan
    for row, token in ((bad, -1), (good, expected), (np.full_like(bad, -np.inf), -1), (good, expected)):
        batched.launch(torch.from_numpy(row[None]).to(device), 1)
        assert batched.drawn.tolist() == [token], row


def main() -> None:
    seed = int(sys.argv[1])
    compared = 0
    for setting in SETTINGS:
        compared += compare("cpu", setting, 8, 96, 1, seed)
        if rule_of(parameters(setting), 96).cuts:
            compared += compare("cpu", setting, 8, 96, 1, seed, most=4)
    for setting in ("all cuts", "top_p under masks"):  # the interpreter is slow
        compared += compare("cpu", setting, 8, 5000, 1, seed)
    compared += compare("cpu", "flat cuts", 8, 5000, 1, seed, most=16)
    draw_not_numbers("cpu")
    print(f"{compared} draws are equal")


if __name__ == "__main__":
    main()
