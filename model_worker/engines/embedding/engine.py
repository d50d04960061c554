"""Engine embedding: vectors of texts and scores of documents, on the transformers library.

In float32 on the CPU, in float16 on a GPU. There is no cache and no stream of tokens. A step tokenizes some texts, or
computes one batch. ``batches`` decides which texts share a batch.
"""

import hashlib
import os
import time
from collections.abc import Callable

import numpy
import torch

from model_worker.embedding import EmbedJob, NewVectors, texts_in_piece
from model_worker.engine import (
    Capabilities,
    ChatTemplate,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    LoadError,
    Prefilling,
    ProgressCallback,
)
from model_worker.engines.base import TokenizingEngine
from model_worker.engines.embedded.load import device_name
from model_worker.engines.embedding.batches import Batches
from model_worker.engines.embedding.compute import EmbeddingModel, shortened
from model_worker.engines.embedding.directory import (
    CPU_BATCH_TOKENS,
    GPU_BATCH_TOKENS,
    CheckedEmbeddingModel,
    Recipe,
    check,
    read_options,
)
from model_worker.engines.embedding.texts import Row, TextReader
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.vetting import understood
from protocol.errors import ErrorCode, WireError
from protocol.messages import FinishReason
from protocol.process.worker_spec import EngineSpec

_READ_CHARACTERS = 1 << 17
"""Characters of texts that one step tokenizes, about. They take some 50 ms."""
_TEXT_CHARACTERS = 64
"""Characters that a text counts more than it has: what is done for each, also for an empty one."""
_CHUNK = 1024
"""Texts of a request that are given to ``Batches`` at once. Vectors are sent in the order of the texts, and those of a
chunk come in any order."""


class _Request:
    """A job, and what there is of it.

    rows      of the texts so far; a row is forgotten when it was computed
    given     how many of them ``Batches`` has had
    vectors   by number of the text, until they are sent
    reported  texts whose vectors were sent
    """

    def __init__(self, job: EmbedJob, size: int) -> None:
        self.job, self.size, self.piece = job, size, texts_in_piece(size)
        self.rows: list[Row | None] = []
        self.given = self.reported = min(len(job.texts), job.sent * self.piece)
        self.left = 0
        self.vectors: dict[int, numpy.ndarray] = {}
        self.tokens = 0
        self.began: float | None = None

    @property
    def is_read(self) -> bool:
        return len(self.rows) == len(self.job.texts)


def _maker(directory: ModelDir, recipe: Recipe) -> bytes:
    """Return the digest of a model and of how it is used, see ``NewVectors``."""
    said = [repr(recipe)]
    for file in sorted(each for each in directory.path.rglob("*") if each.is_file()):
        state = file.stat()
        said.append(f"{file.relative_to(directory.path)} {state.st_size} {state.st_mtime_ns}")
    return hashlib.blake2b("\n".join(said).encode(errors="surrogateescape"), digest_size=8).digest()


class EmbeddingEngine(TokenizingEngine):
    """One model. See ``Engine`` and ``model_worker.embedding``."""

    def __init__(self, spec: EngineSpec) -> None:
        self._options = read_options(spec)
        self._spec = spec
        self._requests: dict[int, _Request] = {}
        usual = CPU_BATCH_TOKENS if spec.device == "cpu" else GPU_BATCH_TOKENS
        self._batches = Batches[int](self._options.batch_tokens or usual)
        self._steps = self._turn = 0

    def load(self, progress: ProgressCallback) -> None:
        checked = check(self._spec)
        torch.set_num_threads(self._options.threads)
        device = torch.device(self._spec.device)
        if device.type == "cuda":
            # Tokenizing the texts of a batch on one core would take longer than the GPU needs for them.
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
        with understood(self._spec.model_dir):
            self._load(checked, device, progress)

    def _load(self, checked: CheckedEmbeddingModel, device: torch.device, progress: ProgressCallback) -> None:
        directory, recipe = checked.directory, checked.recipe
        assert checked.tokenizer is not None, "a worker has the packages"
        self._tokenizer = checked.tokenizer
        vocab_size = directory.text_config.get("vocab_size")
        vocab_size = vocab_size if isinstance(vocab_size, int) else self._tokenizer.vocab_size
        answers = None
        if recipe.form == "yes_no":
            no, yes = (self._tokenizer.token_id(word) for word in ("no", "yes"))
            if no is None or yes is None:
                raise LoadError(f"{directory.tokenizer_path} has no tokens yes and no: it cannot rerank with answers")
            answers = no, yes
        self._recipe = recipe
        padding = self._padding(checked, vocab_size)
        self._model = EmbeddingModel(directory, recipe, device, progress, padding, answers)
        self._reader = TextReader(self._tokenizer, recipe, vocab_size)
        progress("warmup", 0, 1)
        self._maker = _maker(directory, recipe)
        self._model.compute([Row([padding] * min(8, recipe.most_tokens))] * 2)
        progress("warmup", 1, 1)
        self._capabilities = Capabilities(
            context=recipe.most_tokens,
            max_batch_size=self._spec.max_batch_size,
            offered=frozenset(),
            chat=False,
            device=device_name(device, self._options.threads),
            attention="whole texts, padded in batches",
            sleep_bytes=self._model.weight_bytes if self._spec.sleep else None,
            no_sleep="" if self._spec.sleep else "models.yaml does not let it sleep",
            verb=recipe.task,
        )

    def _padding(self, checked: CheckedEmbeddingModel, vocab_size: int) -> int:
        directory = checked.directory
        own = directory.text_config.get("pad_token_id")
        if own is None:
            token = directory.special_tokens.get("pad_token")
            own = None if token is None else self._tokenizer.token_id(token)
        if own is None and checked.recipe.form == "classifier":
            raise LoadError(f"{directory.path}/config.json has no pad_token_id: write the one of the model's card")
        own = 0 if own is None else own
        if type(own) is not int or not 0 <= own < vocab_size:
            raise LoadError(f"{directory.path}/config.json: pad_token_id is {own!r:.60}: must be below {vocab_size}")
        return own

    @property
    def constraints(self) -> None:
        return None

    @property
    def chat_template(self) -> ChatTemplate | None:
        return None

    def submit(self, job: EmbedJob) -> None:
        if job.id in self._requests:
            raise ValueError(f"job id {job.id} is in use")
        self._reader.check(job)
        self._requests[job.id] = _Request(job, job.dimensions or self._recipe.size)

    def step(self) -> list[EngineEvent | NewVectors]:
        if not self._requests:
            return []
        self._steps += 1
        events = self._read()
        if not self._batches:
            return events
        now = time.monotonic()
        if (until := self._batches.joins_until(now)) is not None:
            if not events:
                time.sleep(min(until - now, 0.0005))
            return events
        batch = self._batches.take()
        rows = []
        for job, number in batch.texts:
            request = self._requests[job]
            request.began = request.began or now
            row = request.rows[number]
            assert row is not None, "each text is computed once"
            rows.append(row)
            request.rows[number] = None
        vectors = self._model.compute(rows)
        for (job, number), vector in zip(batch.texts, vectors, strict=True):
            request = self._requests[job]
            if request.job.dimensions is not None:
                vector = shortened(vector[None], request.size)[0]
            request.vectors[number] = vector.numpy()
            request.left -= 1
        for job in dict.fromkeys(job for job, _ in batch.texts):
            events += self._report(self._requests[job])
        return events

    def _read(self) -> list[EngineEvent | NewVectors]:
        """Tokenize some texts of each request that is not read yet. Return the events of those that are read now."""
        unread = [request for request in self._requests.values() if not request.is_read]
        events: list[EngineEvent | NewVectors] = []
        left, self._turn = _READ_CHARACTERS, self._turn + 1
        for place in range(len(unread)):
            if left <= 0:  # at least one text of one request was read: the others have the next turns
                break
            request = unread[(place + self._turn) % len(unread)]
            job, begun, count = request.job, len(request.rows), 0
            budget = left // (len(unread) - place) + 1
            beside = _TEXT_CHARACTERS + len(job.query or "") + len(job.prompt or "")
            while budget > 0 and begun + count < len(job.texts):
                taken = len(job.texts[begun + count]) + beside
                budget, left, count = budget - taken, left - taken, count + 1
            try:
                rows = self._reader.read(job, begun, count)
            except WireError as e:
                self.cancel(job.id)
                events.append(Failed(job.id, e.with_traceback(None)))  # it would hold what was tokenized
                continue
            request.rows += rows
            request.tokens += sum(len(row.ids) for row in rows)
            if request.is_read:
                events.append(Prefilling(job.id, 0, request.tokens))
                events += self._report(request)
        return events

    def _report(self, request: _Request) -> list[EngineEvent | NewVectors]:
        """Return the events of the vectors that are there, in order. Have the next texts computed."""
        job, last = request.job, len(request.job.texts)
        events: list[EngineEvent | NewVectors] = []
        while request.reported < last:
            piece = range(request.reported, min(last, request.reported + request.piece))
            if not all(number in request.vectors for number in piece):
                break
            together = numpy.stack([request.vectors.pop(number) for number in piece])
            if not numpy.isfinite(together).all():
                self.cancel(job.id)
                message = "the model gives numbers that are not finite, in float16 on a GPU perhaps: use gpu: cpu"
                return [*events, Failed(job.id, WireError(ErrorCode.INTERNAL, message))]
            data = together.astype("<f4").tobytes()
            events.append(NewVectors(job.id, piece.start, request.size, data, self._maker))
            request.reported = piece.stop
        if request.reported == last:
            self.cancel(job.id)
            seconds = time.monotonic() - (request.began or time.monotonic())
            events.append(Finished(job.id, (), "", FinishReason.STOP, request.tokens, 0, prefill_s=seconds))
        elif not request.left and request.given < last:
            more = request.rows[request.given : request.given + _CHUNK]
            lengths = [len(row.ids) for row in more if row is not None]
            self._batches.add(job.id, lengths, time.monotonic(), request.given)
            request.given += len(lengths)
            request.left = len(lengths)
        return events

    def cancel(self, job_id: int) -> None:
        self._requests.pop(job_id, None)
        self._batches.remove(job_id)

    def reset(self) -> None:
        for job in list(self._requests):
            self.cancel(job)

    def prepare_sleep(self) -> bool:
        return False

    def sleep(self, progress: Callable[[], None]) -> None:
        self._model.move(torch.device("cpu"))

    def wake(self, progress: Callable[[], None]) -> None:
        self._model.move(torch.device(self._spec.device))

    def stats(self) -> EngineStats:
        active = sum(request.began is not None for request in self._requests.values())
        return EngineStats(len(self._requests) - active, active, self._steps)

    def close(self) -> None:
        """Do nothing: the worker's process ends."""
