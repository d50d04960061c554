"""Which tokens the GPU draws."""

from typing import Any


def draws_on_gpu(job: Any) -> bool:
    """Return whether the GPU can draw the next token of an AnswerJob."""
    return bool(
        job.shortcut
        and job.top is None
        and job.constraint is None
        and job.gen_settings.token_bias is None
        and job.new_tokens >= job.minimum
    )
