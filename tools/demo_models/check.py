"""Measure whether a model answers as it should: the exact greedy answers, and the least margin over all their steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.demo_models.build import ADDS_BOS, BOS, EOS, PAD

Encoded = tuple[list[int], list[int]]
"""Token ids of a prompt, BOS included, and of its right answer, EOS included."""


@dataclass(frozen=True)
class Report:
    """The result of greedy decoding for some prompts.

    cases   number of prompts
    exact   number of prompts that are answered exactly right, EOS included
    steps   tokens in all the right answers, EOS included
    margin  the least (logit of the right token minus the best other) of all steps; negative if an answer is wrong
    worst   index of the case with that margin
    """

    cases: int
    exact: int
    steps: int
    margin: float
    worst: int

    def __str__(self) -> str:
        return f"{self.exact}/{self.cases} exact, least margin {self.margin:.2f} over {self.steps} steps"


def encode(tokenizer: Tokenizer, name: str, cases: Sequence[tuple[str, str]]) -> list[Encoded]:
    """Return the token ids of (prompt text, answer) pairs, such as those of ``corpus.TEST_PROMPTS[name]``."""
    start = [BOS] if ADDS_BOS[name] else []
    return [
        (
            start + tokenizer.encode(prompt, add_special_tokens=False).ids,
            [*tokenizer.encode(answer, add_special_tokens=False).ids, EOS],
        )
        for prompt, answer in cases
    ]


def load(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """Return the model in ``directory``, ready for inference."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.to(device).eval()


@torch.inference_mode()
def measure(model: Any, cases: Sequence[Encoded], tokens: int = 16384) -> Report:
    """Run the right answers through the model, about ``tokens`` tokens at a time, and compare its choice at each step.

    If the best token of every step is the right one, decoding step by step gives the same answer, since each step then
    sees the same text before it.
    """
    exact, steps, least, worst = 0, 0, float("inf"), -1
    for batch in _batches(cases, tokens):
        longest = max(len(cases[i][0]) + len(cases[i][1]) for i in batch)
        rows = [[*cases[i][0], *cases[i][1]] for i in batch]
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits.float()
        for row, i in enumerate(batch):
            prompt, answer = cases[i]
            said = logits[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)]
            right = torch.tensor(answer, device=said.device)[:, None]
            margins = said.gather(1, right)[:, 0] - said.scatter(1, right, float("-inf")).amax(1)
            margin = float(margins.min())
            exact += margin > 0
            steps += len(answer)
            if margin < least:
                least, worst = margin, i
    return Report(len(cases), exact, steps, least, worst)


def measure_directory(
    name: str,
    directory: Path,
    cases: Sequence[tuple[str, str]],
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Report:
    """Load the model ``name`` from ``directory`` and measure it on (prompt text, answer) pairs."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return measure(load(directory, device, dtype), encode(tokenizer, name, cases))


def _batches(cases: Sequence[Encoded], tokens: int) -> Iterator[list[int]]:
    by_length = sorted(range(len(cases)), key=lambda i: len(cases[i][0]) + len(cases[i][1]))
    batch: list[int] = []
    for i in by_length:
        if batch and (len(batch) + 1) * (len(cases[i][0]) + len(cases[i][1])) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
