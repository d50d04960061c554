"""The rule's draws on the host, for answers whose draws cannot wait for the GPU: speculation and constraints."""

from typing import Any

import numpy as np
import torch

from model_worker.engines.exllamav2.gpu_draws.rule import POINT_BITS, draw, penalised
from model_worker.engines.exllamav2.sampling import NEVER


def draw_by_rule(job: Any, logits: torch.Tensor) -> int:
    """Return the next token of an AnswerJob with a rule: the one that the GPU would draw from these logits.

    logits  float32 [1, 1, padded vocabulary]

    Raises RuntimeError for logits that are not numbers.
    """
    rule, vocab = job.rule, job.vocab
    seen = counts = bias = None
    ids = job.sequences[0].sequence_ids.torch()[0].numpy()
    if rule.penalty != 1:
        inside = ids < vocab
        seen = np.zeros(vocab, np.int32)
        seen[ids[inside]] = np.flatnonzero(inside) + 1  # of equal ids, the last one stays
    if job.bias is not None and job.bias.counts:
        counts = np.zeros(vocab, np.int32)
        for token, count in job.bias.counted.items():
            counts[token] = count
    if job.limits is not None and job.gen_settings.token_bias is job.limits:
        bias = job.limits.numpy()[:vocab]
    elif job.bias is not None or job.first_bias is not None:
        bias = np.zeros(vocab, np.float32)
        for own in (job.bias.base if job.bias else None, job.first_bias):
            if own is not None:
                bias += own.numpy()[:vocab]
    x = penalised(logits[0, 0, :vocab].numpy(), rule, len(ids), seen, counts, bias)
    if 0 <= job.new_tokens < job.minimum:
        x[job.end_list] = NEVER
    point = 0 if rule.greedy else int(job.draws.at(job.new_tokens, returns=job.returns) * 2.0**POINT_BITS)
    try:
        return draw(x, rule, point)
    except ValueError:
        raise RuntimeError("the model's logits are not numbers") from None
