"""Write directories of tiny embedding models and rerankers, with random weights, by transformers' own classes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from model_worker.embedding import EmbedJob, NewVectors
from model_worker.engine import EngineEvent, Failed, Finished
from model_worker.engines.embedding.engine import EmbeddingEngine
from protocol.process.worker_spec import EngineSpec

_TEXT = "the a fox dog runs jumps over under lazy quick brown big small red blue , . is was what who yes no"
WORDS = _TEXT.split()
TEXTS = ["the quick brown fox", "a", "the lazy dog , is red .", _TEXT]
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip
_QWEN = _SIZES | {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0}
KINDS = {
    "bert": ("Bert", _SIZES | {"max_position_embeddings": 64}),
    "xlm-r": ("XLMRoberta", _SIZES | {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBert", _SIZES | {"max_position_embeddings": 64, "pad_token_id": 0, "local_attention": 8}),
    "qwen3": ("Qwen3", _QWEN),
}
"""The name of the library's classes, and the sizes of a tiny one, by kind."""


def write(directory: Path, kind: str, use: str = "Model", **changes: Any) -> Path:
    """Write a model without the files of sentence-transformers. ``use``: the end of its class's name."""
    family, sizes = KINDS[kind]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**(sizes | changes))
    model = getattr(transformers, f"{family}{use}")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.eval().save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(_vocabulary())}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "<|im_end|>"])
    end, second = ("[SEP]:0", "[SEP]:1") if kind == "bert" else ("[SEP]:0", "[SEP]:0")
    single, pair = f"[CLS]:0 $A:0 {end}", f"[CLS]:0 $A:0 {end} $B:{second[-1]} {second}"
    if kind == "qwen3":
        single, pair = "$A:0 [SEP]:0", "$A:0 $B:0 [SEP]:0"
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    tokenizer.enable_truncation(16)  # as in many directories: both must be switched off
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "model_max_length": 64}))
    return directory


def _vocabulary() -> list[str]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<|im_end|>", *WORDS]
    return words + [f"w{number}" for number in range(64 - len(words))]


def describe(directory: Path, pooling: Any = "mean", *, normalize: bool = True, old: bool = False, **more: Any) -> Path:
    """Write the files of sentence-transformers beside a model."""
    places = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
    if not old:
        places = [
            "sentence_transformers.base.modules.transformer.Transformer",
            "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        ]
    modules = [{"idx": i, "name": str(i), "path": "1_Pooling" if i else "", "type": t} for i, t in enumerate(places)]
    if normalize:
        kind = "sentence_transformers.base.modules.normalize.Normalize"
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": kind})
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    config = {"embedding_dimension": 32, "pooling_mode": pooling, **more}
    if old:
        config = {"word_embedding_dimension": 32, f"pooling_mode_{pooling}": True, **more}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return directory


def write_both(root: Path) -> dict[str, Path]:
    """Write "bert", which makes vectors, and "cross", which scores documents. Return their directories."""
    return {
        "bert": describe(write(root / "bert", "bert")),
        "cross": write(root / "cross", "bert", "ForSequenceClassification", num_labels=1),
    }


def engine(directory: Path, max_seq_len: int | None = None, **options: Any) -> EmbeddingEngine:
    made = EmbeddingEngine(EngineSpec("m", "embedding", str(directory), "cpu", max_seq_len, options=options))
    made.load(lambda *_: None)
    return made


def run(engine: EmbeddingEngine) -> list[EngineEvent | NewVectors]:
    """Run all jobs of an engine. Return their events."""
    return list(_events(engine))


def _events(engine: EmbeddingEngine) -> Iterator[EngineEvent | NewVectors]:
    while engine.stats().pending + engine.stats().active:
        yield from engine.step()


def vectors(engine: EmbeddingEngine, texts: Sequence[Any], **fields: Any) -> numpy.ndarray:
    """Return the vectors, or scores, of texts in one request. Raises the error of a request that failed."""
    engine.submit(EmbedJob(1, texts, **fields))
    events = run(engine)
    failed = [event.error for event in events if isinstance(event, Failed)]
    if failed:
        raise failed[0]
    assert [type(event) for event in events].count(Finished) == 1
    return numpy.concatenate(
        [numpy.frombuffer(e.data, "<f4").reshape(-1, e.size) for e in events if isinstance(e, NewVectors)]
    )
