"""Make the package's tokenizer from ours, so that a vocabulary is read once. Reading one of 128,256 ids takes the
package longer than the weights of a small model.

The package would parse tokenizer.json twice more and have each id decoded alone. The result is the same: a test
compares it with what the package reads by itself.
"""

import json
from types import SimpleNamespace
from typing import IO, Any

from model_worker.engines.exllamav2.package_weights import replaced
from model_worker.engines.tokenizer import Tokenizer
from model_worker.text import Pieces


def make_tokenizer(core: Any, config: Any, ours: Tokenizer) -> Any:
    """Return the package's ExLlamaV2Tokenizer of a model, with the lists that its generator needs.

    core    the package's module exllamav2
    config  the package's configuration of the model
    ours    the tokenizer of the same directory
    """
    library = ours.library
    added = [
        {"id": token, "content": known.content, "special": known.special}
        for token, known in library.get_added_tokens_decoder().items()
    ]

    def load(file: IO[str]) -> Any:
        return {"added_tokens": added} if file.name.endswith("/tokenizer.json") else json.load(file)

    with (
        replaced("exllamav2.tokenizer.hf", "Tokenizer", SimpleNamespace(from_file=lambda path: library)),
        replaced("exllamav2.tokenizer.tokenizer", "json", SimpleNamespace(load=load)),
    ):
        tokenizer = core.ExLlamaV2Tokenizer(config)
    if ours.pieces is not None:
        tokenizer.tokenizer_model.vocab = _texts(ours.pieces, library.get_vocab_size())
        tokenizer.id_to_ord = []  # the next calls would make this list, too, and nothing reads it
    # Otherwise these lists are made at the first token, in the middle of the first answer.
    tokenizer.get_id_to_piece_list(True)
    tokenizer.get_id_to_piece_list(False)
    return tokenizer


def _texts(pieces: Pieces, size: int) -> list[str]:
    """Return the text of each id below ``size`` as if it were decoded alone, behind another text."""
    texts = [
        "" if piece is None else piece if isinstance(piece, str) else piece.decode(errors="replace")
        for piece in pieces.table[:size]
    ]
    return texts + [""] * (size - len(texts))
