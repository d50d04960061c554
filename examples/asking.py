"""Examples of what a client can ask for, one after the other.

    modelctl serve --detach     # with the shipped models.yaml: letters and stories, on the CPU
    python examples/asking.py

Each part is complete, so that it can be copied. The script exits with 0 if every answer is right.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from modelctl import Client, Completion, Progress, WireError

STORY = [{"role": "user", "content": "Tell me a story about Søren the dragon."}]


def stream(client: Client) -> None:
    """Print text as it comes. Leaving the loop cancels the rest."""
    for delta in client.generate("stories", messages=STORY, max_tokens=200, temperature=0):
        print(delta.text, end="", flush=True)
        if "." in delta.text:
            break
    print()


def several_answers(client: Client) -> None:
    """Ask for three answers to one prompt: first as they come, then all of them complete."""
    texts = ["", "", ""]
    for index, delta in client.choices("stories", messages=STORY, n=3, seed=1, max_tokens=24):
        texts[index] += delta.text
    print(*texts, sep="\n")
    again = client.choices("stories", messages=STORY, n=3, seed=1, max_tokens=24).complete()
    assert [answer.text for answer in again] == texts, "choice i draws with seed + i"


def one_of(client: Client) -> None:
    """Ask for an answer that is one of several texts. ``json_schema`` and ``regex`` work in the same way."""
    answer = client.complete("letters", "sort: d b a c ->", choice=[" a b c d", " d c b a"], temperature=0)
    print(answer.text, answer.finish_reason)
    assert answer.text == " a b c d"


def how_far_it_is(client: Client) -> None:
    """Show the progress of a long prompt with low priority and a deadline."""

    def show(progress: Progress) -> None:
        print(progress)

    letters = " ".join(random.Random(7).choices("abcdefghij", k=800))
    answer = client.complete(
        "letters", letters, max_tokens=1, priority="batch", deadline_ms=60_000, affinity="example", on_progress=show
    )
    print({**answer.usage, **answer.timings})


def tokens(client: Client) -> None:
    ids = client.tokenize("letters", "sort: d b a c ->")
    print(ids)
    assert client.detokenize("letters", ids) == "sort: d b a c ->"


def from_threads(client: Client) -> None:
    """Share a client between threads. Each thread reads its own streams."""

    def count(start: int) -> str:
        return client.complete("letters", f"count to {start + 3}: {start} {start + 1} ->", temperature=0).text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(count, range(10, 26)))
    print(answers)
    assert answers[0].split() == ["12", "13"]


def with_patience(client: Client, model: str, prompt: str, **request: Any) -> Completion:
    """Try again after errors that may not occur the next time.

    The client makes a lost connection again by itself. But the program must decide whether to send the request again:
    the first one may have been computed, although its answer was lost.
    """
    for pause_s in (0.1, 0.5, 2.0):
        try:
            return client.complete(model, prompt, **request)
        except WireError as e:
            if not e.retryable:
                raise
            time.sleep(pause_s if e.retry_after_ms is None else e.retry_after_ms / 1000)
    return client.complete(model, prompt, **request)


def main() -> int:
    with Client() as client:
        for part in (stream, several_answers, one_of, how_far_it_is, tokens, from_threads):
            print(f"--- {part.__name__}")
            part(client)
        print(with_patience(client, "letters", "sort: d b a c ->", temperature=0).text)
        try:
            client.complete("letters", "x", temperature=11)
        except WireError as e:
            print(e, e.field)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
