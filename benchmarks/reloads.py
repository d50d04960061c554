"""Reload under load: no request may be lost, and one worker must serve each request from beginning to end.

    python -m benchmarks.reloads [--rate 50] [--times 20]

The demo model ``letters`` on the embedded engine gets its test prompts at a steady rate, whether earlier answers have
come or not. Meanwhile it is reloaded, 20 times beside the old worker and 20 times by exchange, without a pause. Every
answer is compared with the right one. The generation in every event shows which worker served it.
"""

import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Server, arguments_for
from benchmarks.report import Result, write
from tests.raw_client import Heard, RawClient
from tools.demo_models.corpus import LETTERS_TEST_PROMPTS

MODEL = {
    "model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 16, "max_queue": 10_000,
}  # fmt: skip
PROMPTS = LETTERS_TEST_PROMPTS
LAST_ANSWERS_S = 60.0


@dataclass
class Load:
    """Requests at a steady rate, from a thread of its own."""

    runtime_dir: Path
    rate: float
    asked: list[tuple[float, str]] = field(default_factory=list)
    """(time, right answer) of request 1, 2, ..."""
    heard: dict[int, Heard] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    refused: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._open: set[int] = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def finish(self) -> None:
        """Send no more requests, and wait for the answers."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begun, deadline = time.monotonic(), float("inf")
        with RawClient(self.runtime_dir) as client:
            self.heard = client.heard
            while len(self.ended) + len(client.errors) < len(self.asked) or not self._stop.is_set():
                now = time.monotonic()
                if self._stop.is_set():
                    deadline = min(deadline, now + LAST_ANSWERS_S)
                    if now > deadline:
                        break
                elif now >= begun + len(self.asked) / self.rate:
                    self._ask(client, now)
                    continue
                if client.socket.poll(5):
                    with suppress(AssertionError):  # it was a ping, and nothing has come behind it yet
                        client.receive(0)
                    self._note_ends(client)
            self.refused = len(client.errors)

    def _ask(self, client: RawClient, now: float) -> None:
        prompt, wanted = PROMPTS[len(self.asked) % len(PROMPTS)]
        self.asked.append((now, wanted))
        self._open.add(len(self.asked))
        client.generate(len(self.asked), "letters", prompt, max_tokens=64)

    def _note_ends(self, client: RawClient) -> None:
        for request in [r for r in self._open if client.heard.get(r, Heard()).ends]:
            self._open.discard(request)
            self.ended[request] = time.monotonic()


def reload(server: Server, how: str) -> float:
    """Return the seconds that a reload took."""
    begun = time.monotonic()
    server.modelctl("reload", "letters", f"--{how}")
    return time.monotonic() - begun


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--times", type=int, default=20)
    arguments = parser.parse_args()
    times = 2 if arguments.quick else arguments.times
    took: dict[str, list[float]] = {}
    with Server({"letters": MODEL}) as server:
        load = Load(server.runtime_dir, arguments.rate)
        begun = time.monotonic()
        for how in ("beside", "exchange"):
            took[how] = [reload(server, how) for _ in range(times)]
        seconds = time.monotonic() - begun
        load.finish()
        generation = server.status("letters")["generation"]
    answers = {request: load.heard[request] for request in load.ended}
    wrong = sum(
        heard.text.strip() != load.asked[request - 1][1].strip() or len(heard.ends) != 1 or heard.after_end > 0
        for request, heard in answers.items()
    )
    waited = sorted(at - load.asked[request - 1][0] for request, at in load.ended.items())
    results = [
        Result("reloads", generation - 1, "times", f">= {2 * times}"),
        Result("requests", len(load.asked), "requests"),
        Result("requests per second", len(load.asked) / seconds, "1/s"),
        Result("requests lost (refused, or without an end)", len(load.asked) - len(answers), "requests", "<= 0"),
        Result("answers that are not the computed one", wrong, "answers", "<= 0"),
        Result(
            "requests served by more than one generation",
            sum(len(heard.generations) != 1 for heard in answers.values()), "requests", "<= 0",
        ),
        Result("generations that served", len({g for h in answers.values() for g in h.generations}), "generations"),
        Result("median time of a reload beside", statistics.median(took["beside"]), "s"),
        Result("median time of a reload by exchange", statistics.median(took["exchange"]), "s"),
        Result("median time of an answer", 1000 * statistics.median(waited), "ms"),
        Result("longest time of an answer", waited[-1], "s"),
    ]  # fmt: skip
    write("reloads", results, arguments.out)


if __name__ == "__main__":
    main()
