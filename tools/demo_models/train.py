"""Train the demo models: ``python -m tools.demo_models.train letters|stories|agent|all [--out DIR] [--device cuda]``.

Text, tokenizer, weights and files are made from nothing but this directory and a seed. The result is asserted: the
saved directory, read back in float32, answers every test prompt exactly, each step by a margin of at least 1.0.

The shipped weights of ``letters`` and ``stories`` were trained on one NVIDIA H200, both models at once: 173 s for
``letters``, 210 s for ``stories``, including the making of the text and the measurements. Two CPU cores make about one
step of 4096 tokens a second. So the default number of steps takes two to three hours for each model. ``--minutes`` and
``--steps`` shorten that. Another device, another number of tokens per step or another version of PyTorch gives other
weights from the same seed.

The shipped weights of ``agent`` were trained on CPU cores, in several runs. Each run began with the weights of the run
before. The last run had the options ``agent --start model_worker/demo_models/agent --device cpu --bfloat16 --rate 3e-4
--steps 1500 --minutes 20 --examples 20000 --seed 7``. One core made 642 steps in that time. Of 2000 fresh conversations
``agent`` then answers 1995 exactly; they are of the kind that the test prompts have (:func:`agent_cases.plain_case`).
"""

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from supervisor.workers.environment import DEMO_DIR
from tools.demo_models import NAMES, corpus
from tools.demo_models.build import train_tokenizer, write_directory
from tools.demo_models.check import Encoded, Report, encode, load, measure, measure_directory
from tools.demo_models.pool import IGNORED, Bucket, build_pool, texts

STEPS = {"letters": 9_000, "stories": 10_000, "agent": 8_000}
EXAMPLES = {"letters": 250_000, "stories": 120_000, "agent": 120_000}
TOKENIZER_TEXTS = 5000
PEAK_RATE = 2e-3
MARGIN = 1.0


def fresh_cases(name: str, n: int, seed: int) -> list[tuple[str, str]]:
    """Return ``n`` random (prompt text, answer) pairs of every kind that the test prompts have, from another seed."""
    if name == "letters":
        short = corpus.letters_prompts(n - n // 4, seed)
        return short + corpus.letters_long_answers(n // 8, seed) + corpus.letters_long_prompts(n // 8, seed)
    if name == "agent":
        cases = corpus.different_cases(n, seed, corpus.plain_case)
        return [(corpus.render_agent(c.messages, c.tools, c.thinking), c.answer.text(c.thinking)) for c in cases]
    asked = [([{"role": "user", "content": text}], answer) for text, answer in corpus.story_requests(n - n // 4, seed)]
    chats = [*asked, *corpus.chat_conversations(n // 4, seed)]
    return [(corpus.render_chat(messages), answer) for messages, answer in chats]


def fit(
    model: Any,
    pool: list[Bucket],
    steps: int,
    tokens: int,
    seed: int,
    fresh: list[Encoded],
    minutes: float | None,
    rate: float,
    bfloat16: bool,
) -> None:
    """Train the model by AdamW with a warm-up and a cosine schedule, ``tokens`` tokens per step, on the model's device.

    If ``steps`` take longer than ``minutes``, fewer steps are made: the schedule then follows the clock.
    """
    device = model.device
    rng = random.Random(f"batches {seed}")
    pool = [Bucket(bucket.ids.to(device), bucket.targets.to(device)) for bucket in pool]
    share = [len(bucket.ids) * math.sqrt(bucket.ids.shape[1]) for bucket in pool]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    warm_up = min(200, steps // 10 + 1)
    began = time.monotonic()

    def done(step: int) -> float:
        return max(step / steps, (time.monotonic() - began) / (60 * minutes) if minutes is not None else 0.0)

    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done(step))))),
    )
    running = torch.zeros((), device=device)
    every = max(1, steps // 12)
    step = 0
    while done(step) < 1:
        step += 1
        bucket = rng.choices(pool, share)[0]
        rows = torch.randint(len(bucket.ids), (max(1, tokens // bucket.ids.shape[1]),), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(input_ids=bucket.ids[rows].long(), use_cache=False).logits
        targets = bucket.targets[rows].long()
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        running += loss.detach()
        if step % every == 0 or done(step) >= 1:
            model.eval()
            seconds = time.monotonic() - began
            mean = running.item() / (step % every or every)
            print(f"step {step}/{steps}: loss {mean:.5f}; fresh {measure(model, fresh)}; {seconds:.0f} s", flush=True)
            model.train()
            running.zero_()


def train(
    name: str,
    out: Path,
    device: str,
    steps: int,
    tokens: int,
    seed: int,
    n_examples: int,
    minutes: float | None = None,
    start: Path | None = None,
    rate: float = PEAK_RATE,
    bfloat16: bool = False,
) -> None:
    """Train a model and write it to ``out``. Raises AssertionError if the model does not answer as it should.

    start  directory of a trained model of this name, whose tokenizer and weights the training begins with
    """
    began = time.monotonic()
    torch.manual_seed(seed)
    examples = texts(name, n_examples, seed)
    if start is None:
        sample = ("".join(text for text, _ in example) for example in examples[:TOKENIZER_TEXTS])
        tokenizer = train_tokenizer(name, sample)
    else:
        tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    write_directory(name, out, tokenizer)
    pool = build_pool(name, tokenizer, examples)
    sizes = ", ".join(f"{len(bucket.ids)} of {bucket.ids.shape[1]}" for bucket in pool)
    print(f"{name}: seed {seed}, {len(examples)} examples ({sizes}), {time.monotonic() - began:.0f} s", flush=True)
    if start is None:
        config = AutoConfig.from_pretrained(out)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)  # type: ignore[no-untyped-call]
    else:
        model = load(start, device)
    model.train()
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters on {device}", flush=True)
    fresh = encode(tokenizer, name, fresh_cases(name, 96, seed + 1))
    fit(model, pool, steps, tokens, seed, fresh, minutes, rate, bfloat16)
    halves = {key: value.detach().to("cpu", torch.float16).contiguous() for key, value in model.state_dict().items()}
    save_file(halves, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{name}: trained and saved after {time.monotonic() - began:.0f} s", flush=True)
    if device == "cuda":
        cases = corpus.TEST_PROMPTS[name]
        print(
            f"{name}: test prompts in float16 {measure_directory(name, out, cases, device, torch.float16)}", flush=True
        )
    assert_answers(name, out, device, seed)


def assert_answers(name: str, directory: Path, device: str = "cpu", seed: int = 0, fresh: int = 512) -> Report:
    """Measure the saved model in float32 on all its test prompts and on ``fresh`` random ones, and print both results.

    Raises AssertionError if a test prompt's answer is not exactly right or a step's margin is below ``MARGIN``.
    """
    model, tokenizer = load(directory, device), Tokenizer.from_file(str(directory / "tokenizer.json"))
    cases = corpus.TEST_PROMPTS[name]
    tested = measure(model, encode(tokenizer, name, cases))
    print(f"{name}: test prompts {tested}, the least at {cases[tested.worst][0][-80:]!r}", flush=True)
    others = fresh_cases(name, fresh, seed + 1000)
    found = measure(model, encode(tokenizer, name, others))
    print(f"{name}: fresh prompts {found}, the least at {others[found.worst][0][-80:]!r}", flush=True)
    if tested.exact < tested.cases or tested.margin < MARGIN:
        raise AssertionError(f"{name}: {tested}; a margin of at least {MARGIN} is needed")
    return tested


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_models.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", choices=[*NAMES, "all"])
    parser.add_argument("--out", type=Path, default=DEMO_DIR, help="where the model directories are made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default {STEPS})")
    parser.add_argument("--tokens", type=int, help="tokens per step (default 16384 on a GPU, 4096 on a CPU)")
    parser.add_argument("--minutes", type=float, help="make fewer steps where they would take longer than this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--examples", type=int, help=f"examples in the text (default {EXAMPLES}, or fewer for few steps)"
    )
    parser.add_argument("--start", type=Path, help="directory of a trained model that is trained further")
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="highest learning rate (default %(default)s)")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 on a CPU, too (fast with AMX)")
    arguments = parser.parse_args()
    tokens = arguments.tokens or (16384 if arguments.device == "cuda" else 4096)
    torch.set_float32_matmul_precision("high")
    for name in NAMES if arguments.model == "all" else [arguments.model]:
        steps = arguments.steps or STEPS[name]
        n_examples = arguments.examples or min(EXAMPLES[name], max(2000, steps * tokens // 100))
        bfloat16 = arguments.bfloat16 or arguments.device == "cuda"
        train(
            name,
            arguments.out / name,
            arguments.device,
            steps,
            tokens,
            arguments.seed,
            n_examples,
            arguments.minutes,
            arguments.start,
            arguments.rate,
            bfloat16,
        )


if __name__ == "__main__":
    main()
