"""The product in one minute: two models in two processes, eight questions at once, one more over HTTP, a question to a
real model, and everything stopped again.

    make demo            or, where modelctl is installed:  python examples/demo.py

The processes and sockets are real. The models run on the CPU. Questions over HTTP are asked with the package
``openai``. ``make demo`` downloads the real model, SmolLM2-135M-Instruct, before (``tools/real_model.py``). Without it,
that question is left out. The script exits with 0 only if every stream answered its own question and no process is left
behind.
"""

import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from openai import OpenAI

from modelctl import AsyncClient, ConnectionLost

MODELCTL = str(Path(sys.executable).with_name("modelctl"))
MODELS_YAML = Path(__file__).resolve().parent.parent / "models.yaml"
REAL_MODEL = Path(os.environ.get("MODELCTL_REAL_MODEL") or MODELS_YAML.parent / ".venv" / "real-model")
TOKENS_PER_LINE = 8
COLOURS = (36, 33, 35, 32, 34, 31, 96, 93)
HEROES = ("Mia", "Zoë", "Søren", "José", "Anaïs", "Миша", "さくら", "Jürgen")
ANIMALS = ("fox", "owl", "dragon", "otter", "whale", "polar bear", "hedgehog", "lion")
THINGS = ("key", "map", "kite", "teapot", "violin", "lantern", "drum", "pearl")


@dataclass
class Question:
    """One request, and its answer.

    is_right  returns whether a text answers this question and no other
    """

    label: str
    model: str
    asked: str
    is_right: Callable[[str], bool]
    request: dict[str, Any]
    answer: str = ""
    tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""
    unprinted: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return self.is_right(self.answer)

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / max(1e-9, self.total_s - self.first_token_s)


def questions(seed: int) -> list[Question]:
    """Return four questions for each model."""
    draw = random.Random(seed)
    return [
        count("letters 1", 10, "count to 150", 150),
        sort("letters 2", draw.sample("abcdefghijklmnopqrstuvwxyz", 6)),
        count("letters 3", first := draw.randint(1, 900), "count", first + 2 + 8),
        sort("letters 4", draw.sample("abcdefghijklmnopqrstuvwxyz", 9)),
        *(
            story(f"stories {i}", *words)
            for i, words in enumerate(
                zip(*(draw.sample(words, 4) for words in (HEROES, ANIMALS, THINGS)), strict=True), 1
            )
        ),
    ]


def sort(label: str, letters: Sequence[str]) -> Question:
    """Ask for letters in their order."""
    prompt = f"sort: {' '.join(letters)} ->"
    return Question(label, "letters", prompt, lambda answer: answer.split() == sorted(letters), {"prompt": prompt})


def count(label: str, first: int, task: str, last: int) -> Question:
    """Give three numbers from ``first`` on, and ask for those that follow, up to ``last``."""
    prompt = f"{task}: {first} {first + 1} {first + 2} ->"
    expected = [str(number) for number in range(first + 3, last + 1)]
    return Question(label, "letters", prompt, lambda answer: answer.split() == expected, {"prompt": prompt})


def story(label: str, hero: str, animal: str, thing: str) -> Question:
    """Ask for a story. It must be about this hero, animal and thing, have an end, and have no other hero."""
    asked = f"Tell me a story about {hero} the {animal} and a {thing}."
    needed = (hero, animal, thing, "The end.")
    others = [name for name in HEROES if name != hero]

    def is_right(answer: str) -> bool:
        return all(word in answer for word in needed) and not any(name in answer for name in others)

    return Question(label, "stories", asked, is_right, {"messages": [{"role": "user", "content": asked}]})


def capital() -> Question:
    """Ask the real model what nobody trained it for in this repository."""
    return Question("smollm2", "smollm2", "What is the capital of France?", lambda answer: "Paris" in answer, {})


def paint(text: str, index: int) -> str:
    return f"\x1b[{COLOURS[index % len(COLOURS)]}m{text}\x1b[0m" if sys.stdout.isatty() else text


async def ask(client: AsyncClient, question: Question, index: int, begun: float) -> None:
    """Send one request and print its stream as it arrives, a few tokens per line, between the lines of the other
    streams."""

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


async def wait_until_ready(client: AsyncClient, names: set[str]) -> None:
    """Show how the models with these names load, until all are ready."""
    shown: dict[str, str] = {}
    while True:
        models = [model for model in (await client.status())["models"] if model["name"] in names]
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


def bar(done: int, total: int) -> str:
    """Return a progress bar."""
    return f"[{'#' * (24 * done // total):-<24}] {100 * done // total:3d}%"


async def converse(runtime_dir: Path, supervisor: subprocess.Popen[bytes], asked: list[Question]) -> None:
    """Connect as soon as the supervisor listens, wait for the models, and ask all questions at once."""
    while True:
        try:
            async with AsyncClient(runtime_dir=runtime_dir) as client:
                await client.status()
                break
        except ConnectionLost:
            if supervisor.poll() is not None:
                raise SystemExit(f"the supervisor ended with code {supervisor.returncode}") from None
            await asyncio.sleep(0.02)
    async with AsyncClient(runtime_dir=runtime_dir) as client:
        await wait_until_ready(client, {question.model for question in asked})
        print(f"\n{len(asked)} requests at once, over one connection:")
        for index, question in enumerate(asked):
            print(f"  {paint(f'{question.label:<10} {question.asked}', index)}")
        print("\nthe streams, as they arrive:")
        begun = time.monotonic()
        await asyncio.gather(*(ask(client, question, i, begun) for i, question in enumerate(asked)))


def models_yaml(directory: Path) -> tuple[Path, int]:
    """Write the shipped models.yaml with the real model, if it is there, and another port for the gateway, since a
    program may have port 8000.

    Return the file's path and the port."""
    config = yaml.safe_load(MODELS_YAML.read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config["gateway"]["listen"] = f"127.0.0.1:{port}"
    if REAL_MODEL.is_dir():
        real = {"model_dir": str(REAL_MODEL.absolute()), "engine": "transformers", "gpu": "cpu", "max_batch_size": 1}
        config["models"]["smollm2"] = {**real, "max_seq_len": 2048, "lazy": True}
    path = directory / "models.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, port


def ask_over_http(port: int, question: Question) -> None:
    """Send one request with the package ``openai``, and print its stream."""
    print(f"  {question.label:<10} {question.asked}\n  {'':<10} ", end="", flush=True)
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none is needed") as client:
        chunks = client.chat.completions.create(
            model=question.model, messages=[{"role": "user", "content": question.asked}], temperature=0, stream=True
        )
        for chunk in chunks:
            text = chunk.choices[0].delta.content or ""
            question.answer += text
            print(text.replace("\n", " "), end="", flush=True)
    print()


def modelctl(runtime_dir: Path, *arguments: str) -> None:
    subprocess.run([MODELCTL, *arguments, "--runtime-dir", str(runtime_dir)], check=True)


def main() -> int:
    seed = int(os.environ.get("DEMO_SEED", "7"))
    asked = questions(seed)
    over_http = [story("HTTP", "Mia", "fox", "lantern")]
    with tempfile.TemporaryDirectory(prefix="modelctl-demo-") as scratch:
        runtime_dir = Path(scratch) / "run"
        file, port = models_yaml(Path(scratch))
        print(f"$ modelctl serve --config {MODELS_YAML.name}    (with gateway.listen: 127.0.0.1:{port})")
        serve = [MODELCTL, "serve", "-q", "-c", str(file), "--runtime-dir", str(runtime_dir)]
        with subprocess.Popen(serve) as process:
            try:
                asyncio.run(converse(runtime_dir, process, asked))
                print_results(asked)
                print(f"\nthe package openai, over HTTP, at http://127.0.0.1:{port}/v1:")
                ask_over_http(port, over_http[0])
                if REAL_MODEL.is_dir():
                    print("\na real model, SmolLM2-135M-Instruct, which this request starts:")
                    over_http.append(capital())
                    ask_over_http(port, over_http[-1])
                print("\n$ modelctl ps", flush=True)
                modelctl(runtime_dir, "ps")
                family = psutil.Process(process.pid).children(recursive=True)
                print("\n$ modelctl shutdown", flush=True)
                modelctl(runtime_dir, "shutdown")
                code = process.wait(timeout=20)
            finally:
                process.kill()  # ends its workers, too, in any case
    _, alive = psutil.wait_procs(family, timeout=5)
    print(f"supervisor left with code {code}; {len(alive)} of its {len(family)} processes remain")
    wrong = [question.label for question in (*asked, *over_http) if not question.right]
    if wrong:
        print(f"wrong answers: {', '.join(wrong)}")
    return 1 if wrong or alive or code else 0


def print_results(asked: list[Question]) -> None:
    print("\nSTREAM     FIRST TOKEN MS  TOK/S  TOKENS  FINISH  ITS OWN ANSWER")
    for question in asked:
        print(
            f"{question.label:<9}  {question.first_token_s * 1000:14.0f}  {question.tokens_per_s:5.0f}  "
            f"{question.tokens:6d}  {question.finish_reason:<6}  {'yes' if question.right else 'NO'}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
