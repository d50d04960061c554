"""An engine that replays prepared answers, token by token, in a real worker process.

The last ``say NAME`` of a conversation names the answer: it replays ``ANSWERS[NAME]``. Tokens are cut at awkward
places, which the number of the name's answer decides, and special tokens have ids of their own.
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

from model_worker.engine import (
    Capabilities,
    ChatTemplate,
    EngineEvent,
    EngineStats,
    Finished,
    Job,
    NewTokens,
    ProgressCallback,
)
from model_worker.engines.admission import check_job
from model_worker.text import ContentStops, StopMatcher
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams
from protocol.values import hints_of

THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|end|>{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if begin_inside is defined and begin_inside %}<think>\n{% endif %}" + THINKING + "{% endif %}"
)
"""A template that shows everything, writes calls as Hermes does, and reasons in <think>."""

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "get_time", "strict": True, "parameters": {
        "type": "object", "properties": {}, "required": [], "additionalProperties": False}}},
]  # fmt: skip
"""The tools that the prepared answers call."""
CITY = {"city": "Łódź", "days": 3}
"""The arguments of the call of get_weather."""

WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Łódź", "days": 3}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
ANSWERS = {
    "plain": "Hello there.",
    "weather": WEATHER,
    "both": f"I look.\n{WEATHER}\n{TIME}",
    "thought": f"<think>\nThe user wants weather.\n</think>\n\nLet me see.\n{WEATHER}",
    "inside": "So I think.\n</think>\n\nIt is Tuesday.",
    "long": "<think>\n" + "I think on and on. " * 20 + "\n</think>\n\n" + "And so I say it. " * 20,
    "person": '<think>\nhm\n</think>\n\n{"name": "Ada", "age": 36}',
}


def cut(text: str, size: int) -> list[str]:
    """Cut a text into tokens of ``size`` characters."""
    return [text[at : at + size] for at in range(0, len(text), size)]


class ReplayingEngine:
    """Replays the answer that the last message names. Token ids count the pieces of the answer.

    Options: step_s (seconds of a step), answers (further ones, by name), size (characters of a token), context,
    template, die_at (the token at which the first process of the model kills itself, 0 for never) and flag (the path of
    a file that remembers the death).
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec, self.options = spec, spec.options
        self.jobs: dict[int, tuple[Job, list[str], int, Any]] = {}
        self.steps = 0

    def load(self, progress: ProgressCallback) -> None:
        progress("loading", 1, 1)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            context=int(self.options.get("context", 65536)),
            max_batch_size=self.spec.max_batch_size,
            offered=frozenset(hints_of(SamplingParams)),
            chat=True,
            device="none",
            attention="none",
        )

    @property
    def constraints(self) -> None:
        return None

    @property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.options.get("template", TEMPLATE))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_rendered = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"?"

    def answer_to(self, prompt: str) -> str:
        """Return the prepared answer to a rendered prompt."""
        answers = {**ANSWERS, **self.options.get("answers", {})}
        named = [name for name in re.findall(r"say (\w+)", prompt) if name in answers]
        return str(answers[named[-1]])

    def submit(self, job: Job) -> None:
        check_job(job, self.capabilities, 1 << 20)
        prompt = self.decode(job.prompt_ids)
        matcher: Any = StopMatcher(job.stop)
        if job.layout.stops:
            layout = job.layout
            matcher = ContentStops(layout.reasoning, layout.place == "inside", layout.calls, layout.opening)
            matcher.use(job.stop)
        pieces = cut(self.answer_to(prompt), int(self.options.get("size", 3)))
        for piece in pieces[: len(job.resumed_ids)]:
            matcher.push(piece)
        self.jobs[job.id] = job, pieces, len(job.resumed_ids), matcher

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        time.sleep(float(self.options.get("step_s", 0.0005)))
        events: list[EngineEvent] = []
        for job_id, (job, pieces, k, matcher) in list(self.jobs.items()):
            self._perhaps_die(k)
            text, found = matcher.push(pieces[k])
            last = found or k + 1 == len(pieces) or k + 1 == job.max_new_tokens
            if last:
                del self.jobs[job_id]
                reason = "stop" if found or k + 1 == len(pieces) else "length"
                text += "" if found else matcher.flush()
                events.append(
                    Finished(job_id, [k], text, reason, len(job.prompt_ids), k + 1, stop_string=matcher.found)
                )
            else:
                self.jobs[job_id] = job, pieces, k + 1, matcher
                events.append(NewTokens(job_id, [k], text))
        return events

    def _perhaps_die(self, k: int) -> None:
        flag = self.options.get("flag")
        if flag and k == self.options["die_at"] and not os.path.exists(flag):
            open(flag, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def cancel(self, job_id: int) -> None:
        self.jobs.pop(job_id, None)

    def reset(self) -> None:
        self.jobs.clear()

    def stats(self) -> EngineStats:
        return EngineStats(active=len(self.jobs), steps=self.steps)

    def close(self) -> None:
        pass
