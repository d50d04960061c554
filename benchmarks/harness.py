"""Shared parts of the measurements of served models: a supervisor of their own, requests, and the times of answers."""

import argparse
import asyncio
import gc
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from benchmarks.models import WHERE, path_of, source_of
from benchmarks.report import RESULTS
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from modelctl import AsyncClient, Client
from protocol.process.worker_spec import EngineSpec
from tools.demo_models import NAMES, corpus

MODELCTL = [sys.executable, "-m", "supervisor"]
LOAD_SECONDS = 300.0
SPECIAL_IDS = 2
"""Number of first ids that no random prompt holds: <s> and </s> of the models in ``benchmarks.models``."""


def arguments_for(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="exllamav2", help="exllamav2 or transformers")
    parser.add_argument("--gpu", default="0", help="an index as nvidia-smi counts, or cpu")
    parser.add_argument("--quick", action="store_true", help="a small model and few requests: tries the script itself")
    parser.add_argument("--where", type=Path, default=WHERE, help="where models are kept and made")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    return parser


def entry(
    arguments: argparse.Namespace, model: str, batch: int, cache_size: int, context: int = 2048, **keys: Any
) -> dict[str, Any]:
    """Return the entry of models.yaml for a model of ``benchmarks.models``. Sizes are in tokens."""
    gpu = arguments.gpu if arguments.gpu == "cpu" else int(arguments.gpu)
    made: dict[str, Any] = {
        "model_dir": str(path_of(model, arguments.where)), "engine": arguments.engine, "gpu": gpu,
        "max_batch_size": batch, "max_seq_len": context,
    }  # fmt: skip
    if arguments.engine == "exllamav2":
        made["cache_size"] = cache_size
    return made | keys


def spec_of(entry: dict[str, Any], sleep: bool = False) -> EngineSpec:
    """Return the specification that a worker's engine gets for an entry of models.yaml. ``sleep``: it may sleep."""
    own = ("model_dir", "engine", "gpu", "max_batch_size", "max_seq_len", "autostart")
    return EngineSpec(
        "model",
        entry["engine"],
        entry["model_dir"],
        device="cpu" if entry["gpu"] == "cpu" else "cuda",
        max_seq_len=entry["max_seq_len"],
        max_batch_size=entry["max_batch_size"],
        options={key: value for key, value in entry.items() if key not in own},
        sleep=sleep,
    )


class Server:
    """A running ``modelctl serve`` with these models (name → entry of models.yaml). A context manager.

    wait      True: wait until all models are ready
    settings  the ``supervisor`` section of models.yaml
    gateway   the ``gateway`` section; None for no gateway
    groups    the ``groups`` section; None for none
    cluster   the ``cluster`` section; None for none
    """

    def __init__(
        self,
        models: dict[str, dict[str, Any]],
        wait: bool = True,
        settings: dict[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        groups: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
    ) -> None:
        self._models, self._wait, self._settings = models, wait, settings or {}
        sections = {"gateway": gateway, "groups": groups, "cluster": cluster}
        self._sections = {name: section for name, section in sections.items() if section is not None}
        self._scratch = tempfile.TemporaryDirectory(prefix="modelctl-bench-")
        self.runtime_dir = Path(self._scratch.name) / "run"

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` must not leave a supervisor behind
        config = Path(self._scratch.name) / "models.yaml"
        config.write_text(yaml.safe_dump({"models": self._models, "supervisor": self._settings, **self._sections}))
        try:
            self.modelctl("serve", "--detach", "-c", str(config))
            if self._wait:
                for worker in self.workers:
                    self.wait_state(worker, "ready")
        except BaseException:
            self._print_logs()
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is not None:
            self._print_logs()
        subprocess.run([*MODELCTL, "shutdown", "--now", "--runtime-dir", str(self.runtime_dir)], check=False)
        self._scratch.cleanup()

    def _print_logs(self) -> None:
        for log in self.runtime_dir.glob("logs/*.log"):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)

    def modelctl(self, *arguments: str) -> float:
        """Run a command and return the seconds that it took. Raises CalledProcessError."""
        begun = time.perf_counter()
        command = [*MODELCTL, *arguments, "--runtime-dir", str(self.runtime_dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    @property
    def workers(self) -> list[str]:
        """Return the names of all workers, as the supervisor has them."""
        return [m["name"] for m in self.overview()["models"]]

    def client(self) -> Client:
        return Client(runtime_dir=self.runtime_dir)

    def overview(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()

    def status(self, model: str) -> dict[str, Any]:
        return next(m for m in self.overview()["models"] if m["name"] == model)

    def wait_state(self, model: str, state: str, within: float = LOAD_SECONDS) -> dict[str, Any]:
        """Wait for a state of the model and return its status. Raises TimeoutError, and RuntimeError if the model has
        failed."""
        deadline = time.monotonic() + within
        while (status := self.status(model))["state"] != state:
            if status["state"] == "failed" or time.monotonic() > deadline:
                kind = RuntimeError if status["state"] == "failed" else TimeoutError
                raise kind(f"{model} is {status['state']}, not {state}: {status['last_exit']}")
            time.sleep(0.02)
        return status

    def wait_idle(self, model: str, within: float = 10.0) -> dict[str, Any]:
        """Wait until no request is left in the queue, the worker or the engine. Return the model's status."""
        deadline = time.monotonic() + within
        while True:
            status = self.status(model)
            engine = status["engine_stats"]
            if not (status["active"] or status["queued"] or engine.get("active") or engine.get("pending")):
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"{model} still has {status['active']} active, engine {engine}")
            time.sleep(0.02)


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and the fields by which a client sends it."""

    ids: list[int]
    fields: dict[str, Any]


def requests(model: str, directory: str | Path, count: int, tokens: int = 64, seed: int = 0) -> list[Request]:
    """Return prompts: random ids for random weights; for the demo models their test prompts, whatever ``tokens`` is."""
    if source_of(model) in NAMES:
        tokenizer = Tokenizer(ModelDir(str(directory)))
        texts = [text for text, _ in corpus.TEST_PROMPTS[source_of(model)]]
        texts = [texts[(seed * count + i) % len(texts)] for i in range(count)]
        return [Request(list(tokenizer.encode(text)), {"prompt": text}) for text in texts]
    vocab = int(json.loads(Path(directory, "config.json").read_text())["vocab_size"])
    draw = random.Random(seed)
    prompts = [[draw.randrange(SPECIAL_IDS, vocab) for _ in range(tokens)] for _ in range(count)]
    return [Request(ids, {"token_ids": ids}) for ids in prompts]


@dataclass
class Run:
    """Requests that began together. For each one the deltas that came, as (seconds since the beginning, tokens).

    steps  seconds of each step of the generator in which all requests got a token and no prompt was read
    """

    streams: list[list[tuple[float, int]]]
    steps: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(n for stream in self.streams for _, n in stream)

    @property
    def rate(self) -> float:
        """Return the tokens per second up to the last token."""
        return self.tokens / max(stream[-1][0] for stream in self.streams)

    @property
    def first(self) -> float:
        """Return the seconds to the first token, the median of the streams."""
        return statistics.median(next(at for at, n in stream if n) for stream in self.streams)

    def _together(self) -> list[list[float]]:
        """Return the times of each stream's tokens while all streams run."""
        begin, end = max(s[0][0] for s in self.streams), min(s[-1][0] for s in self.streams)
        return [[at for at, n in stream for _ in range(n) if begin <= at <= end] for stream in self.streams]

    def gaps(self) -> list[float]:
        """Return the seconds between two deltas of a stream while all streams run."""
        return [b - a for times in self._together() for a, b in itertools.pairwise(sorted(set(times)))]

    def last_tenth(self) -> float:
        """Return how much faster the last tenth of a stream's tokens came than all its tokens while all streams ran.

        This is the largest ratio of all streams. (Later the batch is smaller, and its steps are shorter.)
        """
        ratios = []
        for times in self._together():
            last = len(times) // 10
            if last > 1 and times[-1] > times[0]:
                own = (len(times) - 1) / (times[-1] - times[0])
                ratios.append(last / max(times[-1] - times[-1 - last], 1e-9) / own)
        return max(ratios, default=0.0)

    def last_delta(self) -> int:
        """Return the most tokens that came with the end of an answer."""
        return max(stream[-1][1] for stream in self.streams)


async def _served(runtime_dir: Path, model: str, asked: Sequence[Request], tokens: int) -> Run:
    async with AsyncClient(runtime_dir=runtime_dir) as client:
        begun = time.perf_counter()

        async def one(request: Request) -> list[tuple[float, int]]:
            stream = client.generate(model, max_tokens=tokens, temperature=0, **request.fields)
            return [(time.perf_counter() - begun, len(delta.token_ids)) async for delta in stream]

        return Run(list(await asyncio.gather(*(one(request) for request in asked))))


def served(server: Server, model: str, asked: Sequence[Request], tokens: int) -> Run:
    """Return greedy answers that one client connection received."""
    return asyncio.run(_served(server.runtime_dir, model, asked, tokens))


def quiet_heap() -> None:
    """Keep the garbage collector away from loaded objects: this process is both a client and the bare generator."""
    gc.collect()
    gc.freeze()


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
