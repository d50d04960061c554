"""Record the vectors that sentence-transformers gives for some texts, for the tests of engine embedding.

    python -m venv /tmp/st && /tmp/st/bin/pip install sentence-transformers==6.2.0
    PYTHONPATH=. /tmp/st/bin/python -m tools.sentence_vectors > tests/engines/minilm_vectors.json

The product and its tests do not need sentence-transformers: they compare with this file. It was made on a CPU, in
float32, with torch 2.13 and transformers 5.23.
"""

import base64
import json

TEXTS = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "a",
    "Größe, naïveté, 東京都, and an emoji: 🦊.",
    "  blanks   around\nand line breaks\t ",
    "UPPER and lower CASE are one for this model.",
    "[SEP] [MASK] unaffable 1234567890 http://example.com/?q=a&b=c",
    " ".join(f"word{number}" for number in range(60)),
    "The quick brown fox jumps over the lazy dog. " * 22,
    "Texts that are longer than 256 tokens are cut there. " * 80,
    "x" * 300,
]
"""The last but one is longer than the model takes, so that it is cut."""


def main() -> None:
    import sentence_transformers
    from sentence_transformers import SentenceTransformer

    from tools.embedding_model import place

    model = SentenceTransformer(str(place()), device="cpu")
    vectors = [model.encode([text], normalize_embeddings=False)[0] for text in TEXTS]
    print(
        json.dumps(
            {
                "made_by": f"sentence-transformers {sentence_transformers.__version__}, tools/sentence_vectors.py",
                "texts": TEXTS,
                "vectors": [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors],
            },
            ensure_ascii=False,
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
