"""Measure the share of prompt tokens that agents in turn find in the prompt cache, and what rules would find.

    python -m benchmarks.prompt_cache [--model 1b-exl2-rounded] [--turns 30] [--simulate]

Three agents take turns on a cache of 65,536 tokens. Each has a prompt of 30,000 tokens, which is 200 tokens longer at
each turn. "package": the page used longest ago goes first, as in ExLlamaV2. "oldest": the text whose last use is the
oldest, from its end. "chosen": ``model_worker.engines.exllamav2.victims``. "future": the text whose next use is the
farthest. The mixed load has chats behind a system prompt, single questions, and documents of which some are asked for
often. ``--simulate`` needs no GPU.
"""

import itertools
import random
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import arguments_for, entry, spec_of
from benchmarks.report import Result, write
from model_worker.engines.exllamav2.victims import Followed, Held, VictimRule, victims

PAGE, CACHE, AGENTS, PROMPT, GROWTH, ANSWER = 256, 65_536, 3, 30_000, 200, 32
Request = tuple[list[bytes], int]
"""Names of a prompt's full pages, and the number of pages that the answer takes."""


def names(text: object, pages: int, shared: Sequence[object] = ()) -> list[bytes]:
    """Return names of a text's pages, the first of them ``shared`` with other texts."""
    last = len(shared)
    return [repr(shared[: at + 1] if at < last else (shared, text, at)).encode() for at in range(pages)]


def in_turn(turns: int) -> list[Request]:
    sizes = [PROMPT + turn // AGENTS * GROWTH for turn in range(turns)]
    return [(names(turn % AGENTS, (size - 1) // PAGE), 1) for turn, size in enumerate(sizes)]


def mixed(count: int = 600, seed: int = 1) -> list[Request]:
    rng, load, chats = random.Random(seed), [], dict[int, int]()
    system = [("system", number) for number in range(4)]
    for number in range(count):
        kind = rng.random()
        if kind < 0.5:
            chat = rng.choice(list(chats)[-12:]) if chats and rng.random() < 0.8 else len(chats)
            chats[chat] = chats.get(chat, 6) + rng.randint(1, 3)
            load.append((names(("chat", chat), min(chats[chat], 60), system), 2))
        elif kind < 0.8:
            load.append((names(("one", number), rng.randint(1, 20), system if rng.random() < 0.5 else ()), 2))
        elif kind < 0.9:
            load.append((names(("document", int(rng.paretovariate(1)) % 8), 40), 2))
        else:
            load.append((names(("long", number), rng.randint(40, 120)), 3))
    return load


def share(load: list[Request], hits: list[int]) -> float:
    return 100 * sum(hits) / sum(len(found) for found, _ in load)


def package(load: list[Request], pages: int) -> float:
    """Simulate the package: page by page, the one used longest ago goes, also if the same prompt comes to it later."""
    used: dict[bytes, int] = {}
    uses, hits = itertools.count(), []
    for prompt, answer in load:
        found, taken = [], set()
        for name in [*prompt, *(None for _ in range(answer))]:
            if name in used:
                found.append(True)
            else:
                found.append(False)
                if len(used) >= pages:
                    del used[min((other for other in used if other not in taken), key=used.__getitem__)]
            if name is not None:
                used[name] = next(uses)
                taken.add(name)
        hits.append([*found[: len(prompt)], False].index(False))
    return share(load, hits)


def chosen(load: list[Request], pages: int) -> float:
    rule, cache, hits = VictimRule(pages), Followed(pages, newest=False), []
    for prompt, answer in load:
        rule.use(prompt, answer)
        cache.newest = rule.newest
        hits.append(cache.use(prompt, answer))
    return share(load, hits)


def future(load: list[Request], pages: int) -> float:
    uses: dict[bytes, list[int]] = {}
    for number, (prompt, _) in enumerate(load):
        for name in prompt:
            uses.setdefault(name, []).append(number)
    held: dict[bytes, tuple[bytes | None, int]] = {}
    hits = []
    for number, (prompt, answer) in enumerate(load):
        hits.append([*(name in held for name in prompt), False].index(False))

        def distance(name: bytes, now: int = number) -> int:
            later = uses[name][bisect_right(uses[name], now) :]
            return later[0] if later else len(load)

        missing = sum(name not in held for name in prompt) + answer - (pages - len(held))
        if missing > 0:
            all_pages = [
                Held(name, parent, -distance(name) * pages - place, 1) for name, (parent, place) in held.items()
            ]
            for page in victims(all_pages, (), set(prompt), missing, newest=False):
                del held[page.name]
        held.update({name: (prompt[place - 1] if place else None, place) for place, name in enumerate(prompt)})
    return share(load, hits)


def measured(arguments: Any) -> float:
    """Return the share that a real engine reports."""
    from model_worker.engine import Finished, Job
    from model_worker.engines import build_engine
    from protocol.request import SamplingParams

    made = entry(arguments, arguments.model, 1, CACHE, CACHE // 2, rope_scale=8.0)
    engine: Any = build_engine(spec_of(made))
    engine.load(lambda *_: None)
    rng = random.Random(1)
    texts = [[rng.randrange(1000, 100_000) for _ in range(CACHE // 2)] for _ in range(AGENTS)]
    cached = total = 0
    for turn in range(arguments.turns):
        prompt = tuple(texts[turn % AGENTS][: PROMPT + turn // AGENTS * GROWTH])
        engine.submit(Job(turn + 1, prompt, ANSWER, SamplingParams(temperature=0)))
        ended = None
        while ended is None:
            ended = next((event for event in engine.step() if isinstance(event, Finished)), None)
        cached += ended.cached_tokens
        total += ended.prompt_tokens
    return 100 * cached / total


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", default="1b-exl2-rounded")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--simulate", action="store_true")
    arguments = parser.parse_args()
    pages, results = CACHE // PAGE, []
    for label, load in (("three agents", in_turn(arguments.turns)), ("mixed load", mixed())):
        oldest = share(load, [cache.use(*request) for cache in [Followed(pages, newest=False)] for request in load])
        found = {
            "package": package(load, pages),
            "oldest": oldest,
            "chosen": chosen(load, pages),
            "future": future(load, pages),
        }
        results += [Result(f"{label}: {rule}", value, "%") for rule, value in found.items()]
        if label == "three agents":
            results.append(Result(f"{label}: future less chosen", found["future"] - found["chosen"], "points", "<= 10"))
            if not arguments.simulate:
                real = measured(arguments)
                results.append(Result(f"{label}: measured", real, "%"))
                results.append(Result(f"{label}: measured from chosen", abs(real - found["chosen"]), "points", "<= 2"))
        else:
            results.append(Result(f"{label}: oldest less chosen", found["oldest"] - found["chosen"], "points", "<= 1"))
    write("prompt-cache", results, arguments.out)


if __name__ == "__main__":
    main()
