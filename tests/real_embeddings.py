"""A real embedding model, all-MiniLM-L6-v2, gives the vectors of sentence-transformers 6.2, alone and in any batch.

``make test-real`` runs this file, since the model is downloaded (84 MB). ``tools/sentence_vectors.py`` has recorded the
vectors.
"""

import base64
import json
import random
from pathlib import Path

import numpy
import pytest

from model_worker.engines.embedding.engine import EmbeddingEngine
from tests.engines.tiny_embedding import engine, vectors
from tools.embedding_model import make, place
from tools.real_model import NotMade

RECORDED = json.loads((Path(__file__).parent / "engines" / "minilm_vectors.json").read_text(encoding="utf-8"))
TEXTS: list[str] = RECORDED["texts"]
EXPECTED = numpy.stack([numpy.frombuffer(base64.b64decode(text), "<f4") for text in RECORDED["vectors"]])
CLOSE = 1e-5


@pytest.fixture(scope="module")
def minilm() -> EmbeddingEngine:
    try:
        make(place())
    except (NotMade, OSError) as e:
        pytest.skip(f"all-MiniLM-L6-v2 cannot be fetched: {e}")
    return engine(place())


def test_each_text_alone(minilm: EmbeddingEngine) -> None:
    found = numpy.concatenate([vectors(minilm, [text], truncate=True) for text in TEXTS])
    print(f"largest difference alone: {abs(found - EXPECTED).max():.2e}")
    assert abs(found - EXPECTED).max() < CLOSE


def test_in_any_batch(minilm: EmbeddingEngine) -> None:
    drawn, worst = random.Random(5), 0.0
    for _ in range(20):
        order = drawn.choices(range(len(TEXTS)), k=drawn.randint(2, 40))
        found = vectors(minilm, [TEXTS[number] for number in order], truncate=True)
        worst = max(worst, abs(found - EXPECTED[order]).max())
    print(f"largest difference in batches: {worst:.2e}")
    assert worst < CLOSE


def test_the_similarities_of_the_models_card(minilm: EmbeddingEngine) -> None:
    found = vectors(minilm, TEXTS[:3])
    similar = found @ found.T
    assert [round(float(similar[pair]), 4) for pair in ((0, 1), (0, 2), (1, 2))] == [0.6660, 0.1046, 0.1411]
