"""The product in one minute: two models in two processes, eight questions at once, everything stopped again.

    make demo            or, where modelctl is installed:  python examples/demo.py

Real processes and sockets; on the CPU, with the shipped models. Exits 0 only if every stream answered its own question
and no process is left behind.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from model_worker.demo_models import corpus
from modelctl import AsyncClient
from supervisor.cli.tables import bar, table

MODELCTL = [sys.executable, "-m", "supervisor"]
MODELS_YAML = Path(__file__).resolve().parent.parent / "models.yaml"
TOKENS_PER_LINE = 8
COLOURS = (36, 33, 35, 32, 34, 31, 96, 93)


@dataclass
class Question:
    """One request, what it should be answered, and what became of it."""

    label: str
    model: str
    asked: str
    expected: str
    request: dict[str, Any]
    answer: str = ""
    tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""
    unprinted: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.answer.strip() == self.expected.strip()

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / max(1e-9, self.total_s - self.first_token_s)


def questions(seed: int) -> list[Question]:
    """Four questions for each model."""
    letters = [*corpus.LETTERS_TEST_LONG_ANSWERS[1:2], *random.Random(seed).sample(corpus.LETTERS_TEST_PROMPTS, 3)]
    stories = random.Random(seed).sample(corpus.STORIES_TEST_REQUESTS, 4)
    asked = [Question(f"letters {i}", "letters", p, a, {"prompt": p}) for i, (p, a) in enumerate(letters, 1)]
    for i, (message, story) in enumerate(stories, 1):
        request = {"messages": [{"role": "user", "content": message}]}
        asked.append(Question(f"stories {i}", "stories", message, story, request))
    return asked


def paint(text: str, index: int) -> str:
    return f"\x1b[{COLOURS[index % len(COLOURS)]}m{text}\x1b[0m" if sys.stdout.isatty() else text


async def ask(client: AsyncClient, question: Question, index: int, begun: float) -> None:
    """Send one request and print its stream as it arrives, a few tokens a line, between the others' lines."""

    def flush() -> None:
        if question.unprinted:
            text = "".join(question.unprinted).replace("\n", " ")
            print(f"{time.monotonic() - begun:6.2f}s  {paint(f'{question.label:<10} {text}', index)}", flush=True)
            question.unprinted.clear()

    sent = time.monotonic()
    stream = client.generate(question.model, **question.request, temperature=0)
    async for delta in stream:
        if not question.tokens:
            question.first_token_s = time.monotonic() - sent
        question.tokens += len(delta.token_ids)
        question.unprinted.append(delta.text)
        if len(question.unprinted) >= TOKENS_PER_LINE:
            flush()
    flush()
    question.total_s = time.monotonic() - sent
    question.answer, question.finish_reason = stream.text, stream.finish_reason or ""


async def wait_until_ready(client: AsyncClient) -> None:
    """Show how the models load."""
    shown: dict[str, str] = {}
    while True:
        models = (await client.status())["models"]
        for model in models:
            progress = model["progress"]
            text = (
                f"{model['state']:<9} {progress['phase']} {bar(progress['done'], progress['total'])}"
                if progress
                else model["state"]
            )
            if shown.get(model["name"]) != text:
                shown[model["name"]] = text
                print(f"  {model['name']:<10} {text}", flush=True)
        if any(model["state"] in ("failed", "backoff") for model in models):
            raise SystemExit(f"a model did not load: {[m['last_exit'] for m in models]}")
        if all(model["state"] == "ready" for model in models):
            return
        await asyncio.sleep(0.02)


async def converse(runtime_dir: Path, asked: list[Question]) -> None:
    async with AsyncClient(runtime_dir=runtime_dir) as client:
        await wait_until_ready(client)
        print(f"\n{len(asked)} requests at once, over one connection:")
        for index, question in enumerate(asked):
            print(f"  {paint(f'{question.label:<10} {question.asked}', index)}")
        print("\nthe streams, as they arrive:")
        begun = time.monotonic()
        await asyncio.gather(*(ask(client, question, i, begun) for i, question in enumerate(asked)))


def modelctl(runtime_dir: Path, *arguments: str) -> None:
    subprocess.run([*MODELCTL, *arguments, "--runtime-dir", str(runtime_dir)], check=True)


def wait_for_supervisor(runtime_dir: Path, process: subprocess.Popen[bytes]) -> None:
    while not (runtime_dir / "front").exists():
        if process.poll() is not None:
            raise SystemExit(f"the supervisor ended with code {process.returncode}; see {runtime_dir}/logs")
        time.sleep(0.02)


def main() -> int:
    seed = int(os.environ.get("DEMO_SEED", "7"))
    asked = questions(seed)
    with tempfile.TemporaryDirectory(prefix="modelctl-demo-") as scratch:
        runtime_dir = Path(scratch) / "run"
        print(f"$ modelctl serve --config {MODELS_YAML.name}")
        serve = [*MODELCTL, "serve", "-q", "-c", str(MODELS_YAML), "--runtime-dir", str(runtime_dir)]
        with subprocess.Popen(serve) as process:
            try:
                wait_for_supervisor(runtime_dir, process)
                asyncio.run(converse(runtime_dir, asked))
                print_results(asked)
                print("\n$ modelctl ps", flush=True)
                modelctl(runtime_dir, "ps")
                family = psutil.Process(process.pid).children(recursive=True)
                print("\n$ modelctl shutdown", flush=True)
                modelctl(runtime_dir, "shutdown")
                code = process.wait(timeout=20)
            finally:
                process.kill()  # takes its workers along, whatever happened
    _, alive = psutil.wait_procs(family, timeout=5)
    print(f"supervisor left with code {code}; {len(alive)} of its {len(family)} processes remain")
    wrong = [question.label for question in asked if not question.right]
    if wrong:
        print(f"wrong answers: {', '.join(wrong)}")
    return 1 if wrong or alive or code else 0


def print_results(asked: list[Question]) -> None:
    header = ("STREAM", "FIRST TOKEN MS", "TOK/S", "TOKENS", "FINISH", "ITS OWN ANSWER")
    rows = [
        (
            q.label,
            round(q.first_token_s * 1000),
            round(q.tokens_per_s),
            q.tokens,
            q.finish_reason,
            "yes" if q.right else "NO",
        )
        for q in asked
    ]
    print(f"\n{table(header, rows)}")


if __name__ == "__main__":
    raise SystemExit(main())
