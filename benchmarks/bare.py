"""Answer the same requests without this project's serving, as the reference for a served model.

The reference is the package's own dynamic generator, jobs and sampling in one process for ExLlamaV2, and the engine
itself for transformers.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.harness import Request, Run, spec_of
from model_worker.engine import Failed, Finished, Job, NewTokens
from model_worker.engines import build_engine
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams


class Bare(Protocol):
    def run(self, asked: Sequence[Request], tokens: int) -> Run:
        """Compute greedy answers of at most ``tokens`` tokens to all requests at once."""

    def close(self) -> None:
        """Free the memory."""


def bare(entry: dict[str, Any]) -> Bare:
    """Load the model of an entry of models.yaml into this process."""
    spec = spec_of(entry | ({"graphs": False} if entry["engine"] == "exllamav2" else {}))
    return BareGenerator(spec) if spec.engine == "exllamav2" else BareEngine(spec)


class BareGenerator:
    """ExLlamaV2DynamicGenerator alone, except that our attention may replace flash-attn."""

    def __init__(self, spec: EngineSpec) -> None:
        from model_worker.engines.exllamav2.check import check
        from model_worker.engines.exllamav2.load import load, make_generator

        self._loaded = load(check(spec), lambda *_: None)
        self.generator = make_generator(self._loaded, spec.max_batch_size)

    def run(self, asked: Sequence[Request], tokens: int) -> Run:
        import torch

        package, generator = self._loaded.generator, self.generator
        greedy = package.ExLlamaV2Sampler.Settings.greedy
        eos = self._loaded.tokenizer.eos_token_id
        streams: list[list[tuple[float, int]]] = [[] for _ in asked]
        steps = []
        begun = time.perf_counter()
        for number, request in enumerate(asked):
            generator.enqueue(
                package.ExLlamaV2DynamicJob(
                    input_ids=torch.tensor([request.ids]),
                    max_new_tokens=tokens,
                    gen_settings=greedy(),
                    stop_conditions=[eos],
                    identifier=number,
                )
            )
        before = begun
        while generator.num_remaining_jobs():
            results = generator.iterate()
            now = time.perf_counter()
            going_on = 0
            for result in results:
                if result["stage"] == "streaming":
                    stream, got = streams[result["identifier"]], result.get("token_ids")
                    going_on += bool(stream)
                    stream.append((now - begun, 0 if got is None else got.shape[-1]))
            if going_on == len(asked):
                steps.append(now - before)
            before = now
        return Run(streams, steps)

    def close(self) -> None:
        import torch

        self._loaded.model.unload()
        del self._loaded, self.generator
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


class BareEngine:
    """An engine of this project, which this process steps itself."""

    def __init__(self, spec: EngineSpec) -> None:
        self._engine = build_engine(spec)
        self._engine.load(lambda *_: None)

    def run(self, asked: Sequence[Request], tokens: int) -> Run:
        engine = self._engine
        sampling = SamplingParams(temperature=0.0)
        streams: list[list[tuple[float, int]]] = [[] for _ in asked]
        steps = []
        begun = time.perf_counter()
        for number, request in enumerate(asked):
            engine.submit(Job(number, tuple(request.ids), tokens, sampling))
        left, before = len(asked), begun
        while left:
            events = engine.step()
            now = time.perf_counter()
            going_on = 0
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if not isinstance(event, NewTokens | Finished):
                    continue
                going_on += bool(streams[event.job])
                streams[event.job].append((now - begun, len(event.token_ids)))
                left -= isinstance(event, Finished)
            if going_on == len(asked):
                steps.append(now - before)
            before = now
        return Run(streams, steps)

    def close(self) -> None:
        self._engine.close()
