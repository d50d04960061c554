"""Place models on a real machine: plan, auto, refusal, eviction, waiting for VRAM, reload (beside, exchange).

    python -m benchmarks.placing [--model letters]

Each of these is done once, with real workers on one GPU (``auto`` chooses the GPU). ``vram_limit`` is set to the
estimate of one and a half models, so that small models fill a large GPU. The output of the commands and the log are
kept beside the figures, in ``placing.txt``.
"""

import argparse
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import MODELCTL, Server, arguments_for, entry, requests
from benchmarks.report import Result, write
from protocol.errors import WireError

WITHIN = 120.0


class Story:
    """The events in their order, as text for people."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, title: str, text: str) -> None:
        print(f"== {title}\n{text.strip()}\n", flush=True)
        self._parts.append(f"== {title}\n{text.strip()}\n")

    def keep(self, path: Path) -> None:
        """Write the text to a file, without parts that are specific to this machine."""
        text = re.sub(r"/tmp/modelctl-bench-\w+", "DIR", "\n".join(self._parts))
        path.write_text(re.sub(r"(?m)^\d{4}-\d\d-\d\d ", "", text))


def command(server: Server, *arguments: str) -> str:
    """Return the output of a command, with its exit code."""
    done = subprocess.run(
        [*MODELCTL, *arguments, "--runtime-dir", str(server.runtime_dir)], capture_output=True, text=True
    )
    return f"$ modelctl {' '.join(arguments)}\n{done.stdout}{done.stderr}(exit code {done.returncode})"


def log_of(server: Server, pattern: str) -> str:
    """Return matching lines of the supervisor's log."""
    lines = (server.runtime_dir / "logs" / "supervisor.log").read_text().splitlines()
    return "\n".join(line for line in lines if re.search(pattern, line))


def wait_for(server: Server, model: str, state: str) -> dict[str, Any]:
    return server.wait_state(model, state, WITHIN)


def ask(server: Server, model: str, fields: dict[str, Any]) -> tuple[str, float]:
    """Return an answer, and the seconds that it took."""
    begun = time.perf_counter()
    with server.client() as client:
        text = client.complete(model, **fields, max_tokens=16, temperature=0).text
    return text, time.perf_counter() - begun


def plan(made: dict[str, Any], story: Story) -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "models.yaml"
        config.write_text(yaml.safe_dump({"models": {name: made | {"gpu": "auto"} for name in "ab"}}))
        done = subprocess.run([*MODELCTL, "plan", str(config)], capture_output=True, text=True)
        story.add("plan", f"$ modelctl plan\n{done.stdout}{done.stderr}(exit code {done.returncode})")


def auto_and_refusal(made: dict[str, Any], story: Story) -> tuple[list[Result], int]:
    """Place a model with ``auto``, and have another one refused. Return also the estimated bytes of a model."""
    free = made | {"gpu": "auto", "autostart": False}
    with Server({"a": free, "b": free | {"vram": "1000GiB"}}, wait=False) as server:
        server.modelctl("start", "a")
        status = wait_for(server, "a", "ready")
        refused = command(server, "start", "b")
        story.add(
            "auto, and a refusal", f"{command(server, 'ps')}\n\n{refused}\n\n{log_of(server, 'placed|holds|room')}"
        )
    held, estimated = status["vram_loaded_bytes"] or 0, status["vram_estimate_bytes"]
    return [
        Result("auto: the measured memory over the estimate", held / estimated, "ratio"),
        Result("refused with the arithmetic", float("needs 1000.0 GiB" in refused), "times", ">= 1"),
    ], estimated


def eviction(made: dict[str, Any], limit: dict[str, Any], asked: dict[str, Any], story: Story) -> list[Result]:
    with Server({name: made | {"lazy": True} for name in "ab"}, wait=False, settings=limit) as server:
        wanted, _ = ask(server, "a", asked)
        text, first = ask(server, "b", asked)
        why = server.status("a")["unloaded"]
        again, second = ask(server, "a", asked)
        story.add("eviction", f"{command(server, 'ps')}\n\n{log_of(server, 'unloading|evicted|VRAM back|-> ready')}")
    return [
        Result("evictions that made room", float(why == "evicted for b"), "times", ">= 1"),
        Result("wrong answers after an eviction", float(text != wanted) + float(again != wanted), "answers", "<= 0"),
        Result("first answer of a model that another makes room for", max(first, second), "s"),
    ]


def waiting(made: dict[str, Any], story: Story) -> list[Result]:
    with Server({"a": made}) as server:
        pid = server.status("a")["pid"]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + WITHIN
        while (status := server.status("a"))["state"] != "ready" or status["pid"] == pid:
            if time.monotonic() > deadline:
                raise TimeoutError("the killed model is not back")
            time.sleep(0.02)
        story.add("waiting for VRAM", log_of(server, "VRAM|pid|starting"))
    return [Result("the killed worker's memory was back after", status["vram_returned_ms"] or 0.0, "ms")]


def reload(
    made: dict[str, Any], settings: dict[str, Any], asked: dict[str, Any], story: Story, how: str
) -> list[Result]:
    """Reload once while threads ask all the time."""
    with Server({"a": made | {"max_queue": 10_000}}, settings=settings) as server:
        wanted, _ = ask(server, "a", asked)
        over = threading.Event()
        texts: list[str | None] = []

        def load() -> None:
            while not over.is_set():
                text = None
                with suppress(WireError):
                    text, _ = ask(server, "a", asked)
                texts.append(text)

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun = time.perf_counter()
        output = command(server, "reload", "a")
        seconds = time.perf_counter() - begun
        over.set()
        for thread in threads:
            thread.join()
        generation = server.status("a")["generation"]
        story.add(f"reload, {how}", f"{output}\n\n{log_of(server, '->|placed|VRAM')}")
    done = "the new worker beside the old" in output
    return [
        Result(f"reload, {how}: done so", float(generation == 2 and done == (how == "beside")), "times", ">= 1"),
        Result(f"reload, {how}: requests meanwhile", len(texts), "requests"),
        Result(f"reload, {how}: lost or wrong", sum(text != wanted for text in texts), "requests", "<= 0"),
        Result(f"reload, {how}: takes", seconds, "s"),
    ]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", default="letters")
    parser.add_argument("--vram", help="what the model takes, for an engine without an estimate")
    arguments: argparse.Namespace = parser.parse_args()
    made = entry(arguments, arguments.model, 4, 4 * 512, 512)
    if arguments.vram:
        made["vram"] = arguments.vram
    asked = requests(arguments.model, made["model_dir"], 1)[0].fields
    story = Story()
    plan(made, story)
    results, size = auto_and_refusal(made, story)
    limit = {"vram_limit": int(1.5 * size)}
    results += eviction(made, limit, asked, story)
    results += waiting(made, story)
    results += reload(made, {}, asked, story, "beside")
    results += reload(made, limit, asked, story, "exchange")
    arguments.out.mkdir(exist_ok=True)
    story.keep(arguments.out / "placing.txt")
    write("placing", results, arguments.out)


if __name__ == "__main__":
    main()
